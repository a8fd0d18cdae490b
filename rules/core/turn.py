"""One call of feed: what it changes and what effects it has. Lives for that call alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from trainwarden.record import encode_numbers

from .effects import Effect, Save
from .inputs import Start
from .settings import Settings
from .state import Entry, Incident, IncidentState, Memory, State

#: Lines of a timeline; the newest beyond this are dropped, but for the last word.
TIMELINE = 200


@dataclass
class Turn:
    """The state that feed works on, the effects so far and the incidents whose rows must be saved."""

    state: State
    effects: list[Effect] = field(default_factory=list)
    touched: dict[str, Incident] = field(default_factory=dict)

    @property
    def memory(self) -> Memory:
        """What is remembered."""
        return self.state.memory

    @property
    def settings(self) -> Settings:
        """The numbers of the judgement."""
        return self.state.settings

    def touch(self, incident: Incident) -> None:
        """Have the incident's row saved at the end of the call."""
        self.touched[incident.id] = incident

    def note(
        self, incident: Incident, time: float, step: int | None, says: str, state: IncidentState | None = None
    ) -> None:
        """Add a line to the incident's timeline, with a new state where one is given."""
        if state is not None:
            incident.state = state
        if len(incident.timeline) >= TIMELINE:
            incident.timeline.pop()
        incident.timeline.append(Entry(time, step, incident.state, says))
        self.touch(incident)

    def notice(
        self, start: Start, kind: str, step: int | None, says: str, signal: str | None = None, about: str = ""
    ) -> None:
        """Save a notice: never an alert. One of a kind, signal, step and thing that it is ``about`` of a start is one row."""
        key = digest("notice", start.start_id, kind, signal or "", str(step), *([about] if about else []))
        row: dict[str, Any] = {
            "kind": kind,
            "signal": signal,
            "step": step,
            "says": says,
            "run": start.run,
            "run_uid": start.run_uid,
            "attempt": start.attempt,
            "start_id": start.start_id,
        }
        self.effects.append(Save("notice", key, encode_numbers(row)))


def digest(*parts: str) -> str:
    """Return a short id made of ``parts``: the same parts give the same id, anywhere and any time."""
    return sha256("\n".join(parts).encode()).hexdigest()[:20]
