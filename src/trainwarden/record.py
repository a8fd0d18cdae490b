"""Step and event lines: what the exporter writes, serves and the daemon reads; and the codec for their numbers.

A line is one JSON object. JSON has no NaN and no infinities, and they are the very values that matter here, so
they are written as the strings ``"NaN"``, ``"+Inf"`` and ``"-Inf"``. ``null`` means absent. Absent, NaN and zero are three
things and stay three through this module. Nothing else in the project encodes or decodes a record: a bare msgspec
encode would turn NaN into null without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from .signals import BY_NAME

SCHEMA = 1

#: A signal's value in a record: a number, or an object of numbers by its first label (and a second level for two).
Value: TypeAlias = "float | dict[str, Value]"
#: Half-open ranges ``[[first, end), …]``.
Ranges: TypeAlias = list[tuple[int, int]]

_WORD_OF = {math.inf: "+Inf", -math.inf: "-Inf"}
_NUMBER_OF = {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}


class RecordError(ValueError):
    """A line that is not a record. The message says what is wrong with it; the reader adds file and line."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Line one of a journal file: whose records follow. ``schema`` is the major version of the format."""

    run_uid: str
    run: str
    attempt: int
    start_id: str
    rank: int = 0
    schema: int = SCHEMA


class ShardSpan(msgspec.Struct, frozen=True, gc=False):
    """A shard that a step's batch drew from, with the positions ``[first, end)`` it fills in the epoch's order."""

    name: str
    first: int
    end: int


class RankStats(msgspec.Struct, frozen=True, gc=False):
    """One quantity over all ranks of a step: its extremes, its sum, the rank of its largest value, how many reported."""

    min: float
    max: float
    sum: float
    argmax: int
    n: int


class Step(msgspec.Struct, kw_only=True, gc=False):
    """Record of optimizer step ``step``: the loss and gradient before update ``step`` and the update made by it.

    ``seq`` numbers all lines (steps and events) of one (start_id, rank) from 1. ``time`` is Unix seconds.
    ``stride`` is how many steps the record covers, ending at ``step``. ``signals`` maps names of
    :data:`trainwarden.signals.SIGNALS` (or a user's own) to their values; what is absent is not a key.
    ``samples`` are the ranges of sample positions that the step consumed.
    """

    seq: int
    step: int
    time: float
    stride: int = 1
    signals: dict[str, Value] = msgspec.field(default_factory=dict)
    samples: Ranges = msgspec.field(default_factory=list)
    shards: list[ShardSpan] = msgspec.field(default_factory=list)
    ranks: dict[str, RankStats] = msgspec.field(default_factory=dict)
    phase: str | None = None

    def value(self, name: str, *labels: str) -> float | None:
        """Return one number of the record, or None where it is absent.

        Without labels a grouped signal answers with its ``all``.
        """
        found: Any = self.signals.get(name)
        for label in labels:
            if not isinstance(found, dict):
                return float(found) if found is not None and label == "all" else None
            found = found.get(label)
        while isinstance(found, dict):
            found = found.get("all")
        return None if found is None else float(found)


class Event(msgspec.Struct, kw_only=True):
    """Something that happened beside the steps: a start, a checkpoint, an evaluation, a change of stage, an exit.

    ``kind`` is one of :data:`EVENT_KINDS` or a user's own word. ``step`` is the last finished step, where known.
    ``fields`` holds the rest of the line.
    """

    kind: str
    time: float
    seq: int = 0
    step: int | None = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)


#: Words by which a checkpoint event marks a state that is kept for examination alone, and one that was saved in haste (case E10).
FORENSIC, EMERGENCY = (
    ("forensic", "forensics", "examination", "debug", "post_mortem"),
    ("emergency", "preemption", "haste"),
)


def purpose_of(event: Event) -> str:
    """Return what a checkpoint event says that the state is for: ``forensic``, ``emergency``, or an empty text for one to go on from.

    Told by the field ``purpose`` (or ``checkpoint_kind``), or by a field of that name that is true.
    """
    said = [event.fields.get(name) for name in ("purpose", "checkpoint_kind")]
    words = [one.lower().replace("-", "_").replace(" ", "_") for one in said if isinstance(one, str)]
    for purpose, known in (("forensic", FORENSIC), ("emergency", EMERGENCY)):
        if event.fields.get(purpose) is True or any(word in known for word in words):
            return purpose
    return ""


#: Kinds of events that trainwarden itself knows.
EVENT_KINDS = (
    "start",
    "exit",
    "resume",
    "checkpoint",
    "evaluation",
    "stage",
    "mixture",
    "epoch",
    "lr_phase",
    "batch_size",
    "nonfinite",
    "anomaly",
)

Line: TypeAlias = Header | Step | Event

_STEP_KEYS = frozenset({"type", "seq", "step", "time", "stride", "samples", "shards", "ranks", "phase"})
_EVENT_KEYS = frozenset({"type", "kind", "seq", "step", "time"})

#: Steps, positions and sequence numbers become int64 columns.
_LARGEST = 2**63 - 1

_decoder = msgspec.json.Decoder()
#: A step line without words, booleans or fields of later versions, which nearly all are; its whole numbers become floats.
_plain_decoder = msgspec.json.Decoder(
    dict[str, float | str | list[tuple[int, int] | ShardSpan] | dict[str, float | dict[str, float]]]
)
_PLAIN = frozenset({float, dict})
#: Up to here a float tells a whole number.
_WHOLE = 2.0**53
_encoder = msgspec.json.Encoder()


def encode_numbers(value: Any) -> Any:
    """Return ``value`` with every non-finite float, at any depth, as its word. Finite numbers stay as they are."""
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)  # numpy's float64 is a float that msgspec does not encode
        return _WORD_OF.get(value, "NaN")
    if isinstance(value, RankStats) and math.isfinite(value.min + value.max + value.sum):
        return value  # the encoder knows it
    if isinstance(value, Mapping):
        return {key: encode_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_numbers(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return encode_numbers(msgspec.to_builtins(value))
    return value


def decode_number(value: Any, where: str) -> float | None:
    """Return a record's number as a float, or None for null.

    Raises:
        RecordError: the value is neither a number nor one of the three words; ``where`` names it.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return 1.0 if value else 0.0
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            raise RecordError(f"{where}: a whole number beyond the range of a float") from None
    if isinstance(value, str) and value in _NUMBER_OF:
        return _NUMBER_OF[value]
    raise RecordError(f'{where}: {value!r} is not a number (non-finite ones are "NaN", "+Inf" and "-Inf")')


def decode_numbers(value: Any) -> Any:
    """Return ``value`` with each of the three words, at any depth, as its float: what :func:`encode_numbers` undoes."""
    if isinstance(value, str):
        return _NUMBER_OF.get(value, value)
    if isinstance(value, dict):
        return {key: decode_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_numbers(item) for item in value]
    return value


def _decode_signal(value: Any, where: str) -> Value | None:
    if isinstance(value, dict):
        found: dict[str, Value] = {}
        for key, item in value.items():
            inner = _decode_signal(item, f"{where}.{key}")
            if inner is not None:
                found[key] = inner
        return found
    return decode_number(value, where)


def decode_line(line: bytes | str) -> Line:
    """Decode one line of a journal or of ``/api/v1/steps``.

    Unknown fields of a header are ignored; unknown numeric fields of a step are the user's own signals and
    unknown fields of other types are ignored. In an event the three words are numbers at any depth.

    Raises:
        RecordError: the line is torn, is no JSON object, misses a field, or has another major version.
    """
    plain = _decode_plain(line)
    if plain is not None:
        return plain
    try:
        raw = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordError(f"not a JSON line: {error}") from None
    if not isinstance(raw, dict):
        raise RecordError("not a JSON object")
    if "schema" in raw and "type" not in raw:
        if raw["schema"] != SCHEMA:
            raise RecordError(f"schema {raw['schema']!r} is not {SCHEMA}, the one this version reads")
        header: Header = _convert(raw, Header)
        return header
    kind = raw.get("type")
    if kind == "step":
        return _decode_step(raw)
    if kind == "event":
        return _decode_event(raw)
    raise RecordError(f'type is {kind!r}, not "step" or "event"')


def _convert(raw: Any, to: Any) -> Any:
    try:
        return msgspec.convert(raw, to)
    except msgspec.ValidationError as error:
        raise RecordError(str(error)) from None


def _decode_plain(line: bytes | str) -> Step | None:
    """Decode a step line in which nothing is out of the ordinary, as the long way does; None for any other line."""
    try:
        raw: dict[str, Any] = _plain_decoder.decode(line)
        take = raw.pop
        if take("type", None) != "step":
            return None
        seq, step, time, stride = take("seq", None), take("step", None), take("time", None), take("stride", 1.0)
        samples, shards, phase = take("samples", None), take("shards", None), take("phase", None)
        ranks = _decode_ranks(take("ranks")) if "ranks" in raw else {}
        if not (
            type(seq) is type(step) is type(stride) is type(time) is float
            and _PLAIN.issuperset(map(type, raw.values()))
        ):
            return None
    except (msgspec.DecodeError, UnicodeError, RecursionError, RecordError):
        return None
    if not (-_WHOLE < seq < _WHOLE and -_WHOLE < step < _WHOLE and 1 <= stride < _WHOLE):
        return None
    if not (seq.is_integer() and step.is_integer() and stride.is_integer()):
        return None
    if samples is None:
        samples = []
    else:
        if type(samples) is not list:
            return None
        for pair in samples:
            if type(pair) is not tuple or not 0 <= pair[0] <= pair[1] <= _LARGEST:
                return None
    if shards is None:
        shards = []
    elif type(shards) is not list or any(type(span) is not ShardSpan for span in shards):
        return None
    if phase is not None and type(phase) is not str:
        return None
    return Step(
        seq=int(seq),
        step=int(step),
        time=time,
        stride=int(stride),
        signals=raw,
        samples=samples,
        shards=shards,
        ranks=ranks,
        phase=phase,
    )


def _decode_step(raw: dict[str, Any]) -> Step:
    signals: dict[str, Value] = {}
    samples: Ranges = []
    for name, value in raw.items():
        if name in _STEP_KEYS:
            continue
        if type(value) is float:  # nearly all of them: a fast way round what follows
            signals[name] = value
            continue
        if type(value) is int and abs(value) <= _LARGEST:
            signals[name] = float(value)
            continue
        try:
            decoded = _decode_signal(value, name)
        except RecordError:
            if name in BY_NAME:
                raise
            continue  # a text, a list or an object of a later version
        if decoded is not None:
            signals[name] = decoded
    consumed = raw.get("samples")
    if isinstance(consumed, list):
        samples = _convert(consumed, Ranges)
        for first, end in samples:
            if not 0 <= first <= end <= _LARGEST:
                raise RecordError(f"samples: [{first}, {end}) is no half-open range of positions")
    elif consumed is not None:
        number = decode_number(consumed, "samples")
        if number is not None:
            signals["samples_seen"] = number
    shards, phase = raw.get("shards"), raw.get("phase")
    ranks = _decode_ranks(raw.get("ranks") or {})
    time = decode_number(raw.get("time"), "time")
    stride = _whole(raw, "stride", 1)
    if stride < 1:
        raise RecordError(f"stride: {stride} is less than 1")
    return Step(
        seq=_whole(raw, "seq"),
        step=_whole(raw, "step"),
        time=math.nan if time is None else time,
        stride=stride,
        signals=signals,
        samples=samples,
        shards=_convert(shards, list[ShardSpan]) if shards else [],
        ranks=ranks,
        phase=None if phase is None else _convert(phase, str),
    )


def _decode_ranks(by_name: Any) -> dict[str, RankStats]:
    ranks: dict[str, RankStats] = {}
    if not isinstance(by_name, dict):
        raise RecordError("ranks: not an object")
    for name, stats in by_name.items():
        if not isinstance(stats, dict):
            raise RecordError(f"ranks.{name}: not an object")
        numbers = {key: decode_number(value, f"ranks.{name}.{key}") for key, value in stats.items()}
        try:
            ranks[name] = RankStats(
                min=_given(numbers["min"]),
                max=_given(numbers["max"]),
                sum=_given(numbers["sum"]),
                argmax=int(_given(numbers["argmax"])),
                n=int(_given(numbers["n"])),
            )
        except (KeyError, ValueError, OverflowError) as error:
            raise RecordError(f"ranks.{name}: {error} is missing or no whole number") from None
    return ranks


def _given(value: float | None) -> float:
    if value is None:
        raise ValueError("a number")
    return value


def _whole(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        value = int(value)  # 3.0 is 3
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
        raise RecordError(f"{name}: {value!r:.40} is not a whole number of 64 bits")
    return value


def _decode_event(raw: dict[str, Any]) -> Event:
    time = decode_number(raw.get("time"), "time")
    kind = raw.get("kind")
    if not isinstance(kind, str):
        raise RecordError("kind: an event needs one")
    return Event(
        kind=kind,
        time=math.nan if time is None else time,
        seq=_whole(raw, "seq", 0),
        step=None if raw.get("step") is None else _whole(raw, "step"),
        fields={name: decode_numbers(value) for name, value in raw.items() if name not in _EVENT_KEYS},
    )


def encode_line(line: Line) -> bytes:
    """Encode a header, step or event as one line, without the newline.

    Raises:
        RecordError: a signal or an event's field bears a name that the line itself needs, such as ``seq``.
    """
    if isinstance(line, Header):
        return _encoder.encode(line)
    if isinstance(line, Step):
        raw: dict[str, Any] = {
            "type": "step",
            "seq": line.seq,
            "step": line.step,
            "time": line.time,
            "stride": line.stride,
        }
        _refuse_taken(line.signals, _STEP_KEYS)
        raw.update(line.signals)
        if line.samples:
            raw["samples"] = line.samples
        if line.shards:
            raw["shards"] = line.shards
        if line.ranks:
            raw["ranks"] = line.ranks
        if line.phase is not None:
            raw["phase"] = line.phase
        return _encoder.encode(encode_numbers(raw))
    fields = {"type": "event", "kind": line.kind, "seq": line.seq, "step": line.step, "time": line.time}
    _refuse_taken(line.fields, _EVENT_KEYS)
    return _encoder.encode(encode_numbers({**fields, **line.fields}))


def _refuse_taken(names: Iterable[str], taken: frozenset[str]) -> None:
    for name in names:
        if name in taken:
            raise RecordError(f"{name}: the line itself has a field of this name; choose another")


def decode_lines(lines: Iterable[bytes]) -> Iterator[Line]:
    """Decode the lines of a journal; a torn last line ends the stream without an error, one in the middle raises.

    Raises:
        RecordError: as :func:`decode_line`, with the number of the line in front.
    """
    pending: RecordError | None = None
    for number, line in enumerate(lines, start=1):
        if pending is not None:
            raise pending
        if not line.strip():
            continue
        try:
            yield decode_line(line)
        except RecordError as error:
            pending = RecordError(f"line {number}: {error}")
            if line.endswith(b"\n"):
                raise pending from None
