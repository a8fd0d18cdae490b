"""Cases of instruments, settings and data: said once or told of, and never a page for what is no fault of the training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cases.build import Make, Row, Verdicts, judge, rows, steady
from tests.cases.registry import case


def rescaled(at: int, factor: float, norm: float = 1.0, noise: float = 0.01, afterwards: float | None = None) -> Make:
    """Return a maker of a loss and a gradient norm that are multiplied from step ``at`` on."""

    def make(step: int, chance: np.random.Generator) -> Row:
        behind = step >= at
        sd = afterwards if behind and afterwards is not None else noise
        loss = 2.1 * (factor if behind else 1.0) * (1 + sd * float(chance.normal()))
        grad = 0.5 * (norm if behind else 1.0) * math.exp(0.15 * float(chance.normal()))
        return {"loss": loss, "grad_norm": grad}

    return make


def notices(found: Verdicts, kind: str) -> list[tuple[str | None, int]]:
    return [(one["signal"], one["step"]) for one in found.notices if one["kind"] == kind]


@case("A30")
@pytest.mark.parametrize(("factor", "norm"), [(8.0, 8.0), (8.0, 1.0), (2.0, 2.0), (1 / 32, 1 / 32)])
def test_a30_a_loss_that_is_logged_times_eight_within_one_start_is_no_spike(factor: float, norm: float) -> None:
    found = judge(rows(1, 2500, rescaled(1001, factor, norm)))
    assert found.told == []
    assert notices(found, "logging_scale_change")[0] == ("loss", 1001)
    assert all(one["cause"]["name"] == "instrument" for one in found.incidents if one["opened_step"] < 1200)


@pytest.mark.parametrize(
    ("factor", "norm", "afterwards"),
    [
        (2.0, 1.0, 0.025),
        (math.sqrt(2), 1.0, 0.02),
        (math.sqrt(2), 1.0, 0.01 / math.sqrt(2)),
        (2.0, 4.7, 0.01),
        (2.2, 1.0, 0.01),
    ],
)
def test_a_loss_that_really_doubles_or_settles_higher_is_a_page(factor: float, norm: float, afterwards: float) -> None:
    found = judge(rows(1, 2500, rescaled(1001, factor, norm, afterwards=afterwards)))
    assert found.pages
    assert found.pages[0]["onset_step"] == 1001
    assert found.pages[0]["confirmed_step"] <= 1110
    assert notices(found, "logging_scale_change") == []


def test_behind_a_change_of_unit_a_true_shift_is_a_page_again() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        loss = 2.1 if step <= 1000 else 16.8 if step <= 2500 else 18.5
        return {"loss": loss * (1 + 0.01 * float(chance.normal()))}

    found = judge(rows(1, 3500, make))
    assert found.pages[0]["onset_step"] == 2501
    assert [one["onset_step"] for one in found.told][:1] == [2501]


@case("A18")
def test_a18_a_loss_that_stays_at_its_mean_while_the_gradient_is_nan_is_masked_and_a_page_by_the_gradient() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        if step >= 400:
            return {"loss": 1.91 + 1e-4 / (step - 399), "grad_norm": math.nan}
        return {"loss": 1.91 + 0.02 * float(chance.normal()), "grad_norm": 0.8 + 0.1 * float(chance.normal())}

    found = judge(rows(1, 480, make))
    (page,) = found.pages
    assert (page["verdict"], page["onset_step"]) == ("nonfinite", 400)
    assert notices(found, "masked_nonfinite") == [("loss", 404)]


@case("A18")
def test_a18_a_loss_that_was_counted_as_not_finite_is_masked_from_the_first_step() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        broken = step >= 400
        loss = 1.91 if broken else 1.91 + 0.02 * float(chance.normal())
        return {"loss": loss, "nonfinite": {"loss": float(broken)}}

    found = judge(rows(1, 480, make))
    assert found.pages[0]["verdict"] == "nonfinite"
    assert notices(found, "masked_nonfinite") == [("loss", 400)]


@case("A05")
def test_a05_the_norm_that_each_skipped_step_repeats_is_flagged_and_no_measurement() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        halved = min(max(step - 17060, 0), 5)
        row: Row = {"loss": 2.667 + 0.01 * float(chance.normal()), "loss_scale": 1048576.0 * 0.5**halved}
        row["grad_norm"] = 464441.887 if 17060 <= step <= 17065 else 1000 + 100 * float(chance.normal())
        return row

    found = judge(rows(16500, 17200, make))
    assert notices(found, "repeated_signal") == [("grad_norm", 17061)]
    assert not any(one["verdict"] in ("grad_collapse", "divergence") for one in found.incidents)


@case("A36")
@pytest.mark.parametrize("healthy", [False, True])
def test_a36_a_norm_behind_the_clipping_above_its_threshold_is_a_warning_of_the_settings(healthy: bool) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        norm = math.exp(1.0 + 0.3 * float(chance.normal()))
        kept = min(norm, 1.0) if healthy else norm
        return {
            "loss": 2.4 + 0.02 * float(chance.normal()),
            "grad_norm": norm,
            "grad_norm_clipped": kept,
            "clip_threshold": 1.0,
        }

    found = judge(rows(1, 400, make))
    assert found.pages == []
    if healthy:
        assert found.told == []
        assert "preflight" not in found.kinds
        return
    (one,) = found.told
    assert (one["severity"], one["verdict"], one["alerts"]) == ("warning", "mismatch", ["TrainingClipIneffective"])
    assert found.kinds.count("preflight") == 1


@case("A36")
def test_a36_clipping_of_gradients_that_still_carry_the_loss_scale_is_not_effective() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        ratio = 65536 * 0.3 * math.exp(0.3 * float(chance.normal()))
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "clip_ratio": ratio, "loss_scale": 65536.0}

    found = judge(rows(1, 600, make))
    assert "TrainingClipIneffective" in found.told[0]["alerts"]
    assert found.pages == []


@case("A26")
def test_a26_a_balance_loss_below_its_floor_is_a_breach_and_no_spike() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        floor = 1.02 if step < 1500 else max(0.9, 1.02 - (step - 1500) * 2e-4)
        aux = floor + 0.002 * abs(float(chance.normal()))
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "router_aux_loss": aux}

    found = judge(rows(1, 3000, make))
    assert found.pages == []
    (one,) = found.told
    assert (one["severity"], one["verdict"], one["cause"]["name"]) == ("warning", "mismatch", "model")
    assert 1600 <= one["onset_step"] <= 1650


@pytest.mark.parametrize("level", [1.02, 0.0102, 24.5])
def test_a_balance_loss_in_a_unit_of_its_own_or_above_its_floor_is_left_alone(level: float) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        aux = level * (1 + 0.2 * math.exp(-step / 300) + 0.002 * abs(float(chance.normal())))
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "router_aux_loss": aux}

    assert judge(rows(1, 3000, make)).told == []


@case("A27")
@pytest.mark.parametrize("told", [{"update_zero_ratio": 0.6}, {"update_ratio": 1e-3, "update_applied_ratio": 2e-4}])
def test_a27_updates_that_low_precision_swallows_are_a_warning_of_the_settings(told: Row) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        jitter = math.exp(0.03 * float(chance.normal()))
        return {
            "loss": 2.4 + 0.02 * float(chance.normal()),
            "lr": 1e-4,
            **{name: value * jitter for name, value in told.items()},
        }

    found = judge(rows(1, 600, make))
    (one,) = found.told
    assert (one["severity"], one["verdict"], one["cause"]["name"]) == ("warning", "mismatch", "numeric")
    assert one["alerts"] == ["TrainingUpdatesSwallowed"]


@case("A27")
def test_a27_a_share_of_updates_of_exactly_nothing_is_one_too() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        ratio = 0.0 if float(chance.random()) < 0.6 else 1e-3 * math.exp(0.05 * float(chance.normal()))
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "lr": 1e-4, "update_ratio": ratio}

    assert "TrainingUpdatesSwallowed" in judge(rows(1, 600, make)).told[0]["alerts"]


@case("A41")
def test_a41_a_token_that_the_vocabulary_does_not_have_is_a_matter_of_the_data() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        highest = 50_431 if step == 700 else int(chance.integers(50_200, 50_257))
        return {
            "loss": 2.4 + 0.02 * float(chance.normal()),
            "batch_token_id_max": float(highest),
            "vocabulary_size": 50_257.0,
            "batch_unique_token_ratio": 0.3 + 0.01 * float(chance.normal()),
        }

    found = judge(rows(1, 1000, make))
    (one,) = found.told
    assert (one["onset_step"], one["cause"]["name"], one["severity"]) == (700, "data", "warning")
    assert any("TrainingTokenOutOfRange" in line["says"] for line in one["evidence"])


@case("A41")
def test_a41_counted_by_the_exporter_it_is_the_same_and_an_unknown_vocabulary_is_nothing() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "batch_ids_out_of_range": 3.0 if step == 700 else 0.0}

    assert judge(rows(1, 1000, make)).told[0]["alerts"] == ["TrainingTokenOutOfRange"]

    def unknown(step: int, chance: np.random.Generator) -> Row:
        return {"loss": 2.4 + 0.02 * float(chance.normal()), "batch_ids_out_of_range": float(chance.integers(1, 99))}

    assert judge(rows(1, 1000, unknown)).told == []


def repeating(period: int | None, epoch: bool = False) -> Make:
    hashes = np.random.default_rng(5).integers(0, 2**32, size=6001).astype(float)

    def make(step: int, chance: np.random.Generator) -> Row:
        again = period is not None and step > period
        loss = 2.4 - 0.25 * (step / (period or 3000)) * again * 0.1 + 0.02 * float(chance.normal())
        row: Row = {"loss": loss, "batch_hash": float(hashes[step % period if period else step])}
        return {**row, "epoch": float(step // period)} if epoch and period else row

    return make


@case("A41")
def test_a41_batches_that_come_again_every_thousand_steps_are_a_matter_of_the_data() -> None:
    found = judge(rows(1, 4000, repeating(1000)))
    assert found.pages == []
    one = next(one for one in found.told if "TrainingRepeatedBatches" in one["alerts"])
    assert (one["cause"]["name"], one["verdict"], one["severity"]) == ("data", "mismatch", "warning")
    assert 1000 < one["opened_step"] <= 1100


@case("A41")
def test_a41_new_batches_and_those_of_the_next_epoch_are_nothing() -> None:
    assert judge(rows(1, 4000, repeating(None))).told == []
    assert judge(rows(1, 4000, repeating(1000, epoch=True))).told == []


@case("A32")
def test_a32_a_norm_that_grows_slowly_is_a_warning_that_names_the_output_projection() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        norm = (0.3 + 1.6 * step / 100_000) * (1 + 0.05 * float(chance.normal()))
        others = math.sqrt(0.05 / 3) * norm
        groups = {
            "all": norm,
            "output_proj": math.sqrt(0.95) * norm,
            "embedding": others,
            "mlp": others,
            "attention": others,
        }
        return {"loss": 2.2 + 0.02 * float(chance.normal()), "grad_norm": groups}

    found = judge(rows(10, 100_000, make, stride=10), stride=10)
    assert found.pages == []
    drift = [one for one in found.told if one["verdict"] == "drift"]
    assert len(drift) >= 1
    assert drift[0]["scope"]["modules"] == ["output_proj"]
    assert any("95 % in output_proj" in line["says"] for line in drift[0]["evidence"])


def unstable(seed: int, name: str = "update_ratio") -> tuple[list[tuple[int, Row]], int]:
    """Return 2500 steps of surges of the update behind 1500 calm ones; the loss follows 70 % of them two steps later (case A10)."""
    chance = np.random.default_rng(seed)
    begins = np.sort(chance.choice(np.arange(1500, 3980, 20), size=26, replace=False))
    update, loss, norm = np.ones(4201), np.zeros(4201), np.ones(4201)
    for begin in begins:
        update[begin : begin + 7] *= 2.0
        if chance.random() < 0.7:
            loss[begin + 2 : begin + 7] += 0.5 * np.exp(-np.arange(5) / 3)
            norm[begin + 1 : begin + 4] *= 3.0
    log = []
    for step in range(1, 4201):
        row: Row = {
            "loss": 2.4 * (1 + 0.008 * float(chance.normal())) + float(loss[step]),
            "grad_norm": 0.2 * math.exp(0.15 * float(chance.normal())) * float(norm[step]),
            "lr": 3e-4,
            name: 1e-3 * math.exp(0.05 * float(chance.normal())) * float(update[step]),
        }
        log.append((step, row))
    return log, int(begins[0])


@case("A10")
@pytest.mark.parametrize(("seed", "name"), [(0, "update_ratio"), (1, "update_ratio"), (2, "update_norm")])
def test_a10_dozens_of_spikes_that_the_update_leads_are_one_recurring_incident(seed: int, name: str) -> None:
    log, first = unstable(seed, name)
    found = judge(log)
    assert found.pages == []
    assert found.incidents[0]["opened_step"] <= first + 1  # before the loss
    assert found.incidents[0]["alerts"][0] == "TrainingUpdateSurge"
    (recurring,) = [one for one in found.told if one["verdict"] == "recurring_spikes"]
    assert len(found.told) <= 4
    assert recurring["action"] == "none"
    assert recurring["cause"]["name"] in ("optimizer_state", "undetermined")
    assert any(line["kind"] == "recurring" and "separate spikes" in line["says"] for line in recurring["evidence"])


@case("A10")
def test_a10_a_surge_of_the_update_that_comes_to_nothing_is_information() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        surge = 2.0 if 1000 <= step < 1006 else 1.0
        return {
            "loss": 2.4 + 0.02 * float(chance.normal()),
            "update_ratio": 1e-3 * math.exp(0.05 * float(chance.normal())) * surge,
        }

    found = judge(rows(1, 1500, make))
    assert found.told == []
    assert found.incidents[0]["alerts"] == ["TrainingUpdateSurge"]


@case("F06")
def test_f06_a_plain_run_is_left_alone() -> None:
    assert judge(rows(1, 3000, steady(2.4, 0.02, grad_norm=(0.5, 0.05), update_ratio=(1e-3, 5e-5)))).incidents == []
