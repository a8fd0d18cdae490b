from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rules.language.streams import column, pack_of, run, same, values_of

EVERY = 10


def noise(length: int, seed: int = 0, sd: float = 0.03) -> np.ndarray:
    return sd * np.random.default_rng(seed).standard_normal(length)


def plain(values: np.ndarray, half: int) -> float:
    """Two lines of one slope by least squares, and the jump between them over its standard error, in matrices."""
    means = np.array([np.sort(part)[2:8].mean() for part in values.reshape(-1, EVERY)])
    places = np.arange(half) - (half - 1) / 2
    after = np.repeat([0.0, 1.0], half)
    design = np.stack([1 - after, after, np.tile(places, 2)], axis=1)
    earlier, later, slope = np.linalg.lstsq(design, means, rcond=None)[0]
    # Both lines meet the end of the first stretch and the beginning of the second half a mean apart.
    jump = later - earlier - slope * half
    off = means - design @ np.array([earlier, later, slope])
    alike = sum(float(part[1:] @ part[:-1]) for part in (off[:half], off[half:])) / float(off @ off)
    alike = min(max(alike, 0) + 1.5 / half, 0.9)
    contrast = np.array([-1.0, 1.0, -half])
    variance = float(off @ off) / (2 * half - 3) * contrast @ np.linalg.inv(design.T @ design) @ contrast
    return jump / math.sqrt(variance * (1 + alike) / (1 - alike))


@pytest.mark.parametrize("records", [100, 200, 400])
def test_it_is_the_jump_between_two_parallel_lines_over_its_standard_error(records: int) -> None:
    given = 3 - 0.0004 * np.arange(2000) + noise(2000) + 0.05 * (np.arange(2000) >= 1000)
    found = values_of(f"shift_t(x, records={records}, share=0)", column(given.tolist()))
    assert found[: 2 * records - 1] == [None] * (2 * records - 1)
    for end in range(2 * records, 2001, EVERY):
        assert found[end - 1] == pytest.approx(plain(given[end - 2 * records : end], records // EVERY), abs=1e-9)
        assert set(found[end - 1 : end + EVERY - 1]) == {found[end - 1]}


@pytest.mark.parametrize("share", [0.007, 0.015])
def test_a_small_rise_in_a_decline_stands_out(share: float) -> None:
    given = (2.4 + 4 * (1 + np.arange(4000) / 100) ** -0.4) * (1 + share * (np.arange(4000) >= 2000))
    found = values_of("shift_t(x)", column((given + noise(4000, sd=0.005 * 3)).tolist()))
    assert max(found[399:2000]) < 4.5
    assert max(found[2100:2400]) > (8 if share > 0.01 else 6)


@pytest.mark.parametrize("bend", [0.0003, 0.003])
@pytest.mark.parametrize("sd", [0.0005, 0.005, 0.05])
def test_the_end_of_a_decline_is_no_jump(bend: float, sd: float) -> None:
    falling = 2.5 + bend * np.maximum(1000 - np.arange(2500), 0)
    for seed in range(5):
        for text in ("shift_t(x)", "shift_t(x, records=400)"):
            assert max(values_of(text, column((falling + noise(2500, seed, sd)).tolist()))[799:]) < 5


def test_a_smoothed_log_has_few_values() -> None:
    drift, values = 0.0, []
    for push in noise(20_000, 3, 1.0).tolist():
        drift = 0.95 * drift + math.sqrt(1 - 0.95**2) * push
        values.append(3 + 0.03 * drift)
    assert max(values_of("shift_t(x, records=400, share=0)", column(values))[800:]) < 5


def test_what_passes_is_no_jump() -> None:
    given = 3 + noise(2000)
    given[1000:1060] += 2 * np.exp(-np.arange(60) / 30)
    assert max(values_of("shift_t(x)", column(given.tolist()))[399:]) < 5


def test_rises_are_positive_falls_negative_and_small_ones_nothing() -> None:
    given = 3 + noise(1000, sd=0.003)
    for jump, sign in ((0.06, 1), (-0.06, -1), (0.006, 0)):
        found = values_of("shift_t(x)", column((given + jump * (np.arange(1000) >= 500)).tolist()))[699]
        assert (found > 8, found < -8, found == 0) == (sign > 0, sign < 0, sign == 0)


def test_a_constant_has_none_and_values_that_are_not_finite_change_nothing() -> None:
    given = (3 + noise(500)).tolist()
    odd = [*given[:450], math.nan, math.inf, 1e200, *given[450:]]
    assert values_of("shift_t(x, share=0)", column(odd))[-50:] == values_of("shift_t(x, share=0)", column(given))[-50:]
    assert set(values_of("shift_t(x, share=0)", column([2.5] * 500))[399:]) == {0.0}


def test_it_goes_on_after_any_cut_and_restart() -> None:
    steps = column((3 + noise(300, sd=0.3)).tolist())
    pack = pack_of(*(f"shift_t(x, records=100, share=0) > {cut}" for cut in np.linspace(-1, 1, 41).round(2).tolist()))
    whole = run(pack, steps)
    assert len(whole) > 20
    assert same(run(pack, steps, cuts=set(range(300)), reload=set(range(300))), whole)
    assert same(run(pack, steps, cuts={7, 33, 150, 209, 251}, reload={33, 251}), whole)
