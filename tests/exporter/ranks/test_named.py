"""Real runs of four processes and of two, then what is judged from their journals: who was fed junk or another's samples, whose memory failed; nobody else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.build import pack
from tests.exporter.ranks.harness import records, run
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged

#: A small transformer on sentences with something to learn and some noise; one rank meets the fault of a case from its step on.
BODY = """
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
kind = os.environ["KIND"]
if kind == "fsdp":
    from torch.distributed.fsdp import fully_shard
VOCABULARY, LENGTH, ROWS, VICTIM = 512, 25, 8, world // 2

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, 24), nn.Embedding(LENGTH, 24)
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        y = self.norm(x)
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return self.head(x + self.mlp(x))

def sentences(step, of):
    chance = torch.Generator().manual_seed(100_003 * step + of)
    ids = torch.randint(40, (ROWS, 1), generator=chance) + torch.randint(1, 4, (ROWS, 1), generator=chance) * torch.arange(LENGTH)
    rare = torch.rand(ROWS, LENGTH, generator=chance) < 0.1
    return torch.where(rare, torch.randint(VOCABULARY, (ROWS, LENGTH), generator=chance), ids % 120)

def batch(step, fault, at):
    chance = torch.Generator().manual_seed(step)
    if (rank != VICTIM and fault != "random for all") or step < at:
        return sentences(step, rank)
    if fault == "random for all":
        return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=chance.manual_seed(2 * step + rank))
    if fault == "random":
        return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=chance)
    if fault == "repeated":
        return torch.randint(VOCABULARY, (ROWS, 1), generator=chance).expand(ROWS, LENGTH).contiguous()
    if fault == "twin":
        return sentences(step, 1)[torch.randperm(ROWS, generator=chance)]
    return sentences(step, rank)

def train(name, fault, at, steps):
    torch.manual_seed(0)
    model = Tiny()
    if kind == "fsdp":
        fully_shard(model.mlp)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    exporter = watch(model, optimizer, folder, run=name, cadence=10)
    for step in range(1, steps + 1):
        ids = batch(step, fault, at)
        exporter.batch(ids)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if fault == "flip" and rank == VICTIM and step == at:
            with torch.no_grad():
                model.module.mlp[0].weight.view(torch.int32).view(-1)[11] ^= 1 << 12
        exporter.step(loss)
    exporter.close()
    say(**{name: exporter.notices})
    dist.barrier()

for name, (fault, at, steps) in json.loads(os.environ["CASES"]).items():
    train(name, fault, at, steps)
"""

#: By the name of a run: the fault, its first step, and the steps in all.
CASES: dict[str, dict[str, tuple[str, int, int]]] = {
    "ddp": {
        "random": ("random", 40, 60),
        "repeated": ("repeated", 90, 110),
        "twin": ("twin", 50, 70),
        "flip": ("flip", 44, 65),
        "healthy": ("", 0, 300),
    },
    "fsdp": {
        "random": ("random", 90, 110),
        "repeated": ("repeated", 40, 60),
        "twin": ("twin", 50, 70),
        "healthy": ("", 0, 200),
    },
}


#: The same with two ranks.
OF_TWO: dict[str, tuple[str, int, int]] = {
    "random": ("random", 90, 110),
    "repeated": ("repeated", 90, 110),
    "all": ("random for all", 90, 110),
    "healthy": ("", 0, 200),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases of two ranks; return where their journals lie."""
    folder = tmp_path_factory.mktemp("two")
    said = {"KIND": "ddp", "CASES": json.dumps(OF_TWO)}
    for ended in run(BODY, folder, world=2, environment=said, seconds=600):
        assert ended.said == {name: [] for name in OF_TWO}
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train all cases of each kind, one after another in the same four processes; return where their journals lie."""
    found = {}
    for kind, cases in CASES.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        said = {"KIND": kind, "CASES": json.dumps(cases)}
        for ended in run(BODY, found[kind], environment=said, seconds=600):
            assert ended.said == {name: [] for name in cases}
    return found


def judged(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the incidents that the journals of all four ranks of a run make."""
    (recording,) = find_recordings([str(folder / name)], io.BytesIO(), folder)
    return list(Replay(Settings(), pack()).run(merged(recording)).incidents.values())


def by_rule(incidents: list[dict[str, Any]], rule: str) -> dict[str, Any]:
    (found,) = [one for one in incidents if rule in one["alerts"]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["random", "repeated"])
def test_a_rank_that_is_fed_junk_is_named_within_two_steps(runs: dict[str, Path], kind: str, fault: str) -> None:
    _, at, _ = CASES[kind][fault]
    incident = by_rule(judged(runs[kind], fault), "TrainingRankApart")
    assert incident["scope"]["ranks"] == [2]
    assert at <= incident["opened_step"] <= at + 2
    assert incident["opened_step"] - incident["onset_step"] <= 2
    assert incident["cause"]["name"] in (("data",) if fault == "repeated" else ("data", "undetermined"))
    own = [records(runs[kind], rank, fault)[at].value("rank_grad_norm") or 0.0 for rank in range(4)]
    assert max(own) == own[2]  # its own gradient shows it too, before it is averaged away


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_is_fed_anothers_samples_is_found_whatever_their_order(runs: dict[str, Path], kind: str) -> None:
    incident = by_rule(judged(runs[kind], "twin"), "TrainingDuplicateSamples")
    assert incident["scope"]["ranks"] == [1, 2]
    assert (incident["verdict"], incident["cause"]["name"]) == ("mismatch", "data")
    assert (incident["onset_step"], incident["opened_step"]) == (50, 51)


@pytest.mark.slow
def test_a_rank_whose_memory_flips_a_bit_is_named_at_the_next_hash(runs: dict[str, Path]) -> None:
    incident = by_rule(judged(runs["ddp"], "flip"), "TrainingReplicasDrift")
    assert incident["scope"]["ranks"] == [2]
    assert (incident["verdict"], incident["severity"], incident["cause"]["name"]) == (
        "mismatch",
        "critical",
        "distributed",
    )
    assert (incident["onset_step"], incident["opened_step"]) == (50, 50)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_over_some_hundreds_of_healthy_steps_no_rank_is_named(runs: dict[str, Path], kind: str) -> None:
    incidents = judged(runs[kind], "healthy")
    assert [one for one in incidents if one["severity"] != "info"] == []
    assert [one["scope"]["ranks"] for one in incidents if one["scope"]["ranks"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["random", "repeated"])
def test_of_two_ranks_the_one_that_is_fed_junk_is_named_within_two_steps(two: Path, fault: str) -> None:
    _, at, _ = OF_TWO[fault]
    incident = by_rule(judged(two, fault), "TrainingRankApart")
    assert incident["scope"]["ranks"] == [1]
    assert at <= incident["opened_step"] <= at + 2
    assert incident["cause"]["name"] in (("data",) if fault == "repeated" else ("data", "undetermined"))


@pytest.mark.slow
def test_of_two_ranks_that_are_both_fed_junk_or_both_sound_none_is_named(two: Path) -> None:
    for name in ("all", "healthy"):
        incidents = judged(two, name)
        assert [one["scope"]["ranks"] for one in incidents if one["scope"]["ranks"]] == [], name
        assert [one for one in incidents if one["severity"] != "info"] == [] or name == "all"
    assert judged(two, "all")
