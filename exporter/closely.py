"""How a trainer, a setting or a plan asks for a close look at some steps. Nothing of :mod:`exporter.anomaly` is imported before somebody does."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch
from torch import nn

from trainwarden.plan import Applied, CloseLook, PlanError, check_look

from .assembly import Parts
from .notices import Notices
from .settings import Settings

#: ``FIRST_STEP:STEPS``, for a run whose script is not to be changed.
VARIABLE = "TRAINWARDEN_ANOMALY"


class LooksClosely:
    """The part of an exporter that looks closely where somebody asks for it."""

    _model: nn.Module
    _optimizers: list[torch.optim.Optimizer]
    _notices: Notices
    _settings: Settings
    _step: int
    #: An :class:`exporter.anomaly.asked.CloseLooks` from the first question until nothing is left to do.
    _looks: Any = None

    def _live(self) -> Parts | None:
        raise NotImplementedError

    def look_closely(self, steps: int = 10, *, first_step: int | None = None, check_nan: bool = False) -> None:
        """Look at the open step and those behind it, or at those from ``first_step`` on, as closely as torch allows.

        Each of the ``steps`` (1 to 1,000) costs several times a usual one. With ``check_nan`` torch raises where a backward pass makes a NaN, as
        :func:`torch.autograd.detect_anomaly` does. Call it on the thread that trains. See :mod:`exporter.anomaly`.
        """
        try:
            first = self._step + 1 if first_step is None else first_step
            self._look(
                msgspec.convert({"first_step": first, "steps": steps, "check_nan": check_nan}, CloseLook), "call"
            )
        except (PlanError, msgspec.ValidationError) as error:
            self._notices.say("close look", f"look_closely: {error}: not looked at")
        except Exception as error:
            self._notices.fault("asking for a close look", error)

    def _look(self, look: CloseLook, by: str) -> None:
        """Have some steps looked at closely.

        Raises:
            PlanError: they cannot be meant, or are over.
        """
        parts = self._live()
        if parts is not None:
            from .anomaly.asked import CloseLooks

            if self._looks is None:
                self._looks = CloseLooks(parts, self._model, self._optimizers, self._notices)
            self._looks.ask(look, by, self._step + 1)

    def _look_as_set(self) -> None:
        """Have those steps looked at that the setting ``anomaly`` or the environment names."""
        asked = self._settings.anomaly
        text = os.environ.get(VARIABLE, "").strip()
        try:
            if asked is None and text:
                asked = named(text)
            if asked is not None:
                self._look(asked, "setting")
        except PlanError as error:
            self._notices.say("close look", f"{VARIABLE if text else 'anomaly'}: {error}: not looked at")
        except Exception as error:
            self._notices.fault("asking for a close look", error)

    def _look_as_planned(self, applied: Applied | None) -> Applied | None:
        """Have those steps looked at that the plan names; where that cannot be done, the report says so."""
        if applied is None or applied.anomaly is None:
            return applied
        try:
            self._look(applied.anomaly, "plan")
            return applied
        except Exception as error:  # what a plan asks beside must not cost what else it asks
            refused = {**applied.not_applied, "anomaly": f"{type(error).__name__}: {error}"}
            return msgspec.structs.replace(applied, anomaly=None, not_applied=refused)

    def _look_on(self, step: int) -> None:
        """Step ``step`` is open: a look may begin or end."""
        try:
            self._looks.opened(step)
            if self._looks.over:
                self._looks = None
        except Exception as error:
            self._notices.fault("looking closely", error)


def named(text: str) -> CloseLook:
    """Return the look that ``FIRST_STEP:STEPS`` names.

    Raises:
        PlanError: it names none.
    """
    first, colon, steps = text.partition(":")
    if not (colon and first.strip().isdecimal() and steps.strip().isdecimal()):
        raise PlanError(f"{text!r} is not FIRST_STEP:STEPS, as in 1200:12")
    look = CloseLook(first_step=int(first), steps=int(steps))
    check_look(look)
    return look
