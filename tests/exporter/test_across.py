"""What the ranks' vectors hold, reduced by plain sums and extremes as the side group does, against a plain loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.exporter.across import RANKED, Joined, Layout, Own, to_max, to_min, to_sum
from trainwarden.record import RankStats, Value
from trainwarden.signals import GROUPS

LAYOUT = Layout({"grad_norm": ("grad_square", "grad_parts"), "nothing": (), "state": ("weight",)})


def combine(own: list[list[Own]], weights: list[float] | None = None) -> list[Joined]:
    """Combine what the ranks hand in, step by step."""
    world = len(own)
    sums = np.sum([to_sum(each, weight) for each, weight in zip(own, weights or [1.0] * world, strict=True)], axis=0)
    largest = np.max([to_max(each) for each in own], axis=0)
    argmax = np.min([to_min(each, sums, largest, rank) for rank, each in enumerate(own)], axis=0)
    return [LAYOUT.joined(sums[row], largest[row], argmax[row], world) for row in range(len(own[0]))]


def one(*ranks: dict[str, Value]) -> dict[str, RankStats]:
    return combine([[LAYOUT.own(signals, {})] for signals in ranks])[0].ranks


NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]))


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_the_ranks_of_a_record_are_those_of_a_plain_loop(losses: list[float | None]) -> None:
    found = one(*({} if loss is None else {"loss": loss} for loss in losses)).get("loss")
    known = [(loss, rank) for rank, loss in enumerate(losses) if loss is not None]
    if not known:
        assert found is None
        return
    assert found is not None
    numbers = [loss for loss, _ in known if not math.isnan(loss)]
    unknown = [rank for loss, rank in known if math.isnan(loss)]
    assert found.n == len(known)
    assert found.min == (min(numbers) if numbers else pytest.approx(math.nan, nan_ok=True))
    if unknown:
        assert math.isnan(found.max)
        assert found.argmax == unknown[0]
    else:
        assert found.max == max(numbers)
        assert found.argmax == next(rank for loss, rank in known if loss == found.max)
    assert found.sum == pytest.approx(float(np.sum([loss for loss, _ in known])), nan_ok=True)


def test_grouped_signals_count_by_their_all_and_counts_by_quantity_by_their_sum() -> None:
    found = one(
        {"grad_norm": {"all": 2.0, "mlp": 1.0}, "nonfinite": {"loss": 0.0, "grad": 0.0}},
        {"grad_norm": {"all": 3.0, "mlp": 9.0}, "nonfinite": {"loss": 1.0, "grad": 1.0}},
    )
    assert found["grad_norm"] == RankStats(2.0, 3.0, 5.0, 1, 2)
    assert found["nonfinite"] == RankStats(0.0, 2.0, 2.0, 1, 2)
    assert found["nonfinite.grad"] == RankStats(0.0, 1.0, 1.0, 1, 2)
    assert "nonfinite.param" not in found
    assert "nonfinite.loss" not in one({"nonfinite": {"loss": 0.0}}, {"nonfinite": {"loss": 0.0}})


def test_a_sum_over_all_ranks_is_there_only_where_every_rank_measured_its_share() -> None:
    def own(square: float | None, weight: float | None = None) -> Own:
        shares: dict[str, Any] = {}
        if square is not None:
            shares["grad_norm"] = {"grad_square": {"all": square, "mlp": square}, "grad_parts": {"all": 1.0}}
        if weight is not None:
            shares["state"] = {"weight": {"all": weight}}
        return LAYOUT.own({}, shares)

    both, missing = combine([[own(4.0, 1.0), own(4.0)], [own(5.0), own(None)]], weights=[0.5, 1.0])
    assert both.totals["grad_norm"]["grad_square.all"] == 7.0
    assert both.totals["grad_norm"]["grad_square.mlp"] == 7.0
    assert both.totals["grad_norm"]["grad_square.head"] == 0.0
    assert both.totals.keys() == {"grad_norm"}
    assert missing.totals == {}


def test_the_vector_of_a_step_has_one_length_whatever_the_number_of_ranks() -> None:
    own = [LAYOUT.own({"loss": 1.0}, {})]
    assert to_sum(own, 1.0).shape == (1, 3 * len(RANKED) + 2 + 3 * len(GROUPS))
    assert to_max(own).shape == (1, 2 * len(RANKED))
    assert LAYOUT.digest() != Layout({}).digest()
    assert LAYOUT.digest() == Layout({"grad_norm": ("grad_square", "grad_parts"), "state": ("weight",)}).digest()
