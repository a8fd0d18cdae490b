"""What probes of a run showed: remembered with the run, and evidence for whatever happens at the same place later."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

#: ``again``: what was asked about came again. ``passed``: the same samples passed without it. ``unclear``: the attempt does not tell.
Answer = Literal["again", "passed", "unclear"]


class Probed(Struct, frozen=True):
    """The answer of one probe: ``kind`` is what was tried, ``onset`` the step that was asked about, ``attempt`` the one that answered.

    ``weights`` are what it says for and against causes, as a :class:`~trainwarden.rules.core.facts.Finding` does.
    """

    incident: str
    plan_id: str
    kind: str
    onset: int
    attempt: int
    answer: Answer
    says: str
    weights: dict[str, float]
