"""What should be done: the first line of the table that holds. Whether it may be done now is the gates' business (:mod:`.gates`).

``POLICY`` is read from top to bottom: from verdict, cause, confidence, severity and what was done before to a wanted action and the
sentence why. docs/decisions.md shows it, and a test compares the two.

Only persistence justifies an ending action (:mod:`.persistence`); what heals by itself is left alone (case A01). A start that goes on
otherwise than its parent left off is never rolled back: the next one would resume in the same way (case A05).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import grounds
from .attribution import Cause
from .facts import Facts
from .grounds import Past, Seen
from .persistence import persists
from .settings import Settings

Wanted = Literal["none", "lower_lr", "probe", "rollback", "stop", "escalate"]

#: Actions that make no incident critical (design §2).
SOFT: tuple[Wanted, ...] = ("lower_lr", "probe")
#: The words that a decision may have, with those of no action.
ACTIONS: tuple[Wanted, ...] = ("none", "lower_lr", "probe", "rollback", "stop", "escalate")


@dataclass(frozen=True, slots=True)
class Decision:
    """What should be done and why; ``needs_approval`` where the cause is too unclear to act alone, ``line`` names the table's line.

    What a planned change broke is unclear too: behind a rollback the change comes again.
    """

    action: Wanted
    why: str
    needs_approval: bool = False
    line: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: ``asks`` returns the sentence why it holds, or None. ``when`` and ``because`` say it to people."""

    name: str
    when: str
    action: Wanted
    because: str
    asks: Callable[[Seen], str | None]


POLICY: tuple[Line, ...] = (
    Line(
        "nothing_learned",
        "the loss was never a number, from the first record on, and there is no checkpoint from before",
        "stop",
        "Each further step costs and teaches nothing, and a rollback has nowhere to go: precision, scale or initialisation must be "
        "mended first (case C06).",
        grounds.nothing_learned,
    ),
    Line(
        "probe_tells",
        "something persists, `probe` allows it, and a probe attempt tells the cause: it is unclear between data and state or hardware and the "
        "suspect samples are known, or an earlier attempt broke alike, or it began behind an evaluation again",
        "probe",
        "Samples that spike again are dirty, samples that do not were met by a bad state or device (cases A35, A38, A39).",
        grounds.probe_tells,
    ),
    Line(
        "comes_again",
        "something persists, and an earlier attempt broke alike, replicas no longer agree, or it began behind an evaluation or "
        "checkpoint again and again",
        "escalate",
        "Going back runs into it once more (cases A03, A39, D01). Where the data or the host is the cause a plan takes it away, and "
        "this line does not hold.",
        grounds.comes_again,
    ),
    Line(
        "enough",
        "something persists after `max_rollbacks` rollbacks of the run",
        "escalate",
        "What as many did not mend, one more does not either.",
        grounds.enough,
    ),
    Line(
        "resumed_wrongly",
        "something persists in an attempt that resumed wrongly",
        "escalate",
        "The next attempt would resume in the same way (case A05).",
        grounds.resumed_wrongly,
    ),
    Line(
        "being_tried",
        "something persists, the learning rate was lowered at most `persist_steps` ago, and neither weights nor data are at fault",
        "none",
        "What was done last needs its time before more is done.",
        grounds.being_tried,
    ),
    Line(
        "lasts",
        "something persists",
        "rollback",
        "It does not heal by itself, and each step costs. The plan follows the cause; an unclear one waits for a person.",
        grounds.lasts,
    ),
    Line(
        "rate_too_high",
        "the learning rate is the cause with at least `confidence`, the loss stays high for `soft_steps` or spikes or a drift go on for as "
        "long, the run is not destroyed, and `lower_lr` allows it",
        "lower_lr",
        "A lower rate for a while costs little and mends what is not broken yet (cases F01, E07).",
        grounds.rate_too_high,
    ),
)
#: What holds where no line does.
OTHERWISE = Line("otherwise", "anything else", "none", "It may heal by itself (case A01).", lambda seen: "")


def decide(
    facts: Facts, cause: Cause, past: Past, settings: Settings, verdict: str = "other", severity: str = "warning"
) -> Decision:
    """Return what should be done about an open incident now: what the first line says that holds."""
    seen = Seen(facts, cause, past, settings, verdict, severity, persists(facts, cause, past.mismatch, settings))
    for line in POLICY:
        why = line.asks(seen)
        if why is not None:
            ask = line.action == "rollback" and (grounds.unclear(seen) or past.handed_over)
            return Decision(line.action, why, needs_approval=ask, line=line.name)
    return Decision("none", "", line=OTHERWISE.name)
