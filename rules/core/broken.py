"""The modules that were the first without a finite value, as the ranks' events of kind ``nonfinite`` tell them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from trainwarden.record import Event
from trainwarden.signals import GROUPS

#: Events that are remembered, characters of a name, and modules that an incident names.
MOST, LONGEST, NAMED = 64, 256, 4
#: Where it was.
STAGES = ("forward", "loss", "backward")


class Broken(Struct, frozen=True):
    """A module that was not finite at a step; ``group`` is one of :data:`trainwarden.signals.GROUPS` or empty."""

    step: int
    rank: int
    module: str
    stage: str
    group: str = ""


def take(known: list[Broken], rank: int, event: Event) -> None:
    """Remember an event that names a module and a stage."""
    fields = event.fields
    module, stage, group = fields.get("module"), fields.get("stage"), fields.get("group")
    if event.step is None or not isinstance(module, str) or not 0 < len(module) <= LONGEST or stage not in STAGES:
        return
    known.append(Broken(event.step, rank, module, str(stage), group if group in GROUPS else ""))
    del known[:-MOST]


def first(known: Sequence[Broken], begin: int, end: int) -> tuple[Broken, ...]:
    """Return those of the first step that has any, from ``begin`` to ``end``, by rank."""
    among = [one for one in known if begin <= one.step <= end]
    step = min((one.step for one in among), default=0)
    return tuple(sorted((one for one in among if one.step == step), key=lambda one: one.rank))


def sentence(found: Sequence[Broken]) -> str:
    """Return what is said of the first modules of one step."""
    one = found[0]
    others = {other.rank for other in found if other.module == one.module}
    where = "" if one.rank == 0 and len(others) == 1 else f" on rank {one.rank}"
    if len(others) > 1:
        where = f" on {len(others)} ranks"
    if one.stage == "loss":
        return f"At step {one.step} all modules were finite as far as they were looked at, the loss was not{where}."
    if one.module == "loss":
        return f"The gradient of the loss itself was not finite at step {one.step}{where}."
    return f"The first module that was not finite is {one.module}, in the {one.stage} pass of step {one.step}{where}."


def scope(found: Sequence[Broken]) -> tuple[list[str], list[str]]:
    """Return groups and modules for an incident's scope; the loss is no module."""
    modules = list(dict.fromkeys(one.module for one in found if one.module != "loss"))
    groups = list(dict.fromkeys(one.group for one in found if one.group and one.group != "all"))
    return groups[:NAMED], modules[:NAMED]
