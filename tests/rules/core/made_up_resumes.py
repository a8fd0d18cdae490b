"""Facts of an incident shortly behind a resume, with the parent's records before it."""

from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import Attempt, Change
from trainwarden.record import Step
from trainwarden.rules.core.facts import Facts
from trainwarden.rules.core.lineage import until
from trainwarden.rules.core.resumed import UNPLANNED, Planned
from trainwarden.rules.core.trace import Trace


def resumed(*changes: Change, onset: int = 305, at: int = 300, planned: Planned = UNPLANNED, last: int = 340) -> Facts:
    """Return the facts of an incident of a start that resumed from step ``at`` of a healthy run."""
    older = Trace(limit=4000)
    for one in Attempt(last=at, checkpoint_every=0).lines():
        if isinstance(one, Step):
            older.append(one)
    found = facts(*changes, first=at + 1, onset=onset, last=last, resumed_from=at)
    return replace(found, inherited=until(older, at), planned=planned)
