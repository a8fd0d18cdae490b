"""Cases of category f: what people ask for when they are called, and how the detectors of others do on the same rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bench.peers_rules import RULES
from tests.cases.build import Row, Verdicts, judge, rows, steady
from tests.cases.registry import case
from tests.cases.test_cases_a import LOG_A01
from trainwarden.rules.report.markdown import text, to_markdown
from trainwarden.rules.report.scale import short

# -- F01: the library changed, and nothing is wrong


def activations(level: float, seed: int, name: str = "activation_norm") -> Any:
    def make(step: int, chance: np.random.Generator) -> Row:
        value = level * (1 + 0.01 * float(chance.normal()))
        return {
            "loss": 2.2 - 1e-5 * step + 0.02 * float(chance.normal()),
            "grad_norm": abs(0.4 + 0.04 * float(chance.normal())),
            "lr": 1e-4,
            name: {"all": value, "mlp": value} if name == "activation_rms" else value,
        }

    return make


def restarted(
    before: float, after: float, name: str = "activation_norm", said: dict[int, dict[str, Any]] | None = None
) -> Verdicts:
    versions = {
        0: {"torch": "1.12.0", "nccl": "2.10.3", "hostname": "n01", "betas": [0.9, 0.95]},
        1: {"torch": "1.13.1", "nccl": "2.14.3", "hostname": "n01", "betas": [0.9, 0.95]},
    }
    return judge(
        rows(1, 800, activations(before, 0, name)),
        rows(801, 1600, activations(after, 1, name), seed=1),
        said=versions if said is None else said,
    )


def changes(found: Verdicts) -> list[dict[str, Any]]:
    return [one for one in found.notices if one["kind"] == "environment_change"]


@case("F01")
@pytest.mark.parametrize("name", ["activation_norm", "activation_rms"])
@pytest.mark.parametrize("factor", [1.3, 0.6, 2.0])
def test_f01_activations_of_another_library_are_information_and_page_nobody(name: str, factor: float) -> None:
    found = restarted(10.0, 10.0 * factor, name)
    assert found.told == []
    first, level = changes(found)
    assert (first["attempt"], first["step"], first["signal"]) == (1, 800, None)
    assert "torch 1.12.0 -> 1.13.1, nccl 2.10.3 -> 2.14.3" in first["says"]
    assert (level["step"], level["signal"]) == (801, name)
    times = float(level["says"].split(" is ")[1].split(" times")[0])
    assert times == pytest.approx(factor, rel=0.03)


@case("F01")
def test_f01_the_same_activations_are_not_told_of_and_the_same_library_neither() -> None:
    assert [one["signal"] for one in changes(restarted(10.0, 10.0))] == [None]
    same = {0: {"torch": "1.12.0"}, 1: {"torch": "1.12.0"}}
    assert changes(restarted(10.0, 13.0, said=same)) == []


@case("F01")
def test_f01_what_took_effect_is_compared_and_not_what_a_file_asked_for() -> None:
    said = {
        0: {"betas": [0.9, 0.98], "versions": {"apex": "0.1"}, "hostname": "n01"},
        1: {"betas": [0.9, 0.95], "versions": {"apex": "0.2"}, "hostname": "n07"},
    }
    (first,) = changes(restarted(10.0, 10.0, said=said))
    for part in ("betas 0.9 0.98 -> 0.9 0.95", "apex 0.1 -> 0.2", "hostname n01 -> n07"):
        assert part in first["says"]


@case("F01")
def test_f01_an_incident_behind_the_change_carries_it_with_the_last_good_checkpoint_and_the_scale() -> None:
    def broken(step: int, chance: np.random.Generator) -> Row:
        row: Row = activations(13.0, 1)(step, chance) | {"loss_scale": 1024.0}
        return row | {"loss": math.nan} if step >= 1400 else row

    said = {0: {"torch": "1.12.0"}, 1: {"torch": "1.13.1"}}
    good = (1300, "checkpoint", {"step": 1300, "path": "ckpt/1300", "complete": True})
    found = judge(rows(1, 800, activations(10.0, 0)), rows(801, 1450, broken, seed=1), said=said, changes=[good])
    (page,) = found.pages
    assert (page["run"], page["onset_step"]) == ("case", 1400)
    assert page["post_mortem"]["last_good"] == {"attempt": 1, "step": 1300, "path": "ckpt/1300"}
    assert page["post_mortem"]["loss_scale"] == 1024.0
    assert "torch 1.12.0 -> 1.13.1" in " ".join(one["says"] for one in page["evidence"])


# -- F03: what is no page


@case("F03")
def test_f03_one_sample_without_throughput_at_a_restart_is_no_page() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        rate = 0.0 if step == 801 else 52_000 * (1 + 0.01 * float(chance.normal()))
        return {
            "loss": 2.4 + 0.02 * float(chance.normal()),
            "tokens_per_second": rate,
            "step_duration_seconds": 40.0 if step == 801 else 2.0 + 0.02 * float(chance.normal()),
        }

    assert judge(rows(1, 800, make), rows(801, 1400, make, seed=1)).told == []


@case("F03")
def test_f03_the_last_gradient_of_the_attempt_before_is_not_that_of_the_new_one() -> None:
    before = rows(1, 799, steady(2.4, 0.02, grad_norm=(0.4, 0.04)))
    last: list[tuple[int, Row]] = [(800, {"loss": 2.41, "grad_norm": 2.4})]
    after = rows(751, 1400, steady(2.4, 0.02, grad_norm=(0.4, 0.04)), seed=1)
    found = judge([*before, *last], after)
    assert found.pages == []
    assert [one for one in found.told if one["attempt"] == 1] == []


# -- F04: the post-mortem


def a01(scale: float = 1.0, at: int = 0) -> list[tuple[int, Row]]:
    """Case A01 with its quoted rows, moved by ``at`` steps, the losses times ``scale``."""

    def make(step: int, chance: np.random.Generator) -> Row:
        loss, norm = 2.2 + 0.02 * float(chance.normal()), abs(0.2 + 0.05 * float(chance.normal()))
        quoted = step - at
        if quoted in LOG_A01:
            loss, norm = LOG_A01[quoted]
        elif 31223 <= quoted < 31250:
            loss += 1.0 * (0.016 / 1.0) ** ((quoted - 31222) / 28)
        return {"loss": loss * scale, "grad_norm": norm, "lr": 5.279e-5}

    return rows(30714 + at, 31500 + at, make)


#: What a post-mortem asks for (case F04), by the field of the incident that holds it.
ASKED = {
    "step": "where it began",
    "loss_before": "the loss before, over 50 steps",
    "loss_peak": "the peak",
    "loss_after": "the loss 50 steps behind the peak",
    "grad_norm": "the gradient norm before clipping",
    "lr": "the learning rate",
    "precision": "the precision",
    "samples": "the batch",
    "unusual": "unusual tokens",
    "hypotheses": "ranked hypotheses with what supports each",
    "test": "what would tell",
    "conclusion": "the cause in a sentence",
    "smallest_change": "the smallest change",
    "verified": "the run that verified it",
    "advice": "advice",
}


@case("F04")
@pytest.mark.parametrize(("scale", "at"), [(1.0, 0), (1.7, -20_000), (0.4, 100_000)])
def test_f04_every_field_of_a_post_mortem_is_there_and_equals_the_log(scale: float, at: int) -> None:
    log = a01(scale, at)
    said = {0: {"precision": "bfloat16"}}
    found = judge(log, samples=2048, said=said, changes=[checkpoint(31200 + at, path="ckpt/31200")])
    (incident,) = found.told
    told = incident["post_mortem"]
    assert set(ASKED) <= set(told)
    losses = {step: row["loss"] for step, row in log}
    norms = {step: row["grad_norm"] for step, row in log}
    onset = incident["onset_step"]
    assert told["step"] == onset
    assert 31215 + at <= onset <= 31218 + at
    before = [losses[step] for step in range(onset - 50, onset)]
    assert told["loss_before"] == pytest.approx(np.mean(before))
    assert (told["loss_peak"], told["loss_peak_step"]) == (pytest.approx(5.098 * scale, rel=0.01), 31219 + at)
    assert told["loss_peak"] == losses[31219 + at]
    assert told["loss_after_step"] == 31269 + at
    assert told["loss_after"] == losses[31269 + at]
    assert told["grad_norm"] == norms[onset]
    assert told["grad_norm_peak"] == max(norms[step] for step in range(onset, 31260 + at))
    assert told["lr"] == 5.279e-5
    assert told["precision"] == "bfloat16"
    assert told["samples"] == [[(onset - 1) * 2048, onset * 2048]]
    assert told["unusual"] == {}
    assert told["last_good"] == {"attempt": 0, "step": 31200 + at, "path": "ckpt/31200"}
    assert [one["cause"] for one in told["hypotheses"]] == [
        name for name, _ in sorted(incident["cause"]["scores"].items(), key=lambda one: (-one[1], one[0]))
    ]
    assert all(one["because"] for one in told["hypotheses"])
    assert told["test"] == incident["cheapest_test"]
    assert told["conclusion"] == incident["summary"]
    assert told["smallest_change"] == "None: it healed by itself."
    assert told["verified"] is None
    shown = to_markdown(incident)
    for name in ("loss_before", "loss_peak", "loss_after", "grad_norm", "grad_norm_peak", "lr"):
        assert text(short(told[name])) in shown, name
    assert "bfloat16" in shown
    assert f"ckpt/{31200}" in shown


def checkpoint(step: int, **fields: Any) -> tuple[int, str, dict[str, Any]]:
    return (step, "checkpoint", {"step": step, "path": f"ckpt/{step}", "complete": True, **fields})


@case("F04")
def test_f04_what_nobody_measured_is_unknown_and_what_is_unusual_of_the_batch_is_named() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        dirty = step >= 600
        return {
            "loss": 2.4 + 0.02 * float(chance.normal()) + 1.5 * dirty,
            "batch_longest_repeat_tokens": 300.0 if dirty else float(chance.integers(14, 30)),
        }

    (incident,) = judge(
        rows(1, 760, make), samples=16, said={0: {"can_skip": ["substitute"]}}, changes=[checkpoint(500)]
    ).told
    told = incident["post_mortem"]
    for name in ("grad_norm", "grad_norm_peak", "lr", "precision", "loss_scale", "clip_ratio", "verified"):
        assert told[name] is None, name
    assert told["unusual"]["batch_longest_repeat_tokens"]["value"] == 300.0
    assert 14 <= told["unusual"]["batch_longest_repeat_tokens"]["usual"] <= 30
    assert told["hypotheses"][0]["cause"] == "data"
    assert told["samples"] == [[599 * 16, 600 * 16]]
    assert incident["plan"]["reasons"]["skip_samples"] in told["smallest_change"]


# -- F06: the detectors of others on the same rows


def a11(seed: int = 0) -> list[tuple[int, Row]]:
    """Case A11: a spike of 3 % that settles 0.015 above the old level."""

    def make(step: int, chance: np.random.Generator) -> Row:
        level = 1.96 - 1e-6 * step
        if 2000 <= step < 2030:
            level += 0.06 * 0.93 ** (step - 2000)
        return {"loss": level + 0.015 * (step >= 2000) + 0.008 * float(chance.normal())}

    return rows(1, 4000, make, seed=seed)


def b09(seed: int = 0) -> list[tuple[int, Row]]:
    def make(step: int, chance: np.random.Generator) -> Row:
        spike = 5.0 if 1000 <= step < 1003 else 0.8 if 1060 <= step < 1063 else 0.0
        return {"loss": 2 + spike + 0.02 * float(chance.normal())}

    return rows(1, 1400, make, seed=seed)


def b11(seed: int = 0) -> list[tuple[int, Row]]:
    def make(step: int, chance: np.random.Generator) -> Row:
        down = max(0, step - 5000) / 1000
        spike = 0.1 if 5800 <= step < 5820 else 0.0
        return {"loss": 2.6 - 0.25 * down + spike + 0.012 * float(chance.normal()), "lr": 1e-3 * (1 - down) + 1e-9}

    return rows(1, 6000, make, seed=seed)


def noisy(seed: int = 0) -> list[tuple[int, Row]]:
    """Small batches: a healthy loss whose neighbours differ by more than a fifth now and then."""
    return rows(1, 3000, steady(2.4, 0.2, grad_norm=(0.5, 0.1)), seed=seed)


def rounded(seed: int = 0) -> list[tuple[int, Row]]:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {"loss": 1.6953 + 0.0078125 * max(-5, min(5, round(1.5 * float(chance.normal()))))}

    return rows(1, 2000, make, seed=seed)


#: The rows, and the stretches in which somebody should raise a hand; anywhere else it is a false alarm.
QUOTED: dict[str, tuple[Any, list[range]]] = {
    "A01": (a01, [range(31214, 31260)]),
    "A11": (a11, [range(2000, 2500)]),
    "B01": (rounded, []),
    "B09": (b09, [range(1000, 1020), range(1060, 1080)]),
    "B11": (b11, [range(5800, 5840)]),
    "noise": (noisy, []),
}


def hands(log: list[tuple[int, Row]], alarms: list[bool], wanted: list[range]) -> tuple[int, int]:
    """Return how many of the wanted stretches were hit, and how many separate alarms were false."""
    raised = [step for (step, _), alarm in zip(log, alarms, strict=True) if alarm]
    hits = sum(any(step in stretch for step in raised) for stretch in wanted)
    false = [step for step in raised if not any(step in stretch for stretch in wanted)]
    return hits, sum(1 for place, step in enumerate(false) if place == 0 or step > false[place - 1] + 20)


def table() -> dict[str, dict[str, tuple[int, int]]]:
    """Return (hits, false alarms) on each case's rows by detector, ours under its own name."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, (make, wanted) in QUOTED.items():
        log = make()
        losses = [row["loss"] for _, row in log]
        norms = [row["grad_norm"] for _, row in log] if "grad_norm" in log[0][1] else None
        for rule in RULES:
            found.setdefault(rule.name, {})[name] = hands(log, rule.judge(losses, norms), wanted)
        told = {one["onset_step"] for one in judge(log).told}
        found.setdefault("trainwarden", {})[name] = hands(log, [step in told for step, _ in log], wanted)
    return found


@case("F06")
def test_f06_on_the_quoted_rows_no_detector_of_one_signal_has_all_hits_and_no_false_alarm() -> None:
    found = table()
    ours = found.pop("trainwarden")
    assert ours == {name: (len(wanted), 0) for name, (_, wanted) in QUOTED.items()}
    assert len(found) >= 10
    for name, rows_of in found.items():
        assert rows_of != ours, name
    lightning = next(of for name, of in found.items() if "lightning" in name.lower())
    assert (lightning["A01"][0], lightning["A11"][0]) == (0, 0)  # twice the running mean away misses both
    flagscale = next(of for name, of in found.items() if "flagscale" in name.lower())
    assert flagscale["noise"][1] > 0  # a fifth above the last value is noise where batches are small
