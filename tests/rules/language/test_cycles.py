from __future__ import annotations

import numpy as np
import pytest

from tests.rules.language.streams import column, values_of
from trainwarden.record import Step


def spikes(at: list[int], length: int, width: int = 1) -> list[Step]:
    return column(2.0 if any(begin <= step < begin + width for begin in at) else 0.0 for step in range(1, length + 1))


def test_even_spikes_have_their_distance_as_period_from_the_fourth_on() -> None:
    values = values_of("period(x > 1)", spikes([100, 200, 300, 400], 620))
    assert set(values[:399]) == {0.0}
    assert set(values[399:550]) == {100.0}
    assert set(values[550:]) == {0.0}  # the next one is overdue by half a period


def test_a_spike_that_flickers_is_one_event() -> None:
    at = [begin + offset for begin in (100, 200, 300, 400) for offset in (0, 3, 7)]
    assert values_of("period(x > 1)", spikes(at, 420))[-1] == 100.0


@pytest.mark.parametrize(("at", "found"), [([100, 205, 305, 410], 105.0), ([100, 250, 300, 400], 0.0)])
def test_distances_fit_within_the_tolerance(at: list[int], found: float) -> None:
    assert values_of("period(x > 1, tolerance=0.1)", spikes(at, 420))[-1] == found


def test_one_event_that_does_not_belong_is_forgiven_in_five() -> None:
    regular = [100 * place for place in range(1, 13)]
    assert values_of("period(x > 1)", spikes([*regular, 555], 1210))[-1] == 100.0


def test_events_outside_the_window_are_forgotten() -> None:
    assert values_of("period(x > 1, window=250)", spikes([100, 200, 300, 400], 420))[-1] == 0.0
    assert values_of("period(x > 1, window=250, min_events=3)", spikes([100, 200, 300, 400], 420))[-1] == 100.0


def test_spikes_at_random_are_rarely_called_periodic() -> None:
    rng = np.random.default_rng(0)
    called = 0
    for _ in range(40):
        at = np.flatnonzero(rng.random(3000) < 0.004).tolist()
        values = values_of("period(x > 1)", spikes(at, 3000))
        called += any(values)
    assert called <= 6
