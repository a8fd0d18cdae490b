"""What only a GPU can show, in about two minutes: no host synchronisation, graph capture unbroken, right values, the cost.

    python bench/gpu_check.py

Each check prints one line. Exit 0: all passed; 1: one failed; 2: there is no CUDA device, nothing was checked.

1. Training with fused and with capturable AdamW, with and without GradScaler and clipping, every probe at every step, under
   ``torch.cuda.set_sync_debug_mode("error")``: any synchronisation on the training thread raises inside the exporter, is
   caught there, and shows as a notice.
2. A CUDA graph is captured and replayed while the exporter's threads poll and serve; and a whole step is, forward, backward and
   capturable update: its replays record what the trainer hands in, and nothing breaks.
3. A guard leaves out a poisoned update, by the flag of a fused kernel and by copies, in the same mode; not a bit changes.
4. Recorded values equal a float64 computation on the CPU.
5. Time of a step with over without.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from torch import nn

from trainwarden.exporter import Exporter
from trainwarden.exporter.guard import Guard
from trainwarden.record import Step, decode_lines
from trainwarden.runfolder import RunFolder

WIDTH, LAYERS, STEPS = 512, 8, 30
VOCABULARY, LENGTH = 4096, 256


def make(layers: int = LAYERS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> GPT:
    """Return a model on the device."""
    return GPT(layers, width, vocabulary, LENGTH).cuda()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the next-token loss of (batch, tokens) ids."""
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def records(folder: str, run: str) -> list[Step]:
    """Return the step records of a run."""
    lines = [line for path in RunFolder(run, Path(folder)).journal_files() for line in decode_lines(path.open("rb"))]
    return [line for line in lines if isinstance(line, Step)]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let every synchronisation of this process raise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_syncs(folder: str, options: dict[str, Any], scaled: bool, clip: bool) -> str | None:
    """Train with every probe at every step; return what went wrong, None if nothing did."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaled)
    batches = [torch.randint(0, VOCABULARY, (8, 65), device="cuda") for _ in range(4)]
    name = f"syncs-{'-'.join(options)}-{scaled}-{clip}"
    exporter = Exporter(model, optimizer, run=name, dir=folder, port=0, cadence=1, reader_seconds=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = batches[step % len(batches)]
        loss = loss_of(model, ids)
        scaler.scale(loss).backward()
        with no_synchronisation():
            exporter.batch(ids, ids)
            if scaled and clip:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            exporter.step(loss)
        if step == STEPS // 2:
            with no_synchronisation():
                exporter.checkpoint(step + 1, f"{folder}/checkpoint")
    exporter.close()
    faults = [said for said in exporter.notices if "Error" in said]
    if faults:
        return "; ".join(faults)
    found = records(folder, name)
    if len(found) != STEPS:
        return f"{len(found)} records of {STEPS} steps"
    missing = {"loss", "grad_norm", "update_ratio", "weight_rms", "moment_rms", "batch_longest_repeat_tokens"}
    missing |= {"activation_rms", "activation_absmax", "attention_logit", "residual_rms", "grad_zero_ratio"}
    missing -= set(found[-1].signals)
    return f"without {', '.join(sorted(missing))}" if missing else None


def check_guard(folder: str, options: dict[str, Any], scaled: bool, clip: bool) -> str | None:
    """Train with a guard and a batch that brings NaN; return what went wrong: a wait, or a bit that its update changed."""
    torch.manual_seed(0)
    model, poisoned = make(), STEPS // 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaled)
    name = f"guard-{'-'.join(options)}-{scaled}-{clip}"
    exporter = Exporter(model, optimizer, run=name, dir=folder, port=0, reader_seconds=0.0)
    Guard(exporter, limit=1e6, factor=1e3, window=8).shrink_embeddings()
    before: list[torch.Tensor] = []

    def state() -> list[torch.Tensor]:
        found = [tensor for one in optimizer.state.values() for tensor in one.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *found)]

    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randint(0, VOCABULARY, (8, 65), device="cuda"))
        # What is too large is the guard's own business also where a scaler sees to what is not finite.
        poison = (1e9 if scaled else float("nan")) if step == poisoned else 1.0
        scaler.scale(loss * poison).backward()
        if step == poisoned:
            before = state()
        with no_synchronisation():
            if scaled and clip:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            exporter.step(loss)
        if step == poisoned and not all(torch.equal(one, other) for one, other in zip(before, state(), strict=True)):
            return "the update that was left out changed the model or the optimizer's state"
    exporter.close()
    faults = [said for said in exporter.notices if "Error" in said]
    if faults:
        return "; ".join(faults)
    found = [record.step for record in records(folder, name) if record.value("skipped") == 1]
    if found != [poisoned + 1]:
        return f"left out are the updates of steps {found}, not of {poisoned + 1}"
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return None if finite else "a parameter is not finite"


def check_values(folder: str) -> str | None:
    """Compare loss, gradient norm and update ratio with float64 on the CPU."""
    torch.manual_seed(0)
    model = make(2, 64, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    exporter = Exporter(model, optimizer, run="values", dir=folder, port=0, cadence=1, reader_seconds=0.0)
    wanted = []
    for _ in range(5):
        ids = torch.randint(0, 128, (4, 33), device="cuda")
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        old = [parameter.detach().cpu().double() for parameter in model.parameters()]
        gradients = [parameter.grad.cpu().double() for parameter in model.parameters() if parameter.grad is not None]
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        optimizer.step()
        exporter.step(loss)
        new = [parameter.detach().cpu().double() for parameter in model.parameters()]
        change = float(torch.cat([(a - b).flatten() for a, b in zip(new, old, strict=True)]).norm())
        size = float(torch.cat([tensor.flatten() for tensor in new]).norm())
        wanted.append((float(loss.detach()), norm, change / size))
    exporter.close()
    for record, (value, norm, ratio) in zip(records(folder, "values"), wanted, strict=True):
        pairs = (("loss", value, 1e-6), ("grad_norm", norm, 1e-5), ("update_ratio", ratio, 1e-3))
        for signal, want, tolerance in pairs:
            seen = record.value(signal)
            if seen is None or abs(seen - want) > tolerance * abs(want):
                return f"step {record.step}: {signal} is {seen}, float64 says {want}"
    return None


def check_capture(folder: str) -> str | None:
    """Capture and replay a graph while steps are on their way and the drain thread polls."""
    model = make(2, 64, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = Exporter(model, optimizer, run="capture", dir=folder, port=0, cadence=1, reader_seconds=0.0)
    for _ in range(50):
        exporter.step(torch.ones((), device="cuda"))
    held, graph = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(20):
            held += 1
        time.sleep(0.3)  # the threads poll in the middle of the capture
    graph.replay()
    exporter.step(torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    value = float(held[0])
    exporter.close()
    if value != 20.0:
        return f"the replayed graph gives {value}, not 20"
    return "; ".join(said for said in exporter.notices if "Error" in said) or None


def check_whole_step(folder: str) -> str | None:
    """Capture a whole step with the exporter attached and replay it; the losses that are handed in must be in the records."""
    torch.manual_seed(0)
    model = make(2, 64, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    exporter = Exporter(model, optimizer, run="whole", dir=folder, port=0, cadence=1, reader_seconds=0.0)
    ids = torch.randint(0, 128, (4, 33), device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            exporter.step(step())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(20):
        graph.replay()
        losses.append(loss.detach().clone())
        with no_synchronisation():
            exporter.step(loss)
    wanted = [float(value) for value in losses]
    exporter.close()
    faults = [said for said in exporter.notices if "Error" in said]
    seen = [record.value("loss") for record in records(folder, "whole")][3:]
    if faults:
        return "; ".join(faults)
    return None if seen == wanted else f"recorded losses {seen[:3]}…, handed in {wanted[:3]}…"


def overhead(folder: str) -> dict[str, float]:
    """Return the time of a step with over without, at the default cadence and with every probe at every step."""
    model = make(16, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCABULARY, (16, LENGTH + 1), device="cuda")

    def block(settings: dict[str, Any] | None) -> float:
        exporter = None
        if settings is not None:
            exporter = Exporter(model, optimizer, run="cost", dir=folder, port=0, reader_seconds=0.0, **settings)
        began = 0.0
        for step in range(21):
            if step == 1:
                torch.cuda.synchronize()
                began = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if exporter is not None:
                exporter.step(loss)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if exporter is not None:
            exporter.close()
        return seconds

    block(None)
    totals = {"base": 0.0, "default": 0.0, "full": 0.0}
    for _ in range(10):
        totals["base"] += block(None)
        totals["default"] += block({"cadence": 10})
        totals["full"] += block({"cadence": 1})
    return {arm: totals[arm] / totals["base"] for arm in ("default", "full")}


def main() -> int:
    """Run all checks and return the exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        checks = {
            f"no synchronisation: {' '.join(options)}{', scaler' if scaled else ''}{', clipping' if clip else ''}": (
                lambda options=options, scaled=scaled, clip=clip: check_syncs(folder, options, scaled, clip)
            )
            for options in ({"fused": True}, {"capturable": True})
            # Without a fused kernel GradScaler itself waits for the device to learn whether to skip.
            for scaled in ((False, True) if "fused" in options else (False,))
            for clip in (False, True)
        }
        checks |= {
            f"guard: {' '.join(options)}{', scaler' if scaled else ''}{', clipping' if clip else ''}": (
                lambda options=options, scaled=scaled, clip=clip: check_guard(folder, options, scaled, clip)
            )
            for options in ({"fused": True}, {"capturable": True})
            for scaled in ((False, True) if "fused" in options else (False,))
            for clip in (False, True)
        }
        checks["graph capture"] = lambda: check_capture(folder)
        checks["graph of a whole step"] = lambda: check_whole_step(folder)
        checks["values against float64"] = lambda: check_values(folder)
        for name, check in checks.items():
            wrong = check()
            failed = failed or wrong is not None
            print(f"{'FAILED' if wrong else 'passed'}  {name}{f': {wrong}' if wrong else ''}", flush=True)
        print("time with / without:", {arm: round(ratio, 4) for arm, ratio in overhead(folder).items()})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
