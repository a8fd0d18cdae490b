"""An incident names the module that was the first without a finite value, as the exporter's event ``nonfinite`` tells it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import Attempt, core, not_a_number, only, spike
from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.core.attribution.nonfinite import find
from trainwarden.rules.core.broken import MOST, Broken, first, scope, sentence, take
from trainwarden.rules.core.feed import dump, load

MODULE = {"module": "transformer.h.3.mlp", "stage": "forward", "group": "mlp", "block": 3}


@dataclass
class Broke(Attempt):
    """An attempt whose exporter tells of modules, each before the record of its step."""

    told: dict[int, dict[str, Any]] = field(default_factory=dict)

    def lines(self) -> Iterator[Step | Event]:
        late = 0
        for line in super().lines():
            if isinstance(line, Step) and line.step in self.told:
                event = Event(kind="nonfinite", time=line.time, seq=line.seq + late, step=line.step)
                event.fields = self.told[line.step]
                late += 1
                yield event
            line.seq += late
            yield line


def broke(**more: Any) -> Broke:
    given: dict[str, Any] = {"last": 320, "changes": [not_a_number(301)], "told": {301: MODULE}, **more}
    return Broke(**given)


def test_the_scope_and_the_summary_name_the_module_and_what_it_was_doing() -> None:
    run = core()
    run.play(broke())
    incident = only(run.incidents)
    assert incident["verdict"] == "nonfinite"
    assert incident["scope"]["modules"] == ["transformer.h.3.mlp"]
    assert incident["scope"]["groups"] == ["mlp"]
    says = "The first module that was not finite is transformer.h.3.mlp, in the forward pass of step 301."
    assert says in [one["says"] for one in incident["evidence"]]
    assert "transformer.h.3.mlp" in incident["summary"]


def test_the_summary_has_no_height_where_no_finite_loss_was_high() -> None:
    def gradient_first(step: int, signals: dict[str, Any]) -> None:
        if step == 301:
            signals["grad_norm"], signals["loss"] = {"all": math.nan}, signals["loss"] - 0.05
        elif step > 301:
            signals["grad_norm"], signals["loss"] = {"all": math.nan}, math.nan

    run = core()
    run.play(broke(changes=[gradient_first]))
    incident = only(run.incidents)
    assert incident["verdict"] == "nonfinite"
    assert "against" not in incident["summary"]


@pytest.mark.parametrize("chunk", [1, 7, 400])
@pytest.mark.parametrize("restart", [None, 301, 305])
def test_any_cut_and_a_restart_name_the_same(chunk: int, restart: int | None) -> None:
    whole, other = core(), core()
    whole.play(broke())
    attempt = broke()
    if restart is None:
        other.play(attempt, chunk=chunk)
    else:
        from trainwarden.rules.core.inputs import Happened, Steps

        for line in attempt.lines():
            if isinstance(line, Step):
                other.take(Steps(attempt.who, 0, (line,)))
            else:
                other.take(Happened(attempt.who, 0, line))
            if isinstance(line, Event) and line.step == restart:
                other.state = load(dump(other.state), other.state.settings, other.state.pack)
    want, found = only(whole.incidents), only(other.incidents)
    assert found["scope"] == want["scope"]
    assert found["summary"] == want["summary"]


def test_an_incident_of_another_time_names_none_of_it() -> None:
    run = core()
    run.play(broke(changes=[spike({301: 4.0, 302: 4.0, 303: 4.0, 304: 4.0})], told={150: MODULE}))
    assert only(run.incidents)["scope"]["modules"] == []


def test_an_event_that_names_nothing_is_left_alone() -> None:
    known: list[Broken] = []
    for fields in ({}, {"module": "h"}, {"module": 3, "stage": "forward"}, {"module": "h", "stage": "sideways"}):
        take(known, 0, Event(kind="nonfinite", time=1.0, step=1, fields=dict(fields)))
    take(known, 0, Event(kind="nonfinite", time=1.0, fields=dict(MODULE)))
    take(known, 0, Event(kind="nonfinite", time=1.0, step=1, fields={**MODULE, "module": "h" * 300}))
    assert known == []
    take(known, 0, Event(kind="nonfinite", time=1.0, step=1, fields={**MODULE, "group": ["mlp"]}))
    assert known == [Broken(1, 0, "transformer.h.3.mlp", "forward")]
    for step in range(2, 2 * MOST):
        take(known, 0, Event(kind="nonfinite", time=1.0, step=step, fields=dict(MODULE)))
    assert len(known) == MOST


def test_of_several_ranks_those_of_the_first_step_are_named() -> None:
    known = [
        Broken(7, 2, "h.1", "forward", "all"),
        Broken(6, 3, "h.2", "backward", "mlp"),
        Broken(6, 1, "h.2", "backward", "mlp"),
    ]
    found = first(known, 5, 9)
    assert [one.rank for one in found] == [1, 3]
    assert scope(found) == (["mlp"], ["h.2"])
    assert sentence(found) == "The first module that was not finite is h.2, in the backward pass of step 6 on 2 ranks."
    assert sentence(first(known, 7, 9)) == (
        "The first module that was not finite is h.1, in the forward pass of step 7 on rank 2."
    )
    assert first(known, 8, 9) == ()


def test_a_loss_that_broke_by_itself_is_said_and_is_no_module() -> None:
    found = (Broken(4, 0, "loss", "loss"),)
    assert scope(found) == ([], [])
    assert sentence(found) == "At step 4 all modules were finite as far as they were looked at, the loss was not."
    assert sentence((Broken(4, 0, "loss", "backward"),)) == "The gradient of the loss itself was not finite at step 4."


def test_the_line_of_evidence_adds_the_module_to_what_it_says() -> None:
    known = (Broken(301, 0, "h.1.attn", "forward", "attention"),)
    value, module = find(replace(facts(not_a_number(301)), broken=known))
    assert (value.cause, module.kind, module.weight) == ("numeric", "first_module", 0.0)
    assert "h.1.attn" in module.says


def test_a_replay_of_the_journal_says_it(tmp_path: Path) -> None:
    attempt = broke(checkpoint_every=0)
    journal = tmp_path / "attempt-0" / attempt.who.start_id / "rank-0"
    journal.mkdir(parents=True)
    header = Header(run_uid=attempt.run_uid, run=attempt.run, attempt=0, start_id=attempt.who.start_id)
    (journal / "00001.ndjson").write_bytes(b"".join(encode_line(line) + b"\n" for line in (header, *attempt.lines())))
    ran = subprocess.run(
        [sys.executable, "-m", "trainwarden.rules.cli", "replay", str(journal / "00001.ndjson")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "300"},
    )
    assert "transformer.h.3.mlp" in ran.stdout
