"""What close looks have found, as the ranks' events of kind ``anomaly`` tell it: module, stage, operation and line of the first non-finite value."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from trainwarden.record import Event

#: Findings that are remembered, and characters of a name.
MOST, LONGEST = 64, 256
#: The stages of a step, in their order.
STAGES = ("input", "forward", "loss", "backward", "accumulation", "reduction", "update")


class Looked(Struct, frozen=True):
    """What was first in a step that was looked at closely. ``at`` is a line of the user's code, ``file:line``; empty where unknown.

    ``parameter`` names the one that it was seen in, or that was not finite before. ``scaled``: a GradScaler was at work.
    """

    step: int
    rank: int
    module: str
    stage: str
    op: str = ""
    at: str = ""
    parameter: str = ""
    scaled: bool = False


def take(known: list[Looked], rank: int, event: Event) -> None:
    """Remember an event that something was found; one that names no module or no stage says nothing."""
    fields = event.fields
    module, stage = _text(fields.get("module")), fields.get("stage")
    if fields.get("state") != "found" or event.step is None or not module or stage not in STAGES:
        return
    op, at, parameter = (_text(fields.get(name)) for name in ("op", "at", "parameter"))
    scaled = fields.get("scaled") is True
    known.append(Looked(event.step, rank, module, str(stage), op, at, parameter, scaled))
    del known[:-MOST]


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= LONGEST else ""


def first(known: Sequence[Looked], begin: int, end: int) -> tuple[Looked, ...]:
    """Return those of the first step that has any, from ``begin`` to ``end``, the earliest stage first, then by rank."""
    among = [one for one in known if begin <= one.step <= end]
    step = min((one.step for one in among), default=0)
    return tuple(
        sorted((one for one in among if one.step == step), key=lambda one: (STAGES.index(one.stage), one.rank))
    )


def sentence(found: Sequence[Looked]) -> str:
    """Return what is said of the first finding."""
    one = found[0]
    ranks = {other.rank for other in found if (other.module, other.stage, other.op) == (one.module, one.stage, one.op)}
    where = f", on {len(ranks)} ranks" if len(ranks) > 1 else "" if one.rank == 0 else f", on rank {one.rank}"
    if one.stage == "input":
        return f"First non-finite: what the model was given at step {one.step}{where}."
    says = f"First non-finite: {_what(one)} step {one.step}{_in(one)}{where}{_made(one)}."
    if one.stage == "forward" and one.parameter:
        says += f" Its parameter {one.parameter} was not finite before."
    return says + (" The gradients were scaled by a GradScaler." if one.scaled and one.stage == "backward" else "")


def _what(one: Looked) -> str:
    if one.stage == "forward":
        return f"the output of {one.module} at"
    if one.stage == "loss":
        return "the loss at"
    if one.stage == "backward":
        return (
            f"a gradient in {one.module} at" if one.module != "loss" else "a gradient between the loss and the model at"
        )
    if one.stage == "update":
        return f"{one.parameter or one.module} after the update of"
    return f"the gradient of {one.parameter or one.module} at"


def _in(one: Looked) -> str:
    return {
        "forward": ", in the forward pass",
        "loss": ", over modules that were all finite",
        "backward": ", in the backward pass",
        "accumulation": ", which was finite in each pass and not once it was added up",
        "reduction": ", which was finite on this rank and not once it was reduced over the ranks",
        "update": ", made of finite gradients",
    }[one.stage]


def _made(one: Looked) -> str:
    if not one.op:
        return ""
    what = "the last of its operations is" if one.stage == "loss" else "made by"
    called = "" if not one.at else f", of what was called at {one.at}" if one.stage == "backward" else f" at {one.at}"
    return f"; {what} {one.op}{called}"
