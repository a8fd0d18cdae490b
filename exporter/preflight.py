"""What is wrong with the settings of a run, said once each as soon as it can be known: in the log and as an event ``preflight``.

A fault of the settings costs nothing to mend at the start and days later on. Each check looks at what the host knows: facts of
attach, records that are finished, and checkpoints that were reported. It reads no tensor, judges no curve and stops nothing.
docs/preflight.md says of each why it is worth a sentence. Runs on the drain thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainwarden.record import Event, Step

from .intended import is_known
from .watched import Watched

#: Steps of a start after which what was never seen is taken to be absent.
LOOKS = 10
#: A warm-up below this share of all steps is short, unless it lasts for two of the optimizer's memories, 2 / (1 - beta2), which
#: are enough for Adam (Ma and Yarats, arXiv 1910.04209).
WARM_UP_SHARE, MEMORIES = 0.01, 2
#: Steps without a higher rate after which a warm-up is over: a schedule may hold the rate for some steps in between.
PLATEAU = 20
#: Below this many steps nobody saves: an optimizer that forgets sooner asks for no checkpoint.
SHORTEST_INTERVAL = 200
#: The smallest number above zero in float16; an epsilon below half of it is zero there.
SMALLEST_HALF = 2.0**-24
#: Names that one sentence lists.
NAMES = 3


class Finding(NamedTuple):
    """One fault of the settings: the name of its check, a sentence, and the step at which it could be known."""

    check: str
    says: str
    step: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when the exporter is attached.

    ``half`` counts parameters in float16. ``unknown`` are classes of optimizers whose intended update cannot be told.
    ``left_out`` are names of parameters that require a gradient and that no optimizer has; ``foreign`` counts parameters that an
    optimizer has and the model has not. ``epsilon`` and ``beta2`` are Adam's, None where there are none, or where they are
    on the device. ``half_state`` says that an optimizer keeps its state in float16. ``elements`` are all trainable numbers.
    """

    half: int = 0
    unknown: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    foreign: int = 0
    epsilon: float | None = None
    beta2: float | None = None
    half_state: bool = False
    elements: int = 0
    total_steps: int | None = None


def facts(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], watched: Watched, total_steps: int | None
) -> Facts:
    """Look at model and optimizers. Reads no value of a tensor."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    named = list(model.named_parameters())
    own = {id(parameter) for _, parameter in named}
    stand_ins = {id(watched.params[index]): id(watched.params[of]) for index, of in watched.stand_ins.items()}
    reached = updated | {of for tensor, of in stand_ins.items() if tensor in updated}
    whole = not watched.weighed and watched.untold is None  # else the rest may be updated on other ranks
    adams = [group for group in groups if "betas" in group and "eps" in group]
    epsilons = [float(group["eps"]) for group in adams if isinstance(group["eps"], int | float)]
    betas = [float(group["betas"][1]) for group in adams if isinstance(group["betas"][1], int | float)]
    half = [parameter for parameter in watched.params if parameter.dtype is torch.float16]
    return Facts(
        half=len(half),
        unknown=tuple(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers if not is_known(optimizer))),
        left_out=tuple(
            name for name, parameter in named if whole and parameter.requires_grad and id(parameter) not in reached
        ),
        foreign=len(updated - own - stand_ins.keys()),
        epsilon=min(epsilons, default=None),
        beta2=max(betas, default=None),
        half_state=any(id(parameter) in updated for parameter in half) and bool(adams),
        elements=sum(parameter.numel() for parameter in watched.params if parameter.requires_grad),
        total_steps=total_steps,
    )


class Preflight:
    """Looks at a start's first steps. ``autocast`` gives the types that were seen in an autocast, by name.

    :meth:`begin`, :meth:`record` and :meth:`event` return what is found; each check finds something at most once.
    """

    def __init__(self, known: Facts, autocast: Callable[[], Set[str]]) -> None:
        self._known = known
        self._autocast = autocast
        self._first: int | None = None
        self._looks = 0
        self._seen: set[str] = set()
        self._saved: int | None = None
        self._gap_said = known.beta2 is None or not 0 < known.beta2 < 1
        self._fresh = False
        self._reset = False
        self._top: tuple[float, int] | None = None
        self._rising = known.total_steps is not None

    def begin(self, start: Event) -> list[Finding]:
        """Look at a start event."""
        step = start.step or 0
        self._first, self._looks, self._saved, self._top = step, 0, step, None
        self._seen.clear()
        self._fresh = step == 0
        self._rising = self._fresh and self._known.total_steps is not None
        # What a run cannot have that is watched without a line of its own is no fault of its settings.
        absent = start.fields.get("absent") or ()
        if "sample positions" in absent:
            self._seen.add("samples")
        self._gap_said = self._gap_said or "checkpoints" in absent
        applied = start.fields.get("plan_applied")
        self._reset = bool(getattr(applied, "reset_optimizer", False))
        return [Finding(check, says, step) for check, says in _at_attach(self._known)]

    def event(self, event: Event) -> None:
        """Take note of a checkpoint."""
        if event.kind == "checkpoint" and event.step is not None and event.fields.get("complete") is True:
            self._saved = max(self._saved or 0, event.step)

    def record(self, step: Step) -> list[Finding]:
        """Look at a step's record."""
        if self._first is None:
            return []
        found = []
        if self._looks < LOOKS:
            self._looks += 1
            self._look(step)
            if self._looks == 1:
                found += list(self._counter(step))
            if self._looks == LOOKS:
                found += list(self._never_seen())
                found += list(self._tiny_gradient(step))
        if not self._gap_said:
            found += list(self._gap(step))
        if self._rising:
            found += list(self._warm_up(step))
        return [Finding(check, says, step.step) for check, says in found]

    def _look(self, step: Step) -> None:
        for name in ("clip_ratio", "loss_scale", "grad_norm"):
            if step.value(name) is not None:
                self._seen.add(name)
        if step.samples or step.value("sample_position") is not None:
            self._seen.add("samples")
        if step.value("skipped"):
            self._seen.add("skipped")

    def _never_seen(self) -> Iterator[tuple[str, str]]:
        half = self._known.half > 0 or "float16" in self._autocast()
        if half and "loss_scale" not in self._seen:
            what = f"{self._known.half} parameters are" if self._known.half else "The forward pass is"
            yield (
                "loss_scaling",
                f"{what} in float16 and no GradScaler was seen: gradients below 6e-8 vanish. "
                "Use torch.amp.GradScaler, or bfloat16.",
            )
        if "clip_ratio" not in self._seen and self._seen & {"grad_norm", "skipped"}:
            yield (
                "clipping",
                f"No clipping was seen in {LOOKS} steps: one bad batch moves the model as far as its gradient is large. "
                "Clip with torch.nn.utils.clip_grad_norm_; clipping that does not go through torch cannot be seen.",
            )
        if "samples" not in self._seen:
            yield (
                "sample_positions",
                "No sample positions are known: a rollback can neither leave out the data that did harm nor tell which it was. "
                "Wrap the loader: loader = exporter.wrap(loader).",
            )

    def _counter(self, step: Step) -> Iterator[tuple[str, str]]:
        """A counter that begins anew after a resume; what a GradScaler skips makes it lag, but never to half."""
        count = step.value("optimizer_step")
        if count is not None and not self._fresh and not self._reset and count < step.step / 2 and count <= LOOKS:
            yield (
                "optimizer_counter",
                f"The optimizer's own step is {count:g} at step {step.step} of a resumed run: its state, or only the counter, was "
                "not restored, and its bias correction begins anew.",
            )

    def _tiny_gradient(self, step: Step) -> Iterator[tuple[str, str]]:
        norm, epsilon = step.value("grad_norm"), self._known.epsilon
        if norm is None or epsilon is None or not self._known.elements or not 0 < norm < math.inf:
            return
        usual = norm / math.sqrt(self._known.elements)
        if usual < epsilon:
            yield (
                "epsilon",
                f"Adam's epsilon {epsilon:g} is above the RMS {usual:.2g} of the gradient: updates are smaller than the rate "
                "says, and shrink with the gradient. Take a smaller epsilon.",
            )

    def _gap(self, step: Step) -> Iterator[tuple[str, str]]:
        memory = 1 / (1 - (self._known.beta2 or 0.0))
        since = step.step - (self._saved or 0)
        if since > max(memory, SHORTEST_INTERVAL) * (1 + 1e-9):
            self._gap_said = True
            whence = "was reported since the start" if self._saved == self._first else f"since step {self._saved}"
            yield (
                "checkpoint_interval",
                f"No checkpoint {whence}: that is {since} steps, more than the optimizer's memory of "
                f"{round(memory)} (beta2 {self._known.beta2:g}). A rollback goes back further than the fault reaches. Save more "
                "often, and report it: exporter.checkpoint(step, path).",
            )

    def _warm_up(self, step: Step) -> Iterator[tuple[str, str]]:
        rate, total = step.value("lr"), self._known.total_steps
        if rate is None or total is None or not math.isfinite(rate):
            return
        if self._top is None or rate > self._top[0] * (1 + 1e-9):
            self._top = (rate, step.step)
        reached = self._top[1]
        enough = WARM_UP_SHARE * total
        if self._known.beta2 is not None and 0 < self._known.beta2 < 1:
            enough = min(enough, MEMORIES / (1 - self._known.beta2))
        if reached >= max(2, enough):
            self._rising = False
        elif step.step - reached >= min(PLATEAU, max(1, total - reached)):
            self._rising = False
            if reached < enough:
                length = f"ends at step {reached}" if reached > 1 else "is absent"
                yield (
                    "warm_up",
                    f"The warm-up of the learning rate {length}, below 1 % of {total} steps: the optimizer's averages are still of a "
                    "few batches when the rate is highest. Warm up longer, or start lower.",
                )


def _at_attach(known: Facts) -> Iterator[tuple[str, str]]:
    if known.unknown:
        names = " and ".join(known.unknown)
        yield (
            "intended_update",
            f"The update that {names} means to make cannot be told from its state: update_ratio is absent, "
            "update_applied_ratio is measured.",
        )
    if known.left_out:
        more = len(known.left_out) - NAMES
        names = ", ".join(known.left_out[:NAMES]) + (f" and {more} more" if more > 0 else "")
        says = f"Parameters that require a gradient are in no optimizer that the exporter was given: {names}."
        if known.foreign:
            says += f" The optimizer has {known.foreign} that the model has not: make it after the model was wrapped, moved or replaced."
        yield "untrained_parameters", says
    if known.half_state and known.epsilon is not None and 0 < known.epsilon < SMALLEST_HALF / 2:
        yield (
            "epsilon",
            f"Adam's epsilon {known.epsilon:g} is zero in float16, the type of its state: a parameter without a gradient becomes NaN. "
            "Keep parameters and state in float32.",
        )


def as_event(finding: Finding, time: float) -> Event:
    """Return a finding as the event that tells of it."""
    fields: dict[str, Any] = {"check": finding.check, "says": finding.says}
    return Event(kind="preflight", time=time, step=finding.step, fields=fields)
