"""How a script tells of its routers, where names and classes do not: the call :meth:`TellsRouters.router` of an exporter."""

from __future__ import annotations

import torch
from torch import Tensor

from .assembly import Parts
from .notices import Notices


class TellsRouters:
    """The part of an exporter that is told what a mixture of experts does."""

    _notices: Notices

    def _live(self) -> Parts | None:
        raise NotImplementedError

    def router(
        self,
        name: str,
        logits: Tensor | None = None,
        *,
        indices: Tensor | None = None,
        probs: Tensor | None = None,
        experts: int | None = None,
        loss: Tensor | float | None = None,
        dropped: Tensor | float | None = None,
    ) -> None:
        """Tell what a router did in this forward, or just behind it; once a layer and micro-batch, with gradients on.

        ``name`` is the layer's label in records. ``logits`` or ``probs`` are (…, experts), floating-point; ``indices`` are (…, k) whole numbers, the
        experts that each token takes, and without them the largest of the others is. ``experts`` is needed with ``indices`` alone. ``loss`` is
        the layer's balance loss without its coefficient (0-D), ``dropped`` the share of choices that found no room in their expert. Of a router
        that was found (``name`` is its module's name or its block), these two count and the rest is known. Nothing is read here; what
        cannot be meant is a notice. See docs/moe.md.
        """
        if torch.compiler.is_compiling():  # a call within a graph would break it
            return
        parts = self._live()
        if parts is not None and parts.routers is not None:
            try:
                parts.routers.told(name, logits, indices, probs, experts, loss, dropped)
            except (TypeError, ValueError) as error:
                self._notices.say("router told", str(error))
            except Exception as error:
                self._notices.fault("what was told of a router", error)
