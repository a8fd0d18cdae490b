"""A probe tells a dirty shard from a poisoned optimizer state: real training, daemon, receiver and supervisor, twice the same loss.

In both runs the loss jumps at about the same step and nothing else betrays why. In one the frequent bytes of each row of a shard are exchanged by a
table of its own, which leaves repeats and variety as they are; in the other the moments were damaged once. Neither daemon nor receiver is told.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real import wait_until
from trainwarden.demo import arms
from trainwarden.demo.corpus import Rows, build
from trainwarden.demo.follow import Daemon, is_up
from trainwarden.demo.layout import RUN, Layout, prepare
from trainwarden.demo.poison import Answer, place
from trainwarden.demo.processes import ending, start, trainwarden
from trainwarden.demo.scale import Scale
from trainwarden.plan import Plan

#: Two shared cores: nothing here may depend on speed.
PATIENCE = 240.0
SCALE = Scale(steps=520, width=48, layers=1, heads=2, context=128, checkpoint_every=25, keep_checkpoints=12)
SEED = 2
POLICY = """policy:
  mode: act
  probe: true
  persist_steps: 30
  rewarmup_steps: 10
  verify_steps: 60
"""


@dataclass
class Watched:
    """One run: its folder, where its dirt lies, what came of it."""

    layout: Layout
    answer: Answer
    incidents: list[dict[str, Any]]

    @property
    def plans(self) -> list[Plan]:
        return self.layout.run_folder("treated").read_plans()[0]


def scramble(rows: Rows) -> None:
    """Exchange the frequent bytes of each row by a table of its own: nothing can be learned of it, and no count shows it."""
    chance = np.random.default_rng(7)
    frequent = np.argsort(np.bincount(rows.ravel(), minlength=256))[-48:].astype(np.uint8)
    for row in rows:
        table = np.arange(256, dtype=np.uint8)
        table[frequent] = chance.permutation(frequent)
        row[:] = table[row]


def watched(folder: Path, dirty: bool) -> Watched:
    """Train under supervision, watched by a daemon that may act, until the run has ended."""
    layout = prepare(folder)
    corpus = build(
        SEED,
        rows=round(SCALE.steps * SCALE.batch_size / (1 - SCALE.reserve)) + 480,
        row_bytes=SCALE.context + 1,
        shard_rows=(46 * SCALE.batch_size, 60 * SCALE.batch_size),
    )
    shard, answer = place(corpus, SEED, SCALE)
    if dirty:
        scramble(corpus.rows[shard.first : shard.end])
    corpus.write(layout.data)
    addresses = arms.configure(layout)
    config = layout.ops / "trainwarden.yml"
    text = config.read_text().replace("500ms", "200ms")
    first, _, rest = text.partition("policy:\n")
    policy = (
        POLICY if dirty else f"{POLICY}  confidence: 0.99\n"
    )  # whatever the moments say, it is not believed without a probe
    config.write_text(first + policy + rest[rest.index("receiver:") :])
    command = arms.training_command(layout, "treated", SEED, SCALE)
    script = [sys.executable, str(Path(__file__).with_name("probed_training.py"))]
    training = [*script, "0" if dirty else str(answer.first_step), *command[3:]]
    with ending([]) as processes:
        start(processes, "daemon", arms.daemon_command(layout), arms.log_of(layout, "daemon"))
        start(processes, "receiver", arms.receiver_command(layout), arms.log_of(layout, "receiver"))
        wait_until(lambda: is_up(addresses.daemon) and is_up(addresses.receiver), PATIENCE, what="both are up")
        supervised = [*trainwarden(), "supervise", "--run", RUN, "--dir", str(layout.runs("treated")), "--", *training]
        trainer = start(processes, "train", supervised, arms.log_of(layout, "train"))
        daemon = Daemon(addresses.daemon)
        wait_until(lambda: trainer.popen.poll() is not None, PATIENCE, what="the training has ended", every=0.25)

        def over() -> bool:
            return all(one["state"] not in ("acting", "verifying") for one in daemon.incidents() or [])

        wait_until(over, PATIENCE, what="every incident has an end")
        incidents = daemon.incidents() or []
    assert trainer.popen.returncode == 0, trainer.log.read_text()[-2000:]
    return Watched(layout, answer, sorted(incidents, key=lambda one: (one["attempt"], one["opened_step"])))


def told(found: Watched) -> str:
    return json.dumps([{name: one[name] for name in ("attempt", "action", "state", "cause", "timeline")} for one in found.incidents], indent=1)  # fmt: skip


@pytest.mark.e2e
@pytest.mark.slow
def test_samples_that_spike_again_are_dirty_and_are_left_out(tmp_path: Path) -> None:
    found = watched(tmp_path / "dirty", dirty=True)
    assert len(found.plans) >= 2, told(found)
    probe, rollback = found.plans[:2]
    assert (probe.action, probe.for_attempt, probe.skip_samples) == ("probe", 1, []), told(found)
    assert (rollback.action, rollback.for_attempt) == ("rollback", 2), told(found)
    asked = next(one for one in found.incidents if one["action"] == "probe")
    assert asked["verification"]["answer"] == "again", told(found)
    behind = next(one for one in found.incidents if one["follows"] == asked["id"])
    assert behind["cause"]["name"] == "data", told(found)
    (first, end) = found.answer.ranges[0]
    assert any(a <= first and end <= b for a, b in rollback.skip_samples), (rollback.skip_samples, found.answer)
    assert behind["state"] == "recovered", told(found)


@pytest.mark.e2e
@pytest.mark.slow
def test_samples_that_pass_were_met_by_a_bad_state_and_nothing_is_left_out(tmp_path: Path) -> None:
    found = watched(tmp_path / "state", dirty=False)
    assert len(found.plans) == 1, told(found)
    (probe,) = found.plans
    assert (probe.action, probe.for_attempt) == ("probe", 1), told(found)
    asked = next(one for one in found.incidents if one["action"] == "probe")
    assert asked["verification"]["answer"] == "passed", told(found)
    scores = asked["cause"]["scores"]  # the state was damaged: by what, a replay of the samples does not tell
    assert max(scores, key=scores.get) in ("optimizer_state", "hardware"), told(found)
    assert scores.get("data", 0.0) < 0.1, told(found)
    assert scores["optimizer_state"] >= 0.5, told(found)
    assert asked["state"] == "recovered", told(found)
    assert asked["suspect_samples"] == []
