/* NVML as far as trainwarden asks it, answering from the file that NVML_SAYS names. See nvml.py beside this. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT = 7, TIMEOUT = 10 };

typedef struct { int part; } device_t;
typedef device_t *handle;
typedef struct { handle device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef union { double d; unsigned u; unsigned long long ull; } value_t;
typedef struct { unsigned id, scope; long long when, took; unsigned type; int answer; value_t value; } field_t;

static device_t whole = {0}, part = {1};
static int handed_out;

/* Find a name; returns whether the file has it. Reads the file anew: a test may have changed it. */
static int look(const char *name, double *value) {
    const char *path = getenv("NVML_SAYS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char known[80];
    double number;
    int found = 0;
    if (!file) return 0;
    while (!found && fscanf(file, "%79s %lf", known, &number) == 2)
        if (!strcmp(known, name)) { *value = number; found = 1; }
    fclose(file);
    return found;
}

static double more(const char *name, char mark, int *found) {
    char full[80];
    double value = 0;
    snprintf(full, sizeof full, "%s%c", name, mark);
    *found = look(full, &value);
    return value;
}

/* Hang and fail as the file asks for. */
static int trouble(const char *name) {
    int found;
    double milliseconds = more(name, '~', &found);
    if (found) usleep((useconds_t)(1000 * milliseconds));
    int answer = (int)more(name, '!', &found);
    return found ? answer : SUCCESS;
}

static int number(const char *name, double *value) {
    int answer = trouble(name);
    if (answer) return answer;
    return look(name, value) ? SUCCESS : NOT_SUPPORTED;
}

static int whole_number(const char *name, unsigned *out) {
    double value = 0;
    int answer = number(name, &value);
    *out = (unsigned)value;
    return answer;
}

static int large_number(const char *name, unsigned long long *out) {
    double value = 0;
    int answer = number(name, &value);
    *out = (unsigned long long)value;
    return answer;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return trouble("init"); }
int nvmlShutdown(void) { return trouble("shutdown"); }
const char *nvmlErrorString(int answer) { (void)answer; return "as the file says"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, handle *out) {
    const char *own = getenv("NVML_UUID"), *of_part = getenv("NVML_MIG_UUID");
    int answer = trouble("handle");
    if (answer) return answer;
    if (own && !strncmp(uuid, "GPU-", 4) && !strcmp(uuid + 4, own)) { *out = &whole; return SUCCESS; }
    if (of_part && !strncmp(uuid, "MIG-", 4) && !strcmp(uuid + 4, of_part)) { *out = &part; return SUCCESS; }
    return strncmp(uuid, "GPU-", 4) ? INVALID : NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, handle *out) {
    const char *own = getenv("NVML_BUS");
    *out = &whole;
    return own && !strcmp(bus, own) ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(handle device, unsigned *out) { *out = (unsigned)device->part; return SUCCESS; }
int nvmlDeviceGetGpuInstanceId(handle device, unsigned *out) { (void)device; *out = 5; return SUCCESS; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle device, handle *out) {
    (void)device;
    *out = &whole;
    return SUCCESS;
}
int nvmlDeviceGetUUID(handle device, char *out, unsigned size) {
    const char *own = getenv("NVML_UUID");
    snprintf(out, size, "%s%s", device->part ? "MIG-" : "GPU-", own ? own : "");
    return SUCCESS;
}
int nvmlDeviceGetName(handle device, char *out, unsigned size) {
    (void)device;
    snprintf(out, size, "NVIDIA Pretended");
    return trouble("name");
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.1"); return SUCCESS; }

/* A part of a device has none of these: whoever asks it has not gone to the whole. */
#define WHOLE(device) do { if ((device)->part) return NOT_SUPPORTED; } while (0)

int nvmlDeviceGetTemperature(handle device, int sensor, unsigned *out) {
    (void)sensor;
    WHOLE(device);
    return whole_number("temperature", out);
}
int nvmlDeviceGetPowerUsage(handle device, unsigned *out) { WHOLE(device); return whole_number("power", out); }
int nvmlDeviceGetEnforcedPowerLimit(handle device, unsigned *out) {
    WHOLE(device);
    return whole_number("power_limit", out);
}
int nvmlDeviceGetClockInfo(handle device, int type, unsigned *out) {
    WHOLE(device);
    return type == 1 ? whole_number("clock", out) : INVALID;
}
int nvmlDeviceGetMaxClockInfo(handle device, int type, unsigned *out) {
    WHOLE(device);
    return type == 1 ? whole_number("clock_max", out) : INVALID;
}
int nvmlDeviceGetCurrentClocksEventReasons(handle device, unsigned long long *out) {
    WHOLE(device);
    return large_number("reasons", out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(handle device, unsigned long long *out) {
    WHOLE(device);
    return large_number("old_reasons", out);
}
int nvmlDeviceGetTotalEccErrors(handle device, int type, int counter, unsigned long long *out) {
    WHOLE(device);
    if (counter != 0) return INVALID;
    return large_number(type == 1 ? "ecc_uncorrected" : "ecc_corrected", out);
}
int nvmlDeviceGetRemappedRows(handle device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    WHOLE(device);
    int answer = whole_number("remapped_corrected", corrected);
    if (!answer) answer = whole_number("remapped_uncorrected", uncorrected);
    if (!answer) answer = whole_number("remapped_pending", pending);
    if (!answer) answer = whole_number("remapped_failed", failed);
    return answer;
}
int nvmlDeviceGetRetiredPages(handle device, int cause, unsigned *count, unsigned long long *addresses) {
    WHOLE(device);
    unsigned own = 0;
    int answer = whole_number(cause ? "retired_double" : "retired_single", &own);
    if (answer) return answer;
    if (!addresses || *count < own) { *count = own; return INSUFFICIENT; }
    memset(addresses, 0, own * sizeof *addresses);
    *count = own;
    return SUCCESS;
}
int nvmlDeviceGetPcieReplayCounter(handle device, unsigned *out) {
    WHOLE(device);
    return whole_number("pcie_replays", out);
}
int nvmlDeviceGetFieldValues(handle device, int count, field_t *fields) {
    WHOLE(device);
    int answer = trouble("fields");
    for (int place = 0; !answer && place < count; place++) {
        char name[80];
        double value = 0;
        snprintf(name, sizeof name, "field.%u", fields[place].id);
        fields[place].answer = look(name, &value) ? SUCCESS : NOT_SUPPORTED;
        fields[place].type = fields[place].id == 82 ? 1 : 3;
        fields[place].value.ull = 0;
        if (fields[place].type == 1) fields[place].value.u = (unsigned)value;
        else fields[place].value.ull = (unsigned long long)value;
    }
    return answer;
}

int nvmlDeviceGetSupportedEventTypes(handle device, unsigned long long *out) {
    WHOLE(device);
    return large_number("events", out);
}
int nvmlEventSetCreate(void **out) { *out = &handed_out; handed_out = 0; return SUCCESS; }
int nvmlDeviceRegisterEvents(handle device, unsigned long long types, void *events) {
    (void)events;
    WHOLE(device);
    return types == 8 ? trouble("register") : INVALID;
}
int nvmlEventSetWait_v2(void *events, event_t *out, unsigned milliseconds) {
    (void)events;
    for (unsigned waited = 0;; waited += 5) {
        char name[80];
        double code = 0, instance = 0xFFFFFFFF;
        int answer = trouble("wait");
        if (answer) return answer;
        snprintf(name, sizeof name, "xid.%d", handed_out + 1);
        if (look(name, &code)) {
            handed_out++;
            look("xid_instance", &instance);
            *out = (event_t){&whole, 8, (unsigned long long)code, (unsigned)instance, (unsigned)instance};
            return SUCCESS;
        }
        if (waited >= milliseconds) return TIMEOUT;
        usleep(5000);
    }
}
