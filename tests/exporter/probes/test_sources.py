"""The mix of sources, the loss expected of it, and real training on an easy and a hard source."""

from __future__ import annotations

import math
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.exporter.runs import lines, steps, watch
from tests.exporter.two_sources import TwoSources, train_on
from trainwarden.exporter import Exporter
from trainwarden.exporter.levels import Levels
from trainwarden.exporter.probes.sources import find_source
from trainwarden.record import Step
from trainwarden.signals import MOST_SOURCES

IDS = torch.randint(0, 6, (4, 5), generator=torch.Generator().manual_seed(0))


@dataclass
class Batch:
    input_ids: torch.Tensor
    domain: Any


@pytest.mark.parametrize(
    ("batch", "shares"),
    [
        ({"input_ids": IDS, "source": ["web", "code", "web", "web"]}, {"web": 0.75, "code": 0.25}),
        ({"input_ids": IDS, "source": "code"}, {"code": 1.0}),
        ({"input_ids": IDS, "sources": torch.tensor([0, 2, 0, 77])}, {"web": 0.5, "2": 0.25, "other": 0.25}),
        ({"input_ids": IDS, "sources": torch.tensor(1)}, {"books": 1.0}),
        ({"input_ids": IDS, "dataset": np.array([1, 0, 0, 1])}, {"web": 0.5, "books": 0.5}),
        ({"input_ids": IDS, "dataset": np.array(["a", "b", "a", "a"])}, {"a": 0.75, "b": 0.25}),
        ({"input_ids": IDS, "domain": (5, -1)}, {"5": 0.5, "-1": 0.5}),
        (Batch(IDS, ["web", "books"]), {"web": 0.5, "books": 0.5}),
        ({"meta": {"source": ["web"]}, "input_ids": IDS}, {"web": 1.0}),
        ([{"input_ids": row, "source": name} for row, name in zip(IDS, "aabb", strict=True)], {"a": 0.5, "b": 0.5}),
    ],
)
def test_the_mix_of_a_batch_is_counted_however_it_is_said(tmp_path: Path, batch: Any, shares: dict[str, float]) -> None:
    model = nn.Embedding(6, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, sources=("web", "books"))
    for _ in exporter.wrap([batch]):
        exporter.step(1.0)
    exporter.close()
    assert [said for said in exporter.notices if "loader" not in said] == []
    (record,) = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert record.signals["source_share"] == shares


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS},
        {"source": ["Ein ganzer Satz, der übersetzt werden soll und deshalb kein Name einer Quelle ist."]},
        {"source": torch.rand(4)},
        {"source": torch.zeros(4, 5, dtype=torch.int64)},
        {"source": [None, "web"]},
        {"source": ""},
        {"source": True},
        {"dataset": object()},
        (IDS, IDS),
        None,
    ],
)
def test_what_names_no_source_is_none(batch: Any) -> None:
    assert find_source(batch) is None


def test_micro_batches_are_mixed_by_their_samples(tmp_path: Path) -> None:
    model = nn.Embedding(6, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.batch(IDS, source="web")
    exporter.batch(IDS[:1], source="code")
    exporter.batch(IDS[:3], source=torch.tensor([0, 0, 1]))
    exporter.step(1.0)
    exporter.batch(IDS)
    exporter.step(1.0)
    first, second = steps(exporter, tmp_path)
    assert first.signals["source_share"] == {"web": 0.5, "code": 0.125, "0": 0.25, "1": 0.125}
    assert "source_share" not in second.signals
    assert "loss_expected" not in second.signals


def test_sources_beyond_the_limit_are_one_and_that_is_said_once(tmp_path: Path) -> None:
    model = nn.Embedding(6, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    for _ in range(2):
        exporter.batch(IDS, source=[f"s{number}" for number in range(40)])
        exporter.step(1.0)
    exporter.close()
    assert exporter.notices == [f"more than {MOST_SOURCES} sources: the rest counts as one, 'other'"]
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    shares = records[1].signals["source_share"]
    assert isinstance(shares, dict)
    assert len(shares) == MOST_SOURCES + 1
    assert shares["other"] == pytest.approx(8 / 40)


def page_of(exporter: Exporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_the_page_shows_configured_sources_and_never_a_name_that_a_batch_brought(tmp_path: Path) -> None:
    for names, shares in (((), {"other": 1.0}), (("web", "code"), {"web": 0.5, "code": 0.0, "other": 0.5})):
        model = nn.Embedding(6, 2)
        folder = tmp_path / str(len(names))
        exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), folder, sources=names)
        assert page_of(exporter).count("train_source_share{") == len(shares)
        exporter.batch(IDS, source=["web", "secret", "odd", "web"])
        exporter.step(1.0)
        exporter._parts.drain.finish(5)  # type: ignore[union-attr]
        page = page_of(exporter)
        exporter.close()
        assert "secret" not in page
        found = {
            line.split('source="')[1].split('"')[0]: float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith("train_source_share{")
        }
        assert found == shares


@pytest.mark.parametrize("sources", ["web", ("web", "web"), (1,), ("other",), tuple(map(str, range(33))), 5, ("",)])
def test_names_of_sources_are_checked_when_the_exporter_is_made(tmp_path: Path, sources: Any) -> None:
    model = nn.Embedding(4, 2)
    with pytest.raises((TypeError, ValueError), match="sources: "):
        Exporter(model, torch.optim.SGD(model.parameters(), lr=0.1), dir=tmp_path, port=0, sources=sources)


# What a loss is expected to be.


def run_levels(mixes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    levels, found = Levels(mixes.shape[1]), []
    for mix, loss in zip(mixes, losses, strict=True):
        levels.pass_step()
        expected = levels.expected(mix)
        found.append(math.nan if expected is None else expected)
        levels.learn(mix, float(loss))
    return np.array(found)


def test_levels_are_found_from_mixed_batches_alone() -> None:
    chance = np.random.default_rng(0)
    truth = np.array([2.0, 4.0, 3.0])
    mixes = chance.dirichlet((0.5, 0.5, 0.5), 600)
    losses = mixes @ truth + chance.normal(0, 0.02, 600)
    expected = run_levels(mixes, losses)
    assert np.isnan(expected[0])
    assert np.abs(expected[100:] - mixes[100:] @ truth).max() < 0.05


def test_levels_follow_a_training_and_know_a_source_that_was_away() -> None:
    chance = np.random.default_rng(1)
    step = np.arange(2000)
    fall = 3 * (step + 50.0) ** -0.25
    hard = (step % 40 == 39).astype(float)  # one batch in forty
    mixes = np.stack((1 - hard, hard), axis=1)
    losses = fall * (1 + hard) + chance.normal(0, 0.01, 2000)
    expected = run_levels(mixes, losses)
    off = (losses - expected)[200:]
    assert np.nanmax(np.abs(off)) < 0.15, "a hard batch lies as near to what is expected of it as any other"
    assert (losses - fall)[hard == 1].min() > 0.4, "and far above the others"


def test_an_outlier_teaches_little_and_a_new_level_is_learned() -> None:
    chance = np.random.default_rng(2)
    losses = 2 + chance.normal(0, 0.01, 600)
    losses[200] = 60.0
    losses[210] = math.nan
    losses[211] = math.inf
    losses[400:] += 0.5
    expected = run_levels(np.ones((600, 1)), losses)
    assert np.abs(expected[201:399] - 2).max() < 0.05
    assert abs(expected[-1] - 2.5) < 0.02


def test_a_source_that_was_never_seen_has_no_expectation() -> None:
    mixes = np.array([[1.0, 0.0]] * 30 + [[0.0, 1.0]] * 2 + [[0.5, 0.5]])
    expected = run_levels(mixes, np.array([2.0] * 30 + [5.0] * 2 + [3.5]))
    assert np.isnan(expected[30])
    assert expected[31] == pytest.approx(5.0, abs=0.2)
    assert expected[32] == pytest.approx(3.5, abs=0.2)


@pytest.mark.parametrize("per_sample", [False, True], ids=["mean", "per-sample"])
def test_in_a_real_training_a_hard_batch_is_no_spike_against_what_is_expected_of_it(
    tmp_path: Path, per_sample: bool
) -> None:
    torch.manual_seed(0)
    is_hard = [batch % 29 == 28 for batch in range(290)]
    data = TwoSources(torch.tensor(is_hard).repeat_interleave(16))
    exporter = train_on(data, tmp_path, per_sample=per_sample)
    records = steps(exporter, tmp_path)
    assert len(records) == len(is_hard)
    settled = [(record, noisy) for record, noisy in zip(records, is_hard, strict=True) if record.step > 120]
    hard = [record for record, noisy in settled if noisy]
    easy = [record for record, noisy in settled if not noisy]
    assert all(record.signals["source_share"] == {"noise": 1.0} for record in hard)

    def ratio(record: Step) -> float:
        loss, expected = record.value("loss"), record.value("loss_expected")
        assert loss is not None
        assert expected is not None
        return loss / expected

    usual = float(np.median([record.value("loss") for record in easy]))
    assert min(record.value("loss") or 0 for record in hard) > 5 * usual, "to a rule on the loss it is a spike"
    assert max(map(ratio, hard)) < 1.2, "and it is none against what is expected of its source"
    assert max(map(ratio, easy)) < 2.0


def test_losses_of_samples_tell_the_sources_of_one_batch_apart(tmp_path: Path) -> None:
    for name, source in (("names", ["a", "b", "a", "b"]), ("numbers", torch.tensor([0, 1, 0, 1]))):
        model = nn.Embedding(6, 2)
        exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / name, sources=("a", "b"))
        for step in range(30):
            exporter.batch(IDS, source=source)
            exporter.step(torch.tensor([1.0, 3.0, 1.2, 3.2]))
            if step == 28:  # a batch of one source alone, which was never seen alone
                exporter.batch(IDS, source="b")
                exporter.step(3.1)
        records = steps(exporter, tmp_path / name)
        assert records[29].value("loss_expected") == pytest.approx(3.1, abs=0.02)
        assert records[28].value("loss_expected") == pytest.approx(2.1, abs=0.02)
