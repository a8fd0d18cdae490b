"""Faults of the measurement: said once, kept from the rules, never paged."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.record import Step
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.instrument import Watch
from trainwarden.rules.core.instrument_scale import coarse, rescaled
from trainwarden.rules.core.instrument_screen import screen

RNG = np.random.default_rng(0)
NOISE = (2 + 0.02 * RNG.normal(size=400)).tolist()


def steps(loss: list[float], norm: list[float] | None = None) -> list[Step]:
    return [
        Step(
            seq=place + 1,
            step=place + 1,
            time=float(place),
            signals={"loss": value, **({} if norm is None else {"grad_norm": {"all": norm[place]}})},
        )
        for place, value in enumerate(loss)
    ]


def shown(records: list[Step], cuts: list[int] | None = None) -> tuple[list[float | None], list[tuple[int, str]]]:
    """Return the loss that the rules see, and what is said, with its step."""
    watches: dict[str, Watch] = {}
    seen: list[float | None] = []
    said = []
    bounds = [0, *(cuts or []), len(records)]
    for first, end in pairwise(bounds):
        if first == end:
            continue
        block, faults = screen(watches, from_steps(records[first:end]), 50)
        column = block.columns[("loss",)]
        seen += [
            value if here else None for value, here in zip(column.values.tolist(), column.present.tolist(), strict=True)
        ]
        said += [(records[first + row].step, fault.kind) for row, fault in faults]
    return seen, said


def test_a_loss_that_varies_is_passed_on() -> None:
    seen, said = shown(steps(NOISE))
    assert seen == NOISE
    assert said == []


def test_zero_behind_nan_is_unknown_to_the_rules_and_said_once() -> None:
    loss = [*NOISE[:100], 0.205, *[0.0] * 200]
    norm = [*NOISE[:100], *[math.nan] * 201]
    seen, said = shown(steps(loss, norm))
    assert seen[:101] == loss[:101]
    assert seen[101:] == [None] * 200
    assert said == [(102, "masked_nonfinite")]


def test_a_loss_of_zero_without_anything_broken_is_a_loss() -> None:
    seen, said = shown(steps([*NOISE[:10], 0.0, *NOISE[10:20]]))
    assert seen[10] == 0.0
    assert said == []


def test_a_nan_is_shown_and_what_comes_behind_it_too() -> None:
    seen, _ = shown(steps([*NOISE[:10], math.nan, *NOISE[10:20]]))
    assert math.isnan(seen[10])  # type: ignore[arg-type]
    assert seen[11:] == NOISE[10:20]


def test_a_value_that_is_written_again_and_again_is_unknown_until_it_varies() -> None:
    seen, _ = shown(steps([*NOISE[:100], *[2.0] * 80, *NOISE[100:110]]))
    assert seen[100:149] == [2.0] * 49
    assert seen[149:180] == [None] * 31
    assert seen[180:] == NOISE[100:110]


@given(st.data())
def test_any_cut_gives_the_same(data: Any) -> None:
    values = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])
    loss = data.draw(st.lists(values, min_size=1, max_size=40))
    norm = data.draw(st.lists(st.sampled_from([1.0, math.nan]), min_size=len(loss), max_size=len(loss)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(loss)), max_size=4)))
    records = steps(loss, norm)
    assert repr(shown(records, cuts)) == repr(shown(records))


def test_a_loss_in_steps_of_bf16_is_coarse() -> None:
    rounded = [1.6875 + 0.0078125 * round(float(value)) for value in RNG.normal(size=200)]
    assert coarse(np.array(rounded)) == pytest.approx(0.0078125)
    assert coarse(np.array(NOISE[:200])) == 0


@pytest.mark.parametrize("factor", [2.0, 8.0, 1 / 32, math.sqrt(2), math.sqrt(8)])
def test_an_exact_multiple_with_the_same_relative_noise_is_another_unit(factor: float) -> None:
    older, newer = np.array(NOISE[:200]), factor * np.array(NOISE[200:220])
    assert rescaled(older, newer) == pytest.approx(factor)


@pytest.mark.parametrize("factor", [1.0, 1.7, 5.0])
def test_another_level_is_not(factor: float) -> None:
    assert rescaled(np.array(NOISE[:200]), factor * np.array(NOISE[200:220])) is None


def test_a_level_of_another_noise_is_not() -> None:
    assert rescaled(np.array(NOISE[:200]), 4 + 1.0 * RNG.normal(size=20)) is None


def records(rows: list[dict[str, Any]]) -> list[Step]:
    return [Step(seq=place + 1, step=place + 1, time=float(place), signals=row) for place, row in enumerate(rows)]


def present(records: list[Step], key: tuple[str, ...], cuts: list[int] | None = None) -> tuple[list[bool], list[Any]]:
    """Return at which records the rules see a signal, and what is said."""
    watches: dict[str, Watch] = {}
    seen: list[bool] = []
    said = []
    for first, end in pairwise([0, *(cuts or []), len(records)]):
        if first == end:
            continue
        block, faults = screen(watches, from_steps(records[first:end]), 50)
        column = block.columns.get(key)
        seen += [False] * (end - first) if column is None else column.present.tolist()
        said += [(records[first + row].step, fault.kind, fault.signal) for row, fault in faults]
    return seen, said


def test_a_loss_that_was_counted_as_not_finite_and_is_written_down_as_a_number_is_unknown() -> None:
    rows = [{"loss": value, "nonfinite": {"loss": float(60 <= step < 63)}} for step, value in enumerate(NOISE[:100])]
    seen, said = present(records(rows), ("loss",))
    assert seen == [not 60 <= step < 63 for step in range(100)]
    assert said == [(61, "masked_nonfinite", "loss")]


def test_a_loss_without_its_noise_beside_a_broken_gradient_is_unknown() -> None:
    rows = [{"loss": value, "grad_norm": {"all": 1 + 0.1 * value}} for value in NOISE[:100]]
    rows += [{"loss": 2.0 + 1e-4 / step, "grad_norm": {"all": math.nan}} for step in range(1, 31)]
    seen, said = present(records(rows), ("loss",))
    assert seen == [True] * 104 + [False] * 26
    assert said == [(105, "masked_nonfinite", "loss")]


def test_a_loss_that_keeps_its_noise_beside_a_broken_gradient_is_a_loss() -> None:
    rows = [
        {"loss": value, "grad_norm": {"all": 1.0 if step < 100 else math.nan}} for step, value in enumerate(NOISE[:200])
    ]
    seen, said = present(records(rows), ("loss",))
    assert all(seen)
    assert said == []


def test_a_loss_that_is_constant_to_six_digits_is_written_again_and_again() -> None:
    seen, _ = shown(steps([*NOISE[:100], *[2.0 * (1 + 1e-8 * step) for step in range(60)]]))
    assert seen[100:149] != [None] * 49
    assert seen[149:] == [None] * 11


def stale(skipped: bool) -> list[Step]:
    """Six skipped steps that repeat the norm before them, told by their own word or by the scale (case A05)."""
    norms = [*NOISE[:60], *[464441.887] * 7, *NOISE[60:90]]
    rows: list[dict[str, Any]] = []
    for step, norm in enumerate(norms):
        halved = min(max(step - 60, 0), 6)
        told = {"skipped": float(60 < step <= 66)} if skipped else {"loss_scale": 1048576 * 0.5**halved}
        rows.append({"loss": NOISE[step], "grad_norm": {"all": norm}, **told})
    return records(rows)


@pytest.mark.parametrize("skipped", [True, False])
def test_a_norm_that_a_skipped_step_repeats_is_unknown_and_said_once(skipped: bool) -> None:
    seen, said = present(stale(skipped), ("grad_norm", "all"))
    assert seen == [not 60 < step <= 66 for step in range(97)]
    assert said == [(62, "repeated_signal", "grad_norm")]


def test_a_norm_that_repeats_without_a_skipped_step_is_a_norm() -> None:
    rows = [{"loss": NOISE[step], "grad_norm": {"all": 1.0}, "skipped": 0.0, "loss_scale": 8.0} for step in range(20)]
    assert present(records(rows), ("grad_norm", "all")) == ([True] * 20, [])


def test_a_norm_that_the_first_skipped_step_of_all_repeats_is_known_from_the_block_before() -> None:
    rows: list[dict[str, Any]] = [{"loss": NOISE[step], "grad_norm": {"all": 1.0 + step // 20}} for step in range(21)]
    rows.append({"loss": NOISE[21], "grad_norm": {"all": 2.0}, "skipped": 1.0})
    for cuts in ([], [21], [20, 21]):
        seen, said = present(records(rows), ("grad_norm", "all"), cuts)
        assert seen == [True] * 21 + [False]
        assert said == [(22, "repeated_signal", "grad_norm")]


@given(st.data())
def test_any_cut_gives_the_same_masks(data: Any) -> None:
    size = data.draw(st.integers(1, 40))
    rows = []
    for _ in range(size):
        row: dict[str, Any] = {"loss": data.draw(st.sampled_from([*NOISE[:5], 2.0, 2.0, math.nan]))}
        row["grad_norm"] = {"all": data.draw(st.sampled_from([1.0, 1.0, 2.0, math.nan]))}
        row["nonfinite"] = {"loss": data.draw(st.sampled_from([0.0, 0.0, 1.0]))}
        if data.draw(st.booleans()):
            row["skipped"] = data.draw(st.sampled_from([0.0, 1.0]))
            row["loss_scale"] = data.draw(st.sampled_from([4.0, 8.0]))
        rows.append(row)
    prefix = [{"loss": value, "grad_norm": {"all": value}} for value in NOISE[:30]]
    cuts = sorted(data.draw(st.lists(st.integers(0, size + 30), max_size=4)))
    made = records([*prefix, *rows])
    for key in (("loss",), ("grad_norm", "all")):
        assert present(made, key, cuts) == present(made, key)
