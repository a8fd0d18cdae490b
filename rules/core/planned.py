"""Planned changes: what an event or the configuration announced, and what it excuses (design §4.10). Pure functions on a list.

A change of stage or mixture moves everything: until it has settled, only what is not finite, a standstill, a collapse of the loss
scale and the rules that say so count, and what was usual before it is no measure of what follows (cases B03, B08). A change of batch
size or of the learning rate's phase moves less: the loss is judged as ever, for the end of a warm-up is where runs diverge (case A03).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

from msgspec import Struct, structs

from trainwarden.record import Event

from .settings import Settings

#: Kinds of events that are planned changes without saying so.
KINDS = ("stage", "mixture", "batch_size", "lr_phase")
#: What these kinds move; every other planned change moves all.
OF_THE_RATE = frozenset({"lr", "update_ratio", "update_applied_ratio"})
OF_THE_BATCH = frozenset(
    {
        *OF_THE_RATE,
        "batch_longest_repeat_tokens",
        "batch_supervised_tokens",
        "batch_unique_token_ratio",
        "clip_ratio",
        "clipped_steps",
        "grad_norm",
        "grad_zero_ratio",
        "moment_rms",
        "rank_grad_norm",
        "step_duration_seconds",
    }
)
#: The event of an exporter whose ranks add up nothing any more, and what goes on otherwise then: a rank's own in place of the mean.
SIDE_GROUP = "side_group"
OF_THE_MEAN = frozenset({"loss", "loss_expected"})
#: The event of an exporter that lowers the learning rate, as a plan asks; it changes it once more when it comes back.
LOWERED = "lower_lr"
#: Verdicts of rules that no planned change excuses.
HARD = ("nonfinite", "stall", "scale_collapse")
#: The label with which a rule of another verdict says that no planned change excuses it.
THROUGH = "through_planned_changes"
#: Announced changes of a start that are remembered: those longest over go first, then those farthest ahead. What the configuration
#: plans is all remembered.
REMEMBERED = 64
#: Steps after its burn-in from which news of a change comes too late: the windows have seen nothing else for as long.
TOO_LATE = 1000
#: Characters of what a change says of itself, and of its kind.
LONGEST, LONGEST_KIND = 160, 40
#: Names of runs that a sentence lists at most.
RUNS = 8
#: A whole number that a peer tells is below this; a float is exact up to here.
LARGEST = 2**53


class Announced(Struct):
    """One planned change: the records behind ``step`` are trained under it, those up to ``end`` are its burn-in.

    ``known`` is the step up to which its start had been read when it was announced; ``content`` tells a repetition. ``before`` and
    ``after`` are the loss's level, where it is known. ``began`` and ``over``: the records have come that far.
    """

    kind: str
    step: int
    settle: int
    known: int
    everything: bool
    says: str = ""
    content: str = ""
    configured: bool = False
    began: bool = False
    over: bool = False
    quiet: bool = False
    before: float | None = None
    after: float | None = None

    @property
    def end(self) -> int:
        """The last step of the burn-in."""
        return self.step + self.settle

    @property
    def name(self) -> str:
        """What it is called in sentences."""
        kind = self.kind.replace("_", " ")
        return f"{kind} ({self.says})" if self.says else kind

    @property
    def of_the_log(self) -> bool:
        """Whether it is none of the training: another number is written down under the same name."""
        return self.kind == SIDE_GROUP

    @property
    def parts(self) -> bool:
        """Whether the loss behind it cannot be held against what it was before."""
        return self.everything or self.of_the_log


def of_event(event: Event, last_step: int, settings: Settings) -> Announced | None:
    """Return the planned change that an event announces, or None for any other event.

    ``last_step`` is the newest step of the rank that sent it, where the event names none. A side group that is closed is a change, too,
    of what is logged: nothing settles, and what is usual is learned anew at once.
    """
    planned = event.fields.get("planned")
    lowered = event.kind == LOWERED and event.fields.get("state") in ("began", "returns")
    closed = event.kind == SIDE_GROUP and event.fields.get("open") is False
    if not closed and not lowered and (planned is False or (planned is not True and event.kind not in KINDS)):
        return None
    step = _whole(last_step if event.step is None else event.step)
    if step is None:
        return None
    settle = 0 if closed else _whole(event.fields.get("settle_steps"))
    if lowered and event.fields.get("state") == "returns":  # nothing has settled before the rate is back
        settle = settings.settle_steps + (_whole(event.fields.get("return_steps")) or 0)
    said = {name: value for name, value in sorted(event.fields.items()) if name not in ("planned", "settle_steps")}
    text = ", ".join(f"{name}={_short(value)}" for name, value in said.items())
    return Announced(
        kind=event.kind[:LONGEST_KIND],
        step=step,
        settle=settings.settle_steps if settle is None else settle,
        known=last_step,
        everything=not closed and not lowered and (planned is True or event.kind not in ("batch_size", "lr_phase")),
        says=text[:LONGEST],
        content=sha256(repr(said).encode()).hexdigest()[:20] if said else "",
    )


def of_settings(settings: Settings, run: str) -> list[Announced]:
    """Return the changes that the configuration plans for a run of this name."""
    return [
        Announced(
            kind=one.kind,
            step=one.step - 1,
            settle=settings.settle_steps if one.settle_steps is None else one.settle_steps,
            known=-1,
            everything=one.planned or one.kind not in ("batch_size", "lr_phase"),
            says=one.note[:LONGEST],
            configured=True,
        )
        for one in settings.planned_changes
        if fnmatchcase(run, one.run)
    ]


def unmatched(settings: Settings, runs: Collection[str]) -> list[str]:
    """Return a sentence for each pattern of the planned changes that is the name of none of these runs."""
    patterns = dict.fromkeys(one.run for one in settings.planned_changes)
    return [
        f"A planned change is for run: {pattern}, which matches no run here; there {'are' if len(runs) > 1 else 'is'} "
        f"{', '.join(sorted(runs)[:RUNS])}{f' and {len(runs) - RUNS} more' if len(runs) > RUNS else ''}."
        for pattern in patterns
        if runs and not any(fnmatchcase(run, pattern) for run in runs)
    ]


def add(changes: list[Announced], new: Announced, now: int = -1) -> None:
    """Add a change; the same one told by another rank, or again, is one. In which order it is told makes no difference.

    A kind that is announced again with the same words, as by a script that says its stage at each launch, has not changed.
    ``now`` is the step that the start has come to, as far as is known.
    """
    for known in changes:
        if known.kind == new.kind and known.step == new.step:
            _join(known, new)
            return
    earlier = [one for one in changes if one.kind == new.kind and one.step < new.step]
    if new.content and earlier and max(earlier, key=lambda one: one.step).content == new.content:
        return
    _put(changes, [new], now)


def configure(changes: list[Announced], planned: Iterable[Announced]) -> None:
    """Bring the list up to what the configuration says now: new entries come in, and what has not begun may go."""
    listed = list(planned)
    wanted = {(one.kind, one.step) for one in listed}
    changes[:] = [one for one in changes if one.began or not one.configured or (one.kind, one.step) in wanted]
    known = {(one.kind, one.step): one for one in changes}
    fresh: dict[tuple[str, int], Announced] = {}
    for one in listed:
        there = known.get((one.kind, one.step)) or fresh.setdefault((one.kind, one.step), one)
        if there is not one:
            _join(there, one)
    _put(changes, list(fresh.values()))


def _join(known: Announced, new: Announced) -> None:
    """Add what is told of a change that is known."""
    if not known.over:
        known.settle = max(known.settle, new.settle)
    known.everything = known.everything or new.everything
    known.known = min(known.known, new.known)
    known.says = known.says or new.says


def _put(changes: list[Announced], fresh: list[Announced], now: int = -1) -> None:
    """Put new changes in their places, and forget the announced ones that are too many."""
    for new in fresh:
        if new.step == 0:  # nothing was trained before it
            new.settle, new.began, new.over = 0, True, True
    changes += fresh
    changes.sort(key=lambda one: (one.step, one.kind))
    told = [one for one in changes if not one.configured]
    if len(told) > REMEMBERED:
        past = [one for one in told if one.over or one.end < now]
        ahead = [one for one in told if not one.over and one.end >= now and not one.began]
        gone = {id(one) for one in [*past, *reversed(ahead), *told][: len(told) - REMEMBERED]}
        changes[:] = [one for one in changes if id(one) not in gone]


def inherit(changes: list[Announced], parent: Iterable[Announced], resumed_from: int) -> None:
    """Take over what the parent attempt was told up to the step from which this one resumed."""
    for one in parent:
        if not one.configured and min(one.step, one.known) <= resumed_from:
            add(changes, structs.replace(one, began=False, over=False), resumed_from)


def next_step(changes: Iterable[Announced]) -> int | None:
    """Return the step behind which something begins or ends next, or None."""
    return min((one.end if one.began else one.step for one in changes if not one.over), default=None)


def moves(change: Announced, signal: str) -> bool:
    """Say whether a change moves a signal by itself."""
    if change.everything:
        return True
    if change.of_the_log:
        return signal in OF_THE_MEAN
    return signal in (OF_THE_RATE if change.kind in ("lr_phase", LOWERED) else OF_THE_BATCH)


def excuses(change: Announced, labels: Mapping[str, str], signals: Collection[str]) -> bool:
    """Say whether a change excuses a rule with these labels that reads these signals."""
    if labels.get("verdict") in HARD or labels.get(THROUGH) == "true":
        return False
    return change.everything or any(moves(change, signal) for signal in signals)


def baseline_from(changes: Iterable[Announced], signal: str, onset: int) -> int:
    """Return the first step whose value of a signal says what is usual at ``onset``: behind the last change that moves it."""
    return max((one.end + 1 for one in changes if one.step < onset and moves(one, signal)), default=0)


def parted(changes: Iterable[Announced], onset: int, now: int) -> Announced | None:
    """Return the first change between ``onset`` and ``now`` behind which the loss cannot be held against what was before."""
    return next((one for one in changes if one.parts and onset <= one.step < now), None)


def near(changes: Iterable[Announced], onset: int) -> tuple[Announced, ...]:
    """Return the changes in whose burn-in, or within as many steps behind it, an onset lies."""
    return tuple(one for one in changes if one.settle and one.step <= onset <= one.end + one.settle)


def sentence(changes: Sequence[Announced]) -> str:
    """Return what is said of changes at one step."""
    return " ".join(_sentence(one) for one in changes)


def _sentence(change: Announced) -> str:
    if change.of_the_log:
        return (
            f"Behind step {change.step} the ranks no longer add up what they see ({change.says}): loss is from there on the rank's own "
            "in place of the mean over all ranks. What is usual is learned anew; it is no change of the training."
        )
    what = f"Planned change after step {change.step}, by {'configuration' if change.configured else 'event'}: {change.name}."
    if change.everything:
        done = f"Up to step {change.end} only what is not finite, a standstill or a falling loss scale counts; "
        done += "what is usual is learned anew behind it."
    else:
        moved = (
            "the learning rate and the updates"
            if change.kind in ("lr_phase", LOWERED)
            else "the gradient, the rate and the batch"
        )
        done = f"Up to step {change.end} nothing is said of {moved}, and their baselines are learned anew; "
        done += "the loss is judged as ever."
    level = ""
    if change.before is not None and change.after is not None:
        level = f" The loss was {change.before:.4g} before it and is {change.after:.4g}."
    return f"{what} {done}{level}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        return None
    return int(value)
