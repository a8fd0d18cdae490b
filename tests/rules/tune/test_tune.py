"""Tuning counts what the daemon would have said, and finds the threshold for a wanted rate on any healthy log."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.rules.cli.test_cli import run
from tests.rules.language.streams import record
from tests.rules.replay.recorded import record as recorded
from trainwarden.record import Step
from trainwarden.rules.core.block import Block, from_steps
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.language import Evaluator
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.evaluate import Compiler
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.rulefiles import check_packs
from trainwarden.rules.tune.logs import joined, starts
from trainwarden.rules.tune.overrides import overriding
from trainwarden.rules.tune.search import Search, rounded
from trainwarden.rules.tune.threshold import RuleText, thresholds
from trainwarden.rules.tune.tune import Tuned, tune

RULES = """# Rules of a test, with a comment that stays.
groups:
  - name: g
    rules:
      - record: ratio
        expr: loss / ema(loss)
      - alert: Spike   # the classic
        expr: ratio > 1.02
        for: 2 steps
      - alert: High
        expr: >-
          zscore(loss)
          > 3 and loss > baseline(loss)
        labels: {severity: info}
      - alert: Low
        expr: -0.2 >= loss - median(loss[50])
      - alert: NotHigh
        expr: not loss - ema(loss) <= 0.5
      - alert: Two
        expr: loss > 2.05 and grad_norm > 1.2
      - alert: Either
        expr: loss > 3 or grad_norm > 3
      - alert: Counted
        expr: count((loss > ema(loss))[20]) > 14
      - alert: Absent
        expr: clip_ratio > 1
      - alert: Neither
        expr: clip_ratio > 1 or lr > 1
"""
PACK = check_packs([(RULES, "r.yml")])
FILE = RuleText.of(RULES, "r.yml")


def healthy(seed: int, length: int = 1500, stride: int = 1) -> list[Step]:
    rng = np.random.default_rng(seed)
    return [
        record(
            place * stride,
            stride,
            loss=float(2 + math.exp(-place / 200) + 0.05 * rng.normal()) if rng.random() > 0.01 else None,
            grad_norm={"all": float(np.exp(0.3 * rng.normal()))},
        )
        for place in range(1, length + 1)
    ]


BLOCKS = [from_steps(healthy(seed)) for seed in range(2)]


def tuned(rate: float, blocks: list[Block] | None = None) -> Tuned:
    return tune(PACK, [FILE], blocks or BLOCKS, rate)


def fired(text: str, blocks: list[Block]) -> dict[str, int]:
    """Count by the evaluator alone, in other blocks."""
    pack = check_packs([(text, "f")])
    count = dict.fromkeys(pack.rules, 0)
    for block in blocks:
        evaluator = Evaluator(pack)
        for row in range(0, len(block), 97):
            for change in evaluator.feed(block.rows(row, row + 97)):
                count[change.rule] += change.state == "firing"
    return count


def test_each_rule_is_counted_as_the_evaluator_counts() -> None:
    found = tuned(100.0)
    assert {one.rule: one.fired for one in found.rules} == fired(RULES, BLOCKS)
    assert (found.records, found.starts, found.allowed) == (3_000, 2, 3)
    spike = found.rules[0]
    assert spike.per_100k == pytest.approx(spike.fired * 100_000 / 3_000)
    assert spike.fired > 12


def test_at_a_rate_beyond_all_reason_a_rule_may_fire_in_each_record() -> None:
    blocks = [from_steps([record(step, loss=2.0) for step in range(1, 101)])]
    assert tune(PACK, [FILE], blocks, 1e308).allowed == 100


@pytest.mark.parametrize("rate", [40.0, 400.0, 1000.0])
def test_the_threshold_for_a_rate_fires_no_more_often_and_hardly_less(rate: float) -> None:
    found = tuned(rate)
    text = overriding(FILE, found, sensitive=True)
    counts = fired(text, BLOCKS)
    seen = 0
    for one in found.rules:
        if one.tuned is not None:
            seen += 1
            assert counts[one.rule] == one.tuned_fired
            assert counts[one.rule] <= found.allowed
            if one.rule != "Counted":  # counts are whole numbers: one less may be many firings more
                assert counts[one.rule] >= 0.6 * found.allowed - 2
    assert seen >= 4


def test_one_number_of_a_rule_is_moved_and_a_rule_without_one_says_so() -> None:
    found = {one.rule: one for one in tuned(40.0).rules}
    assert set(thresholds(FILE)) == {"Spike", "High", "Low", "NotHigh", "Counted", "Two", "Absent"}
    assert found["Either"].why == "only counted: no one number in it decides alone when it fires"
    assert found["Two"].moves == "loss > 2.05"
    assert found["Absent"].why == "never measured: needs clip_ratio"
    assert found["Neither"].why == "never measured: needs clip_ratio, lr"
    assert found["Spike"].why is None


@pytest.mark.parametrize(
    ("expression", "value", "rises"),
    [
        ("loss > 5", 5.0, True),
        ("5 < loss", 5.0, True),
        ("loss < 5", 5.0, False),
        ("-5 >= loss", -5.0, False),
        ("not loss > 5", 5.0, False),
        ("grad_norm > ema(grad_norm) unless loss >= 5", 5.0, False),
        ("not (grad_norm > ema(grad_norm) unless loss >= 5)", 5.0, True),
        ("loss > 5 or isnan(loss)", 5.0, True),
    ],
)
def test_which_way_a_threshold_makes_a_rule_rarer_is_read_from_its_text(
    expression: str, value: float, rises: bool
) -> None:
    text = f"groups: [{{name: g, rules: [{{alert: a, expr: '{expression}'}}]}}]"
    found = thresholds(RuleText.of(text, "f"))["a"]
    assert (found.value, found.rises) == (value, rises)
    assert found.put("7").count("7") == 1


@pytest.mark.parametrize(
    ("expression", "compares"),
    [
        ("zscore(loss) > 6 and loss > 1.02 * ema(loss)", "zscore(loss) > 6"),
        ("loss > ema(loss) and grad_norm > 3 and lr > 1", "grad_norm > 3"),
        ("count((loss > 5)[10]) > 3 and 7 < grad_norm", "7 < grad_norm"),
        ("loss - 1 > 0.5 unless grad_norm > 3", "loss - 1 > 0.5"),
    ],
)
def test_of_several_numbers_the_first_that_all_depends_on_is_moved(expression: str, compares: str) -> None:
    text = f"groups: [{{name: g, rules: [{{alert: a, expr: '{expression}'}}]}}]"
    assert thresholds(RuleText.of(text, "f"))["a"].compares == compares


@pytest.mark.parametrize(
    "expression",
    [
        "loss > grad_norm",
        "isnan(loss)",
        "loss == 5",
        "loss > 1 or lr > 2",
        "period(loss > 1.2) > 0",
        "not (loss > 1 and lr > 1)",
    ],
)
def test_a_rule_without_one_such_number_has_none(expression: str) -> None:
    text = f"groups: [{{name: g, rules: [{{alert: a, expr: '{expression}'}}]}}]"
    assert thresholds(RuleText.of(text, "f")) == {}


def test_the_overriding_file_is_the_same_text_with_other_numbers() -> None:
    found = tuned(40.0)
    text = overriding(FILE, found)
    check_packs([(text, "tuned.yml")])
    before, after = RULES.splitlines(), text.splitlines()
    note = len(after) - len(before)
    changed = [(old, new) for old, new in zip(before, after[note:], strict=True) if old != new]
    harder = [one for one in found.rules if one.tuned is not None and one.fired > found.allowed]
    assert len(changed) == len(harder) >= 3
    assert "# Rules of a test, with a comment that stays." in after
    assert any(line.startswith("#   Spike: 1.02 -> ") for line in after)
    assert all(line.startswith("#") for line in after[:note])


def test_what_fires_less_than_wanted_is_made_easier_only_if_asked_for() -> None:
    calm = RULES.replace("> 1.02", "> 9")
    file = RuleText.of(calm, "r.yml")
    found = tune(check_packs([(calm, "r.yml")]), [file], BLOCKS, 10.0)
    assert "ratio > 9" in overriding(file, found)
    assert "ratio > 9" not in overriding(file, found, sensitive=True)


def test_a_search_counts_as_the_evaluator_does_for_any_threshold() -> None:
    for name, threshold in thresholds(FILE).items():
        search = Search(threshold, PACK.rules[name].alert, Compiler([(RULES, "r.yml")]), BLOCKS)
        for number in (threshold.value, 0.0, 1.1, 2.5):
            text = RULES.replace(threshold.expr.strip(), threshold.put(repr(number)).strip())
            if name == "High":
                text = RULES.replace("> 3 and", f"> {number!r} and")
            assert search.fires(number) == fired(text, BLOCKS)[name], (name, number)


def test_rows_are_joined_over_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwarden.rules.core.inputs import Start
    from trainwarden.rules.tune import logs

    steps = healthy(0, 500)
    who = Start("u", "r", 0, "s")
    whole = next(starts((who, 0, step) for step in steps))
    monkeypatch.setattr(logs, "PIECE", 7)
    pieces = next(starts((who, 0, step) for step in steps))
    assert pieces.step.tolist() == whole.step.tolist()
    for key, column in whole.columns.items():
        assert pieces.columns[key].present.tolist() == column.present.tolist()
        np.testing.assert_array_equal(pieces.columns[key].values, column.values)
    assert len(joined([])) == 0


def test_several_ranks_are_one_row_and_a_repeated_step_counts_once() -> None:
    from trainwarden.rules.core.inputs import Start

    one, two = Start("u", "r", 0, "s"), Start("u", "r", 1, "t")
    lines = [(one, rank, record(step, loss=float(rank))) for step in (1, 2, 2, 3) for rank in (1, 0)]
    lines += [(two, 0, record(1, loss=5.0))]
    found = list(starts(lines))
    assert [block.step.tolist() for block in found] == [[1, 2, 3], [1]]
    assert found[0].columns["loss",].values.tolist() == [0.0] * 3
    assert found[0].ranks["loss", 1].values.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("value", "digits", "up", "found"),
    [(1.234, 2, True, 1.3), (1.234, 2, False, 1.2), (-1.234, 2, True, -1.2), (0.00123, 1, True, 0.002), (0.0, 3, True, 0.0), (9.99, 2, True, 10.0)],
)  # fmt: skip
def test_numbers_are_rounded_towards_fewer_firings(value: float, digits: int, up: bool, found: float) -> None:
    assert rounded(value, digits, up) == found


def test_journals_and_csv_are_read_alike(tmp_path: Path) -> None:
    import io

    recorded(tmp_path / "rec")
    steps = [one for one in _lines([str(tmp_path / "rec")], tmp_path) if isinstance(one, Step)]
    table = ["step,loss", *(f"{one.step},{one.value('loss')!r}" for one in steps)]
    (tmp_path / "rec.csv").write_text("\n".join(table) + "\n")
    found = []
    for name in ("rec", "rec.csv"):
        (recording,) = find_recordings([str(tmp_path / name)], io.BytesIO(), tmp_path)
        found.append(tune(PACK, [FILE], starts(merged(recording)), 10.0))
    spikes = [(one.records, msgspec.to_builtins(one.rules[0])) for one in found]
    assert spikes[0] == spikes[1]


def _lines(names: list[str], folder: Path) -> list[object]:
    import io

    return [item for one in find_recordings(names, io.BytesIO(), folder) for _, _, item in merged(one)]


def test_what_replay_keeps_from_the_rules_is_kept_from_them_here() -> None:
    # A norm that is written again and again is not measured; one that stands still is no collapse (design §4.9).
    def logged(step: int) -> Step:
        norm = 1.0 + 0.1 * math.sin(step) if step < 300 else 9.0
        return Step(seq=step, step=step, time=float(step), signals={"loss": 2.0 + math.cos(step), "grad_norm": norm})

    start = Start("u", "r", 0, "s")
    text = "groups: [{name: g, rules: [{alert: High, expr: grad_norm > 5, for: 100 steps}]}]"
    pack = check_packs([(text, "h.yml")])
    blocks = list(starts((start, 0, logged(step)) for step in range(1, 601)))
    (rule,) = tune(pack, [RuleText.of(text, "h.yml")], blocks, 1.0).rules
    assert rule.fired == 0
    assert Replay(Settings(), pack).run((start, 0, logged(step)) for step in range(1, 601)).incidents == {}


def test_a_damaged_log_is_named_and_what_it_holds_is_tuned_on(tmp_path: Path) -> None:
    packed = bytearray(
        gzip.compress(("step,loss\n" + "".join(f"{n},{2 + n % 7 / 100}\n" for n in range(1, 501))).encode())
    )
    packed[-8] ^= 0xFF
    (tmp_path / "x.csv.gz").write_bytes(bytes(packed))
    ran = run("tune", str(tmp_path / "x.csv.gz"))
    assert ran.returncode == 0
    assert "notice: x.csv.gz is damaged" in ran.stderr
    assert "500 records" in ran.stdout
