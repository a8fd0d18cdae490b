"""Cases of category a as tables in their writers' words: slow faults, settings, data; warnings, and never a page or a rollback."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, Verdicts, lines_of, rows
from tests.cases.build_files import journal, lines, replayed, table
from tests.cases.registry import case
from trainwarden.record import ShardSpan, Step


def says(incident: dict[str, Any]) -> str:
    return " ".join(one["says"] for one in incident["evidence"])


def harmless(found: Verdicts) -> bool:
    """Say whether nobody is paged and nothing is done to the run."""
    return not found.pages and all((one["action"], one["plan"]) == ("none", None) for one in found.incidents)


def calm(chance: np.random.Generator) -> Row:
    return {"loss": 2.4 + 0.02 * float(chance.normal()), "lr": 1e-4}


def unstable(seed: int, name: str, each: int) -> tuple[list[tuple[int, Row]], list[int]]:
    """130 of 2500 steps in spikes: the update doubles one to three steps before the loss, and in three of ten without one."""
    chance = np.random.default_rng(seed)
    begins = np.sort(chance.choice(np.arange(1500, 3980, 2 * each), size=130 // each, replace=False))
    update, loss, norm = np.ones(4300), np.zeros(4300), np.ones(4300)
    for begin in begins:
        lead = int(chance.integers(1, 4))
        update[begin : begin + lead + each] *= 2.0
        if chance.random() < 0.7:
            tail = np.arange(each)
            loss[begin + lead : begin + lead + each] += 0.5 * np.exp(-tail / 3)
            norm[begin + lead : begin + lead + 3] *= 3.0
    made = []
    for step in range(1, 4201):
        row: Row = {
            "loss": 2.4 * (1 + 0.008 * float(chance.normal())) + float(loss[step]),
            "grad_norm": 0.2 * math.exp(0.15 * float(chance.normal())) * float(norm[step]),
            "lr": 3e-4,
            name: 1e-3 * math.exp(0.05 * float(chance.normal())) * float(update[step]),
        }
        made.append((step, row))
    return made, [int(begin) for begin in begins]


@case("A10")
@pytest.mark.parametrize(
    ("seed", "name", "each"), [(0, "update_norm", 5), (1, "update_ratio", 5), (2, "update_norm", 10)]
)
def test_a10_spikes_that_the_update_leads_are_one_recurring_incident_with_a_count(
    tmp_path: Path, seed: int, name: str, each: int
) -> None:
    made, begins = unstable(seed, name, each)
    found = replayed(table(tmp_path / "a10.csv", made))
    assert harmless(found)
    first = found.incidents[0]
    assert first["alerts"][0] == "TrainingUpdateSurge"  # the early warning, before the loss
    assert begins[0] <= first["opened_step"] <= begins[0] + 1
    (recurring,) = [one for one in found.told if one["verdict"] == "recurring_spikes"]
    assert recurring["severity"] == "warning"
    assert recurring["cause"]["name"] in ("optimizer_state", "model", "undetermined")
    assert recurring["cause"]["scores"].get("data", 0.0) < 0.2
    assert "separate spikes" in says(recurring)
    assert "a person" in says(recurring)
    assert len(found.told) <= 4  # three before the fourth shows that they recur


@case("A26")
@pytest.mark.parametrize(
    ("seed", "name", "at", "low"), [(0, "aux_loss", 4200, 0.71), (1, "load_balancing_loss", 2600, 0.93)]
)
def test_a26_a_balance_loss_below_its_floor_is_a_breach_and_no_spike(
    tmp_path: Path, seed: int, name: str, at: int, low: float
) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        level = 1.02 if step < at - 200 else max(low, 1.02 - (1.02 - low) * (step - at + 200) / 200)
        return {**calm(chance), name: level + 0.002 * abs(float(chance.normal()))}

    found = replayed(table(tmp_path / "a26.csv", rows(1, at + 600, make, seed=seed)))
    assert harmless(found)
    (one,) = found.told
    assert (one["severity"], one["verdict"], one["cause"]["name"]) == ("warning", "mismatch", "model")
    assert at - 200 <= one["onset_step"] <= at + 20


@case("A27")
@pytest.mark.parametrize(("seed", "dtype"), [(0, "bfloat16"), (1, "torch.bfloat16")])
def test_a27_moments_in_bfloat16_are_a_notice_and_updates_of_nothing_a_warning(
    tmp_path: Path, seed: int, dtype: str
) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {**calm(chance), "update_zero_ratio": 0.6 + 0.02 * float(chance.normal())}

    said = {0: {"optimizer_state_dtype": dtype}}
    found = replayed(journal(tmp_path / "run", lines_of(rows(1, 600, make, seed=seed), said=said)))
    assert harmless(found)
    (one,) = found.told
    assert (one["severity"], one["verdict"], one["cause"]["name"]) == ("warning", "mismatch", "numeric")
    (notice,) = [one for one in found.notices if one["kind"] == "preflight"]
    assert "bfloat16" in notice["says"]


@case("A27")
def test_a27_in_a_table_a_share_of_zero_updates_is_enough(tmp_path: Path) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {**calm(chance), "update_zero_fraction": 0.6 + 0.02 * float(chance.normal())}

    (one,) = replayed(table(tmp_path / "a27.csv", rows(1, 600, make))).told
    assert (one["severity"], one["verdict"]) == ("warning", "mismatch")


def bumps(seed: int, period: int, shards: str = "") -> list[tuple[int, Row]]:
    """A bump of 0.4 that decays over thirty steps where each shard begins."""

    def make(step: int, chance: np.random.Generator) -> Row:
        since = (step - 1) % period
        bump = 0.4 * math.exp(-since / 10) if since < 30 and step > period else 0.0
        row: Row = {"loss": 1.5 + bump + 0.01 * float(chance.normal())}
        return {**row, shards: float((step - 1) // period)} if shards else row

    return rows(1, 6 * period + 200, make, seed=seed)


def of_a29(found: Verdicts) -> dict[str, Any]:
    assert harmless(found)
    (one,) = [one for one in found.told if one["verdict"] == "periodic_spikes"]
    assert one["severity"] == "warning"
    assert one["action"] == "none"
    return one


@case("A29")
@pytest.mark.parametrize(
    ("seed", "period", "name"), [(0, 1000, "shard_id"), (1, 700, "shard"), (2, 500, "shard_index")]
)
def test_a29_bumps_where_the_table_says_that_a_shard_begins_are_the_datas_order(
    tmp_path: Path, seed: int, period: int, name: str
) -> None:
    one = of_a29(replayed(table(tmp_path / "a29.csv", bumps(seed, period, name))))
    assert one["cause"]["name"] == "data"
    assert f"every {period} steps, as the shards do" in says(one)


@case("A29")
@pytest.mark.parametrize("seed", [3])
def test_a29_where_records_name_their_shards_it_is_the_same(tmp_path: Path, seed: int) -> None:
    made = lines_of(bumps(seed, 1000), samples=4)
    for _, _, line in made:
        if isinstance(line, Step):
            shard = (line.step - 1) // 1000
            line.shards = [ShardSpan(f"shard-{shard:02d}", 4000 * shard, 4000 * shard + 4000)]
    one = of_a29(replayed(journal(tmp_path / "run", made)))
    assert one["cause"]["name"] == "data"
    assert "every 1000 steps, as the shards do" in says(one)


@case("A29")
def test_a29_a_period_of_which_nothing_is_known_is_said_to_be_one(tmp_path: Path) -> None:
    one = of_a29(replayed(table(tmp_path / "a29.csv", bumps(0, 1000))))
    assert one["cause"]["name"] == "undetermined"


@case("A32")
@pytest.mark.parametrize(("seed", "shares", "module"), [(0, False, "output_proj"), (1, True, "layers_0_mlp")])
def test_a32_a_norm_that_grows_over_the_whole_run_is_a_ticket_that_names_the_module(
    tmp_path: Path, seed: int, shares: bool, module: str
) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        norm = (0.3 + 1.6 * step / 100_000) * (1 + 0.05 * float(chance.normal()))
        parts = {module: 0.95, "embed": 0.02, "layers_1_attn": 0.02, "final_norm": 0.01}
        named = {
            f"grad_norm_share/{one}" if shares else f"grad_norm/{one}": share if shares else math.sqrt(share) * norm
            for one, share in parts.items()
        }
        return {"loss": 2.2 + 0.02 * float(chance.normal()), "grad_norm": norm, **named}

    found = replayed(table(tmp_path / "a32.csv", rows(40, 100_000, make, stride=40, seed=seed)))
    assert harmless(found)
    assert [one["verdict"] for one in found.told] == ["drift"]
    (one,) = found.told
    assert one["scope"]["modules"] == [module]
    assert f"95 % in {module}" in says(one)


@case("A36")
@pytest.mark.parametrize(
    ("seed", "pre", "post", "clip", "threshold"),
    [
        (0, "grad_norm_pre", "grad_norm_post", "clip", 1.0),
        (1, "grad_norm_pre_clip", "grad_norm_post_clip", "max_grad_norm", 0.2),
        (2, "grad_norm", "grad_norm_clipped", "clip_threshold", 5.0),
    ],
)
def test_a36_a_norm_behind_the_clipping_that_is_the_one_before_it_is_a_warning_of_the_settings(
    tmp_path: Path, seed: int, pre: str, post: str, clip: str, threshold: float
) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        norm = 14.0 * threshold * math.exp(0.3 * float(chance.normal()))
        return {**calm(chance), pre: norm, post: norm, clip: threshold}

    def mended(step: int, chance: np.random.Generator) -> Row:
        row = make(step, chance)
        return {**row, post: min(row[post], threshold)}

    found = replayed(table(tmp_path / "a36.csv", rows(1, 400, make, seed=seed)))
    assert harmless(found)
    (one,) = found.told
    assert (one["severity"], one["verdict"], one["alerts"]) == ("warning", "mismatch", ["TrainingClipIneffective"])
    assert found.kinds.count("preflight") == 1
    control = replayed(table(tmp_path / "control.csv", rows(1, 400, mended, seed=seed)))
    assert control.told == []
    assert "preflight" not in control.kinds


@case("A41")
@pytest.mark.parametrize(("seed", "vocabulary"), [(0, 50_257), (1, 32_000), (2, 128_256)])
def test_a41_an_id_that_the_vocabulary_does_not_have_is_the_datas(tmp_path: Path, seed: int, vocabulary: int) -> None:
    at = 400 + 137 * seed

    def make(step: int, chance: np.random.Generator) -> Row:
        highest = vocabulary + 43 if step == at else int(chance.integers(vocabulary - 300, vocabulary))
        return {**calm(chance), "token_id_max": float(highest), "vocab_size": float(vocabulary)}

    found = replayed(table(tmp_path / "a41.csv", rows(1, 1000, make, seed=seed)))
    assert harmless(found)
    (one,) = found.told
    assert (one["onset_step"], one["cause"]["name"], one["severity"]) == (at, "data", "warning")
    assert "TrainingTokenOutOfRange" in says(one)


@case("A41")
@pytest.mark.parametrize(("seed", "period", "words"), [(0, 1000, False), (1, 640, False), (2, 400, True)])
def test_a41_batches_that_come_again_and_a_loss_that_falls_with_them_are_the_datas(
    tmp_path: Path, seed: int, period: int, words: bool
) -> None:
    hashes = np.random.default_rng(5).integers(0, 2**48, size=period)

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = 2.4 - 0.1 * (step // period) + 0.02 * float(chance.normal())
        value = int(hashes[step % period])
        return {"loss": loss, "batch_hash": f"{value:012x}" if words else float(value)}

    made = rows(1, 3 * period, make, seed=seed)
    found = replayed(lines(tmp_path / "a41.jsonl", made) if words else table(tmp_path / "a41.csv", made))
    assert harmless(found)
    one = next(one for one in found.told if "TrainingRepeatedBatches" in one["alerts"])
    assert (one["cause"]["name"], one["verdict"], one["severity"]) == ("data", "mismatch", "warning")
    assert period < one["opened_step"] <= period + 100
    assert "TrainingRepeatedBatches" in says(one)


@case("A41")
def test_a41_batches_that_are_new_are_nothing(tmp_path: Path) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {**calm(chance), "batch_hash": float(chance.integers(0, 2**48))}

    assert replayed(table(tmp_path / "a41.csv", rows(1, 3000, make))).told == []
