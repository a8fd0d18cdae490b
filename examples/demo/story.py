"""Tells what happens while it happens: the runs' progress, and the treated run's incident from its onset to its end.

The daemon's lines are its own: the timeline of its incidents, as its API gives it. The screen adds what the run's
journal and the receiver show from their side. Every line goes by the time that its source gives it, not by the time at
which it was seen here.
"""

from __future__ import annotations

import math
from collections import deque
from datetime import datetime
from typing import Any

from trainwarden.plan import Applied, merge_ranges
from trainwarden.record import Event, Step

from .follow import Daemon, Journals, Receiver
from .layout import Layout
from .screen import Screen
from .summary import count

#: A loss this many times the mean of the fifty steps before is worth a line.
_JUMP = 1.5
#: States in which an incident is over.
FINAL = frozenset({"recovered", "not_recovered", "inconclusive", "escalated", "dismissed"})


class RunStory:
    """Progress of one run, from its journals."""

    def __init__(self, screen: Screen, layout: Layout, arm: str, steps: int, *, voice: str | None = None) -> None:
        self._screen = screen
        self._journals = Journals(layout.run_folder(arm))
        self._name = voice or arm
        self._steps = steps
        self._usual: deque[float] = deque(maxlen=50)
        self._jumped = False
        self.step = 0
        self.attempt = -1

    def tell(self) -> None:
        """Show what was written since the last call."""
        newest: Step | None = None
        for attempt, line in self._journals.new():
            if isinstance(line, Step):
                newest = line
                self._look(line)
            else:
                self._happened(attempt, line)
        if newest is not None:
            self.step = newest.step
            loss = newest.value("loss")
            self._screen.progress(self._name, newest.step, self._steps, math.nan if loss is None else loss, newest.time)

    def _look(self, record: Step) -> None:
        loss = record.value("loss")
        if loss is None or not math.isfinite(loss):
            return
        usual = sum(self._usual) / len(self._usual) if len(self._usual) == self._usual.maxlen else None
        if usual is not None and loss > _JUMP * usual:
            if not self._jumped:
                self._screen.say(self._name, f"step {record.step}: {_seen(record, usual)}", loud=True, at=record.time)
            self._jumped = True
            return
        self._usual.append(loss)

    def _happened(self, attempt: int, event: Event) -> None:
        if event.kind == "start" and attempt > self.attempt:
            again = self.attempt >= 0
            self.attempt = attempt
            self._usual.clear()
            self._jumped = False
            if again:
                self._screen.say(self._name, _started_again(attempt, event), loud=True, at=event.time)
        elif event.kind == "exit" and event.fields.get("reason") != "finished":
            says = f"attempt {attempt} ended after step {event.step}: {event.fields.get('reason')}"
            self._screen.say(self._name, says, at=event.time)


def _seen(record: Step, usual: float) -> str:
    says = [f"loss {record.value('loss'):.2f}, {(record.value('loss') or 0) / usual:.1f} times the usual"]
    for name, words in (
        ("grad_norm", "gradient norm {:.1f}"),
        ("batch_longest_repeat_tokens", "one byte repeated {:.0f} times"),
        ("batch_unique_token_ratio", "{:.0%} of all byte values in the batch"),
    ):
        value = record.value(name)
        if value is not None and math.isfinite(value):
            says.append(words.format(value))
    return ", ".join(says)


def _started_again(attempt: int, event: Event) -> str:
    origin = event.fields.get("resumed_from")
    says = (
        f"attempt {attempt} resumes from step {origin['step']}" if origin else f"attempt {attempt} begins from scratch"
    )
    report = event.fields.get("plan_applied")
    if not report:
        return says
    names = Applied.__struct_fields__
    applied = Applied(**{name: value for name, value in report.items() if name in names})
    skipped = merge_ranges([(first, end) for first, end in applied.skip_samples])
    says += f" under plan {applied.plan_id}: {count(skipped)} samples are substituted"
    says += ", the optimizer is reset" if applied.reset_optimizer else ", the optimizer keeps its state"
    says += f", the learning rate is multiplied by {applied.lr_factor:g}" if applied.lr_factor != 1 else ""
    if applied.not_applied:
        says += "; NOT applied: " + "; ".join(f"{field}: {why}" for field, why in applied.not_applied.items())
    return says


class IncidentStory:
    """The daemon's incidents and the receiver's requests, as they change."""

    def __init__(self, screen: Screen, daemon: Daemon, receiver: Receiver) -> None:
        self._screen = screen
        self._daemon = daemon
        self._receiver = receiver
        self._told: dict[str, int] = {}
        self._requests: dict[str, str] = {}
        self.incidents: list[dict[str, Any]] = []

    def tell(self) -> None:
        """Show what changed since the last call."""
        found = self._daemon.incidents()
        if found is None:
            return
        self.incidents = found
        for incident in found:
            self._tell_timeline(incident)
            self._tell_request(incident)

    @property
    def over(self) -> bool:
        """Whether there are incidents and every one of them is closed."""
        return bool(self.incidents) and all(row.get("state") in FINAL for row in self.incidents)

    def _tell_timeline(self, incident: dict[str, Any]) -> None:
        name = incident["id"]
        timeline = incident.get("timeline") or []
        if name not in self._told:
            opened = timeline[0].get("time") if timeline else None
            self._screen.say("daemon", f"opens incident {name}", loud=True, at=opened)
        for entry in timeline[self._told.get(name, 0) :]:
            state = entry.get("state") or incident.get("state")
            at = f"step {entry['step']}, " if entry.get("step") is not None else ""
            self._screen.say("daemon", f"{at}{state}: {entry.get('says', '')}", at=entry.get("time"))
        self._told[name] = len(timeline)

    def _tell_request(self, incident: dict[str, Any]) -> None:
        request_id = incident.get("webhook_id")
        if not request_id:
            return
        answer = self._receiver.status(request_id)
        status = answer.get("status") if answer else None
        if answer is None or status is None or self._requests.get(request_id) == status:
            return
        updated = _unix(answer.get("updated"))
        if request_id not in self._requests:
            checked = updated if status == "accepted" else _requested(incident, request_id)
            self._screen.say("receiver", f"webhook {request_id}: signature, age, fence, target checked", at=checked)
        self._requests[request_id] = status
        detail = answer.get("detail") or answer.get("reason") or ""
        self._screen.say("receiver", f"{status}{f': {detail}' if detail else ''}", loud=True, at=updated)


def _unix(stamp: Any) -> float | None:
    """Return Unix seconds of the receiver's time stamp (ISO 8601), or None where it gave none."""
    return datetime.fromisoformat(stamp).timestamp() if isinstance(stamp, str) else None


def _requested(incident: dict[str, Any], request_id: str) -> float | None:
    """Return when the daemon says that it sent a request, in Unix seconds."""
    sent = (entry.get("time") for entry in incident.get("timeline") or () if request_id in entry.get("says", ""))
    return next(sent, None)
