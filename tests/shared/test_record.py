"""The codec of steps and events: what goes in comes out, and what is no record is refused and nothing else happens."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden import record
from trainwarden.record import Event, Header, RankStats, RecordError, ShardSpan, Step, decode_line, encode_line
from trainwarden.signals import SIGNALS

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
INT64 = st.integers(min_value=0, max_value=2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
TAKEN = {"type", "seq", "step", "time", "stride", "samples", "shards", "ranks", "phase", "kind"}
USER_NAMES = NAMES.filter(lambda name: name not in TAKEN)
VALUES = st.recursive(ANY_FLOAT, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
RANGES = st.lists(st.tuples(INT64, INT64).map(lambda pair: (min(pair), max(pair))), max_size=4)
STATS = st.builds(
    RankStats, min=ANY_FLOAT, max=ANY_FLOAT, sum=ANY_FLOAT, argmax=st.integers(0, 2**20), n=st.integers(0, 2**20)
)
STEPS = st.builds(
    Step,
    seq=INT64,
    step=INT64,
    time=ANY_FLOAT,
    stride=st.integers(1, 2**40),
    signals=st.dictionaries(st.sampled_from([signal.name for signal in SIGNALS]) | USER_NAMES, VALUES, max_size=8),
    samples=RANGES,
    shards=st.lists(st.builds(ShardSpan, name=NAMES, first=INT64, end=INT64), max_size=3),
    ranks=st.dictionaries(NAMES, STATS, max_size=3),
    phase=st.none() | NAMES,
)
WORDS = {"NaN", "+Inf", "-Inf"}
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | ANY_FLOAT | NAMES.filter(lambda text: text not in WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)
EVENTS = st.builds(
    Event,
    kind=NAMES,
    time=ANY_FLOAT,
    seq=INT64,
    step=st.none() | INT64,
    fields=st.dictionaries(USER_NAMES, JSON, max_size=5),
)


def same(left: Any, right: Any) -> bool:
    """Compare with NaN equal to NaN, -0.0 unlike 0.0 and True unlike 1."""
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, list | tuple):
        return isinstance(right, list | tuple) and len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__struct_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, f), getattr(right, f)) for f in left.__struct_fields__
        )
    return type(left) is type(right) and bool(left == right)


@given(ANY_FLOAT)
def test_any_float_comes_back_to_the_bit(number: float) -> None:
    step = decode_line(encode_line(Step(seq=1, step=1, time=0.0, signals={"loss": number})))
    assert isinstance(step, Step)
    assert same(step.signals["loss"], number)


@given(STEPS)
def test_any_step_comes_back_as_it_was(step: Step) -> None:
    line = encode_line(step)
    assert b"\n" not in line
    json.loads(line)  # a line is plain JSON for every other reader too
    assert same(decode_line(line), step)


@given(EVENTS)
def test_any_event_comes_back_as_it_was(event: Event) -> None:
    assert same(decode_line(encode_line(event)), event)


def test_any_header_comes_back_as_it_was() -> None:
    header = Header(run_uid="u", run="r", attempt=3, start_id="s", rank=7)
    assert decode_line(encode_line(header)) == header


def test_absent_nan_and_zero_are_three_things() -> None:
    line = b'{"type": "step", "seq": 1, "step": 1, "time": 0, "loss": null, "lr": 0, "grad_norm": {"all": "NaN", "mlp": null}}'
    step = decode_line(line)
    assert isinstance(step, Step)
    assert "loss" not in step.signals
    assert step.value("loss") is None
    assert step.value("lr") == 0.0
    assert math.isnan(step.value("grad_norm") or 0)
    assert step.value("grad_norm", "mlp") is None
    assert step.value("never_heard_of") is None


def test_non_finite_numbers_are_words_in_the_line_at_any_depth() -> None:
    step = Step(
        seq=1,
        step=1,
        time=math.nan,
        signals={"loss": math.nan, "moment_rms": {"exp_avg": {"all": math.inf, "mlp": -math.inf}}},
        ranks={"loss": RankStats(min=-math.inf, max=math.inf, sum=math.nan, argmax=0, n=2)},
    )
    raw = json.loads(encode_line(step))
    assert raw["loss"] == "NaN"
    assert raw["moment_rms"] == {"exp_avg": {"all": "+Inf", "mlp": "-Inf"}}
    assert (raw["ranks"]["loss"]["min"], raw["ranks"]["loss"]["sum"]) == ("-Inf", "NaN")
    event = json.loads(encode_line(Event(kind="evaluation", time=1.0, fields={"by_set": [{"loss": math.nan}]})))
    assert event["by_set"] == [{"loss": "NaN"}]


def test_a_numpy_float_is_encoded_like_a_float() -> None:
    line = encode_line(Step(seq=1, step=1, time=0.0, signals={"loss": np.float64(0.1), "lr": np.float64("nan")}))
    assert json.loads(line)["loss"] == 0.1
    assert json.loads(line)["lr"] == "NaN"


def test_a_bare_number_of_a_grouped_signal_counts_as_all() -> None:
    step = decode_line(b'{"type": "step", "seq": 1, "step": 1, "time": 0, "grad_norm": 2, "skipped": true}')
    assert isinstance(step, Step)
    assert step.value("grad_norm") == step.value("grad_norm", "all") == 2.0
    assert step.value("grad_norm", "mlp") is None
    assert step.value("skipped") == 1.0


def test_samples_as_a_number_is_the_cumulative_signal_and_as_a_list_the_ranges() -> None:
    number = decode_line(b'{"type": "step", "seq": 1, "step": 1, "time": 0, "samples": 4096}')
    ranges = decode_line(
        b'{"type": "step", "seq": 1, "step": 1, "time": 0, "samples": [[0, 8], [16, 24]], "samples_seen": 16}'
    )
    assert isinstance(number, Step)
    assert isinstance(ranges, Step)
    assert (number.signals, number.samples) == ({"samples_seen": 4096.0}, [])
    assert (ranges.signals, ranges.samples) == ({"samples_seen": 16.0}, [(0, 8), (16, 24)])


def test_fields_of_a_later_version_are_ignored() -> None:
    step = decode_line(
        b'{"type": "step", "seq": 1, "step": 1, "time": 0, "loss": 2, "host": "n1", "tags": ["a"], "where": {"row": "x"}}'
    )
    assert isinstance(step, Step)
    assert step.signals == {"loss": 2.0}
    header = decode_line(
        b'{"schema": 1, "run_uid": "u", "run": "r", "attempt": 0, "start_id": "s", "rank": 0, "zone": "b"}'
    )
    assert header == Header(run_uid="u", run="r", attempt=0, start_id="s", rank=0)


@pytest.mark.parametrize("schema", [0, 2, "1", None, 1.5])
def test_another_major_version_is_refused(schema: object) -> None:
    raw = {"schema": schema, "run_uid": "u", "run": "r", "attempt": 0, "start_id": "s", "rank": 0}
    with pytest.raises(RecordError, match="schema"):
        decode_line(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "recursion"),
        (b"\xff\xfe", "JSON"),
        (b'{"type": "row"}', "type"),
        (b'{"type": "step", "step": 1, "time": 0}', "seq"),
        (b'{"type": "step", "seq": 1, "step": 1.5, "time": 0}', "step"),
        (b'{"type": "step", "seq": 1, "step": true, "time": 0}', "step"),
        (b'{"type": "step", "seq": 1, "step": 9223372036854775808, "time": 0}', "64 bits"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": "soon"}', "time"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "stride": 0}', "stride"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "loss": "high"}', "loss"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "loss": 1' + b"0" * 400 + b"}", "loss"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "grad_norm": {"all": []}}', "grad_norm.all"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "samples": [[8, 0]]}', "samples"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "samples": [[1]]}', "length 2"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "shards": 5}', "array"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "ranks": [1]}', "ranks"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "ranks": {"loss": {"min": 1}}}', "ranks.loss"),
        (b'{"type": "step", "seq": 1, "step": 1, "time": 0, "phase": 5}', "str"),
        (b'{"type": "event", "time": 0}', "kind"),
        (b'{"schema": 1, "run": "r"}', "run_uid"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_with_the_field_that_is_wrong(line: bytes, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode_line(line)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_bring_a_record_or_a_record_error(line: bytes) -> None:
    try:
        decode_line(line)
    except RecordError:
        pass


@given(
    st.dictionaries(
        st.sampled_from([*sorted(TAKEN), "schema", "loss", "grad_norm", "note"]), JSON | st.just("step"), max_size=9
    )
)
def test_any_object_brings_a_record_or_a_record_error(raw: dict[str, Any]) -> None:
    for kind in ("step", "event", raw.get("type")):
        try:
            decode_line(json.dumps({**raw, "type": kind}).encode())
        except RecordError:
            pass


@pytest.mark.parametrize("name", ["type", "seq", "step", "samples"])
def test_a_signal_cannot_take_the_name_of_a_field_of_the_line(name: str) -> None:
    with pytest.raises(RecordError, match=name):
        encode_line(Step(seq=1, step=1, time=0.0, signals={name: 1.0}))


def test_an_event_cannot_take_the_name_of_a_field_of_the_line() -> None:
    with pytest.raises(RecordError, match="time"):
        encode_line(Event(kind="stage", time=0.0, fields={"time": 1.0}))


JOURNAL: list[Header | Step | Event] = [
    Header(run_uid="u", run="r", attempt=0, start_id="s", rank=0),
    Event(kind="start", time=1.0, seq=1, fields={"world_size": 1}),
    Step(seq=2, step=1, time=2.0, signals={"loss": 3.5, "grad_norm": {"all": math.inf}}, samples=[(0, 8)]),
    Step(seq=3, step=2, time=3.0, signals={"loss": math.nan}, shards=[ShardSpan("ä", 0, 64)]),
]


def test_a_journal_cut_at_any_byte_gives_its_whole_lines_and_no_error() -> None:
    whole = b"".join(encode_line(line) + b"\n" for line in JOURNAL)
    for cut in range(len(whole) + 1):
        lines = whole[:cut].splitlines(keepends=True)
        read = list(record.decode_lines(lines))
        # A last line that misses only its newline is whole.
        assert len(read) in (whole[:cut].count(b"\n"), len(lines)), cut
        assert same(read, JOURNAL[: len(read)]), cut


def test_a_torn_line_in_the_middle_is_an_error_with_its_number() -> None:
    whole = [encode_line(line) + b"\n" for line in JOURNAL]
    torn = whole[2][:-10]
    for lines in ([*whole[:2], torn + b"\n"], [*whole[:2], torn, whole[3]]):
        reader = record.decode_lines(lines)
        assert [next(reader), next(reader)] == JOURNAL[:2]
        with pytest.raises(RecordError, match="line 3"):
            next(reader)


def test_blank_lines_of_a_journal_are_passed_over() -> None:
    assert list(record.decode_lines([b"\n", encode_line(JOURNAL[0]) + b"\n", b"  \n"])) == [JOURNAL[0]]
