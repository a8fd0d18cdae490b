"""Builds runs of several ranks on several hosts, over several attempts, and plays them as replay does.

Noise is a function of seed, step and rank: two attempts with one seed read the same batches, with another they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.cases.build import Row, Verdicts, pack
from trainwarden.record import Event, Step
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay

#: ``make(step, rank, chance)`` returns what one rank logs at one step.
OfRank = Callable[[int, int, np.random.Generator], Row]
Line = tuple[Start, int, Step | Event]


@dataclass
class Ranks:
    """One attempt: its steps, what its ranks log, on which hosts they run, and what else happens.

    ``checkpoints`` are steps that the attempt completed one at; ``failures`` are (rank, seconds since the last step, fields).
    """

    first: int
    last: int
    make: OfRank
    hosts: Sequence[str] = ("h0",)
    domains: Sequence[str] = ()
    seed: int = 0
    stride: int = 1
    samples: int = 0
    said: dict[str, Any] = field(default_factory=dict)
    checkpoints: Sequence[int] = ()
    failures: Sequence[tuple[int, float, dict[str, Any]]] = ()

    def lines(self, number: int, clock: float) -> list[Line]:
        start = Start("uid", "case", number, f"start-{number}")
        resumed = None if number == 0 else {"attempt": number - 1, "step": self.first - self.stride, "path": "ckpt"}
        found: list[Line] = []
        size = len(self.hosts)
        seqs = dict.fromkeys(range(size), 1)

        def event(of: int, kind: str, time: float, step: int, **fields: Any) -> None:
            found.append((start, of, Event(kind=kind, time=time, seq=seqs[of], step=step, fields=fields)))
            seqs[of] += 1

        for rank, host in enumerate(self.hosts):
            said = {"world_size": size, "attempt": number, "start_id": start.start_id, "rank": rank, "hostname": host}
            if self.domains:
                said["domain"] = self.domains[rank]
            event(rank, "start", clock, self.first - self.stride, **(said | {"resumed_from": resumed} | self.said))
        for step in range(self.first, self.last + 1, self.stride):
            clock += 1.0
            for rank in range(size):
                row = self.make(step, rank, np.random.default_rng((self.seed, step, rank)))
                span = []
                if self.samples:
                    begin = ((step - 1) * size + rank) * self.samples
                    span = [(begin, begin + self.samples)]
                record = Step(
                    seq=seqs[rank], step=step, time=clock, stride=self.stride, signals=dict(row), samples=span
                )
                seqs[rank] += 1
                found.append((start, rank, record))
            if step in self.checkpoints:
                event(0, "checkpoint", clock, step, path=f"ckpt/{number}/{step}", complete=True, finite=True)
        for rank, seconds, fields in sorted(self.failures, key=lambda one: one[1]):
            event(rank, "error", clock + seconds, self.last, **fields)
        return found


def lines_of_ranks(*attempts: Ranks) -> list[Line]:
    """Return the lines of attempts, each resumed from the step before its first."""
    lines: list[Line] = []
    clock = 1e9
    for number, attempt in enumerate(attempts):
        lines += attempt.lines(number, clock)
        clock = max(item.time for _, _, item in lines) + 100.0
    return lines


def judge_ranks(*attempts: Ranks, **settings: Any) -> Verdicts:
    """Play attempts and return what came out."""
    found = Replay(Settings(**settings), pack()).run(lines_of_ranks(*attempts))
    incidents = sorted(found.incidents.values(), key=lambda one: (one["attempt"], one["opened_step"]))
    return Verdicts(incidents, list(found.notices.values()))


def healthy(loss: float = 2.3, sd: float = 0.05, norm: float = 0.4) -> OfRank:
    """Return what healthy ranks log: losses of their own, one gradient norm after its reduction."""

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        shared = np.random.default_rng((7, step))
        own = loss - 1e-5 * step + sd * float(chance.normal())
        return {"loss": own, "rank_loss": own, "grad_norm": norm * float(np.exp(0.1 * shared.normal())), "lr": 3e-4}

    return make


def broken_from(step: int, rank: int) -> OfRank:
    """One rank's loss is no number at ``step``; the reduced gradient carries that to all of them one step later."""
    well = healthy()

    def make(at: int, own: int, chance: np.random.Generator) -> Row:
        row = well(at, own, chance)
        if at > step or (at == step and own == rank):
            row["loss"] = row["rank_loss"] = math.nan
        if at >= step:
            row["grad_norm"] = math.nan
        return row

    return make
