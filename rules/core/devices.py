"""What devices told of themselves: the ranks' events of kind ``hardware``, as an exporter writes them for XIDs and for a GPU that is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from trainwarden.record import Event

from .machines import LONGEST

#: The kind of the events, and what of them is an error.
KIND, ERRORS = "hardware", ("xid", "lost")
#: Errors that are remembered of a start, and how many steps before an onset one may lie to be told with it.
MOST, BEFORE = 64, 1000
#: An error's number is below this.
LARGEST = 2**32
#: Steps around an onset within which an error may be what began it: it strikes at once, and its event is written behind the last step.
CLOSE = 20
#: What an error speaks for, and how much it weighs for the hardware. A program's own fault looks alike on any device (XID 13, 31).
WEIGHTS: Mapping[str, float] = MappingProxyType({"device": 0.6, "unclear": 0.3, "program": 0.1})
#: The weight of an error after which a device is not to be trusted, and the share of any that is left where it is not close.
FAULT, FAR = 0.85, 0.4


class Told(Struct, frozen=True):
    """An error of a rank's device. ``code`` is 0 where it has none; ``weight`` is what it weighs close to an onset."""

    step: int
    rank: int
    code: int
    meaning: str
    weight: float
    fault: bool = False
    host: str = ""


def take(known: list[Told], rank: int, event: Event, hosts: Mapping[int, str]) -> bool:
    """Remember an event that tells of an error, and say whether it does. ``hosts`` are the ranks', where the event names none."""
    fields = event.fields
    what = fields.get("what")
    code = fields.get("code", 0) if what == "xid" else 0
    if event.step is None or what not in ERRORS or isinstance(code, bool) or not isinstance(code, int):
        return False
    if not 0 <= code < LARGEST:  # no number of a driver's, and none that could be stored
        return False
    fault = fields.get("fault") is True or what == "lost"
    weight = FAULT if fault else WEIGHTS.get(_text(fields.get("points_to")), WEIGHTS["unclear"])
    meaning, host = _text(fields.get("meaning")), _text(fields.get("host")) or hosts.get(rank, "")
    known.append(Told(event.step, rank, code, meaning, weight, fault, host))
    del known[:-MOST]
    return True


def near(known: Sequence[Told], onset: int, now: int, stride: int) -> tuple[Told, ...]:
    """Return the errors that may have to do with an onset, the weightiest first; of a rank and a code the first one."""
    first: dict[tuple[int, int], Told] = {}
    for one in known:
        if onset - BEFORE * stride <= one.step <= now:
            same = first.get((one.rank, one.code))
            if same is None or (not close(same, onset, stride) and close(one, onset, stride)):
                first[one.rank, one.code] = one
    return tuple(sorted(first.values(), key=lambda one: (-weigh(one, onset, stride), one.step, one.rank)))


def close(one: Told, onset: int, stride: int) -> bool:
    """Say whether an error lies so close to an onset that it may have begun it."""
    return abs(one.step - onset) <= CLOSE * stride


def weigh(one: Told, onset: int, stride: int) -> float:
    """Return what an error weighs for the hardware as the cause of what began at ``onset``."""
    return one.weight if close(one, onset, stride) else FAR * one.weight


def failed(known: Sequence[Told], onset: int, stride: int) -> tuple[Told, ...]:
    """Return the faults that are close to an onset."""
    return tuple(one for one in known if one.fault and close(one, onset, stride))


def sentence(one: Told) -> str:
    """Return what is said of an error."""
    who = f"Rank {one.rank}" + (f" on {one.host}" if one.host else "")
    what = f"reported XID {one.code}" if one.code else "lost its GPU"
    return f"{who} {what} at step {one.step}" + (f" ({one.meaning})." if one.meaning else ".")


def _text(value: object) -> str:
    return value[:LONGEST] if isinstance(value, str) else ""
