"""Three real trainings on one text under one daemon: the second is told where it meets the first one's dirty rows, the third leaves them out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real import trainwarden, wait_until
from trainwarden.record import Event, Step, decode_line
from trainwarden.rules.config import read_config
from trainwarden.rules.daemon.process import Daemon
from trainwarden.rules.rulefiles import read_packs

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

#: Eight shards of text; the sixth holds lines of one letter, each another, in the place of it.
TRAIN = """
import random, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainwarden.exporter import Exporter

name, seed, text, exclude, log = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(int(seed))
WIDTH, SHARD, SHARDS, DIRTY = 96, 480, 8, 5

class Text(Dataset):
    read = []
    def __init__(self):
        self.bytes = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8)
    def __len__(self):
        return SHARD * SHARDS
    def __getitem__(self, row):
        self.read.append(row)
        if row // SHARD == DIRTY:
            return torch.full((WIDTH + 1,), 128 + random.Random(row).randrange(128), dtype=torch.long)
        at = row * 1009 % (SHARD * SHARDS)  # every shard holds a bit of every source
        return self.bytes[at * WIDTH : (at + 1) * WIDTH + 1].long()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(256, 48), nn.Linear(96, 48), nn.Linear(48, 256)
    def forward(self, ids):
        seen = self.embed(ids)
        before = torch.cat([torch.zeros_like(seen[:, :1]), seen[:, :-1]], 1)
        return self.head(torch.tanh(self.mix(torch.cat([seen, before], -1))))

model, data = Model(), Text()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
exporter = Exporter(model, optimizer, run=name, port=0, exclude=exclude or None, reader_seconds=10.0)
shards = [(f"shard-{at}", at * SHARD, (at + 1) * SHARD) for at in range(SHARDS)]
loader = exporter.wrap(DataLoader(data, batch_size=8), seed=int(seed), order="blocks", shards=shards, dataset="toy", reserve=0.05)
exporter.resumed(0)
for batch in loader:
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    exporter.step(loss)
Path(log).write_text(" ".join(map(str, data.read)))
exporter.close()
"""

SHARD, DIRTY = 480, 5
ACT = "a-word-to-act"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("suspects")
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:1_200_000]
    text = re.sub(rb"(.)\1{3,}", rb"\1\1\1", bytes(byte for byte in text if byte < 128))
    (made / "text").write_bytes(text)
    (made / "act").write_text(ACT)
    (made / "act").chmod(0o600)
    return made


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    text = """
listen: 127.0.0.1:0
poll_interval: 100ms
snapshot_interval: 200ms
act_token_file: act
sources: [{folder: "runs/*/targets"}]
"""
    running = Daemon(read_config(text, "t.yml", folder), read_packs(["default"]))
    running.start()
    yield running
    running.stop()


def train(folder: Path, name: str, seed: int, exclude: str = "") -> list[int]:
    """Train a run to its end and return the rows that its data set was asked for."""
    log = folder / f"{name}.rows"
    environment = {**os.environ, "TRAINWARDEN_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", TRAIN, name, str(seed), str(folder / "text"), exclude, str(log)],
        env=environment,
        check=True,
        timeout=120,
    )
    return [int(row) for row in log.read_text().split()]


def lines(folder: Path, name: str) -> list[Step | Event]:
    found: list[Step | Event] = []
    for path in sorted((folder / "runs" / name).rglob("*.ndjson")):
        decoded = [decode_line(line) for line in path.read_bytes().splitlines()[1:]]
        found += [line for line in decoded if isinstance(line, Step | Event)]
    return found


def get(daemon: Daemon, path: str) -> Any:
    with urllib.request.urlopen(f"http://{daemon.address}{path}", timeout=5) as response:
        return json.load(response)["data"]


def seed_of(place: int) -> int:
    """Return a seed whose first epoch reads the dirty shard as the ``place``-th of eight."""
    from trainwarden.rules.core.ordering import Layout, Order, Shard

    shards = [Shard(f"shard-{at}", at * SHARD, (at + 1) * SHARD) for at in range(8)]
    for seed in range(1000):
        layout = Layout(
            dataset="toy",
            size=8 * SHARD,
            order="blocks",
            seed=seed,
            reserve=0.05,
            batch=8,
            shards=shards,
            shard_count=8,
        )
        places = Order(layout).spread(0, DIRTY * SHARD, (DIRTY + 1) * SHARD)
        assert places is not None
        if round(places[0][0] / (SHARD * 0.95)) == place:
            return seed
    raise AssertionError("no such seed")


@pytest.fixture(scope="module")
def first(daemon: Daemon, folder: Path) -> dict[str, Any]:
    """The first run, and what is remembered of it."""
    train(folder, "one", seed_of(4))
    return wait_until(lambda: blamed(daemon), 30, what="suspects of run one")


def blamed(daemon: Daemon) -> dict[str, Any]:
    """Return what run one blames the data for, nothing where it does not yet."""
    rows = [row for row in get(daemon, "/api/v1/suspects?run=one") if row["cause"] == "data"]
    return rows[0] if rows else {}


@pytest.fixture(scope="module")
def second(first: dict[str, Any], folder: Path) -> list[int]:
    """The rows that the second run reads, in another order."""
    return train(folder, "two", seed_of(6))


def test_the_dirty_shard_of_the_first_run_is_remembered(first: dict[str, Any]) -> None:
    assert first["dataset"] == "toy"
    assert first["cause"] == "data"
    assert {one["shard"] for one in first["exclude"]} == {f"shard-{DIRTY}"}


def test_a_run_in_another_order_is_told_before_it_eats_them_and_the_spike_there_is_evidence(
    daemon: Daemon, folder: Path, first: dict[str, Any], second: list[int]
) -> None:
    told = [one for one in get(daemon, "/api/v1/notices?run=two") if f"all of shard-{DIRTY}" in one["says"]]
    ate = [line.step for line in lines(folder, "two") if isinstance(line, Step) and _reads(line)]
    assert told
    assert abs(told[0]["step"] - ate[0]) <= 2
    assert "run one" in told[0]["says"]
    assert f"at step {first['step']}" in told[0]["says"]
    incidents = wait_until(lambda: get(daemon, "/api/v1/incidents?run=two"), 10)
    evidence = [one for incident in incidents for one in incident["evidence"] if one["kind"] == "known_suspects"]
    assert evidence
    assert f"run one, attempt 0, at step {first['step']}" in evidence[0]["says"]
    wait_until(lambda: blamed(daemon)["state"] == "confirmed", 10)


def _reads(record: Step) -> bool:
    return any(span.name == f"shard-{DIRTY}" for span in record.shards)


def test_a_run_that_is_started_with_the_exclusions_does_not_eat_them(
    daemon: Daemon, folder: Path, second: list[int]
) -> None:
    told = trainwarden(
        "incidents", "suspects", "--url", f"http://{daemon.address}", "--dataset", "toy", "--format", "plan", "-o",
        str(folder / "bad.json"),
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    whole = second
    rows = train(folder, "three", seed_of(6), str(folder / "bad.json"))
    assert any(row // SHARD == DIRTY for row in whole)
    assert not any(row // SHARD == DIRTY for row in rows)
    assert len(rows) == len(whole)
    assert not any(_reads(line) for line in lines(folder, "three") if isinstance(line, Step))
    start = next(line for line in lines(folder, "three") if isinstance(line, Event) and line.kind == "start")
    assert start.fields["loader"]["exclude"][0][0]["shard"] == f"shard-{DIRTY}"
    assert not [one for one in get(daemon, "/api/v1/notices?run=three") if f"shard-{DIRTY}" in one["says"]]
    ate = sum(line.value("substituted_samples") or 0 for line in lines(folder, "three") if isinstance(line, Step))
    assert ate > 0.9 * SHARD


def test_what_is_forgotten_by_its_author_is_gone_from_lists_and_files(
    daemon: Daemon, folder: Path, second: list[int]
) -> None:
    url = f"http://{daemon.address}"
    refused = trainwarden(
        "incidents", "suspects", "forget", "--all", "--token-file", str(folder / "text"), "--url", url
    )
    assert refused.returncode == 1
    taken = trainwarden(
        "incidents", "suspects", "forget", "--dataset", "toy", "--token-file", str(folder / "act"), "--url", url,
        "--author", "ann", "--comment", "cleaned",
    )  # fmt: skip
    assert taken.returncode == 0, taken.stderr
    wait_until(lambda: not get(daemon, "/api/v1/suspects"), 10)
    gone = next(row for row in get(daemon, "/api/v1/suspects?run=one&all=1") if row["cause"] == "data")
    assert (gone["state"], gone["by"], gone["comment"]) == ("forgotten", "ann", "cleaned")
    empty = trainwarden("incidents", "suspects", "--url", url, "--format", "txt")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert trainwarden("incidents", "suspects", "--url", url).stdout == "no suspect samples\n"
    again = trainwarden("incidents", "suspects", "forget", "sus_0", "--token-file", str(folder / "act"), "--url", url)
    assert again.returncode == 1
    assert "no suspect samples with id sus_0" in again.stderr
