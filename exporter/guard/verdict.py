"""Whether an update is left out, decided on the device from the norm of its gradient. No value is read.

Three reasons. ``nonfinite``: the norm is NaN or infinite, so some element is. ``limit``: it is above a number that the user gave.
``surge``: it is above a multiple of the median of the last accepted norms. The form of the last is that of OLMo-core's
``SkipStepOptimizer`` (its last 128 values, nothing before half of them are there), which asks for six standard deviations above
the mean; a median stays where it is when a few of the values are high, and one can read a multiple of it off a chart. Megatron-LM
calls a step a spike at ten times the largest norm so far. Like ZClip's, the history takes in what was accepted alone.

Such a history has one danger: where the norm rises for good, everything is refused for ever. So after ``patience`` updates that
were refused for this reason in a row, the next is let through and the history begins anew: that is a new level and no poison. An
update that is not finite is never let through: it would cost the model, skipping costs time. Nor is one above ``limit``, which is
a person's word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is refused beside what is not finite: norms above ``limit``, and above ``factor`` times the median of accepted ones.

    ``window`` accepted norms are remembered, and ``factor`` counts once half of them are there.

    Raises:
        ValueError: a number is of no use; the message names it.
    """

    limit: float | None = None
    factor: float | None = None
    window: int = 128
    patience: int = 10

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit: {self.limit!r} is no positive, finite norm; None for no limit")
        if self.factor is not None and not 1 < self.factor < math.inf:
            raise ValueError(
                f"factor: {self.factor!r} is not above 1: half of all updates would be left out; None for none"
            )
        if not (isinstance(self.window, int) and self.window >= 2):
            raise ValueError(f"window: {self.window!r} is no whole number of at least 2 norms")
        if not (isinstance(self.patience, int) and self.patience >= 1):
            raise ValueError(f"patience: {self.patience!r} is no whole number of at least 1 update")


class _History(NamedTuple):
    """What was learnt: the last accepted norms (window,), infinite where there are none yet; how many; surges refused in a row."""

    kept: Tensor
    accepted: Tensor
    refused: Tensor


class Verdicts:
    """Judges the updates of one optimizer, one after another. Its state is three tensors where the norms are."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._history: _History | None = None

    def judge(self, norm: Tensor, others: Tensor | None, passed_over: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the reasons to leave the update out, (3,) of 0 and 1 in the order of ``SKIP_CAUSES``, and the bound in force.

        ``norm`` is a 0-dimensional tensor. ``others`` are the reasons that other optimizers had in the same step: one batch
        made all their gradients. ``passed_over`` says that a GradScaler leaves the update out by itself: its doing is not counted here.
        """
        bounds = self._bounds
        finite = torch.isfinite(norm)
        never = torch.zeros_like(finite)
        over = never if bounds.limit is None else finite & (norm > bounds.limit)
        bound = torch.full_like(norm, math.nan if bounds.limit is None else bounds.limit)
        history, surge, anew = None, never, never
        if bounds.factor is not None:
            history = self._history or self._begin(norm)
            surge, anew, bound = self._surge(history, norm, finite & ~over, bound)
        reasons = torch.stack([~finite, over, surge]).to(norm.dtype)
        if others is not None:
            reasons = torch.maximum(reasons, others)
        left_out = reasons.sum() > 0
        if passed_over is not None:
            passed_over = passed_over.to(norm.device).reshape(()) > 0
            reasons = torch.where(passed_over, 0.0, reasons)
            left_out = left_out | passed_over
        if history is not None:
            self._history = self._remember(history, norm, left_out, surge, anew)
        return reasons, bound

    def _begin(self, norm: Tensor) -> _History:
        none = torch.zeros((), dtype=torch.int64, device=norm.device)
        kept = torch.full((self._bounds.window,), math.inf, dtype=norm.dtype, device=norm.device)
        return _History(kept, none, none)

    def _surge(self, history: _History, norm: Tensor, usable: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Say whether the norm is too far above the accepted ones, whether the history begins anew, and what the bound is."""
        bounds = self._bounds
        assert bounds.factor is not None
        ordered = torch.sort(history.kept).values
        middle = (history.accepted.clamp(1, bounds.window) - 1) // 2  # those that are missing are sorted to the end
        highest = ordered.gather(0, middle.reshape(1))[0] * bounds.factor
        armed = history.accepted >= -(-bounds.window // 2)
        high = usable & armed & (norm > highest)
        anew = high & (history.refused >= bounds.patience)
        return high & ~anew, anew, torch.where(armed, torch.fmin(bound, highest), bound)

    def _remember(self, history: _History, norm: Tensor, left_out: Tensor, surge: Tensor, anew: Tensor) -> _History:
        """Return the history with this norm in it if it was accepted."""
        begin = anew & ~left_out
        accepted = torch.where(begin, 0, history.accepted)
        kept = torch.where(begin, math.inf, history.kept)
        places = torch.arange(self._bounds.window, device=norm.device)
        kept = torch.where((places == accepted % self._bounds.window) & ~left_out, norm, kept)
        refused = torch.where(left_out, history.refused + surge.to(torch.int64), 0)
        return _History(kept, accepted + (~left_out).to(torch.int64), refused)

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return what was learnt of the norms, None where nothing was."""
        if self._history is None:
            return None
        return {name: tensor.clone() for name, tensor in self._history._asdict().items()}

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of another window.
        """
        if state is None:
            self._history = None
            return
        kept = state["kept"]
        if kept.shape != (self._bounds.window,):
            raise ValueError(f"guard: a window of {len(kept)} norms was saved, this one has {self._bounds.window}")
        self._history = _History(kept.to(device), state["accepted"].to(device), state["refused"].to(device))
