"""What the start event says beside what was known at attach: the loader, what was resumed from, what the plan became."""

from __future__ import annotations

from typing import Any

from trainwarden.plan import Target

from .loader.map_style import MapStyleLoader
from .loader.prepared import PreparedLoader
from .loader.watched import WatchedLoader


def start_fields(
    known: dict[str, Any],
    *,
    step: int,
    loader: WatchedLoader | None,
    target: Target | None,
    applied: Any,
    clips: bool,
    notices: list[str],
) -> dict[str, Any]:
    """Return the fields of the start event. ``known`` are those of attach; ``step`` is the last finished one, 0 from scratch."""
    resumed_from: dict[str, Any] | None = None
    if step > 0:
        resumed_from = {"attempt": None, "step": step, "path": None}
        if target is not None and target.step == step:
            resumed_from = {"attempt": target.attempt, "step": target.step, "path": target.path}
    return dict(
        known,
        clipping=clips or None,
        replayable=bool(loader is not None and loader.replayable),
        loader_kind=None if loader is None else loader.kind,
        can_skip=[] if loader is None else sorted(loader.can_skip),
        dataset=None if loader is None else loader.dataset_name,
        batch_size=None if loader is None else loader.batch_size,
        dataset_size=None if loader is None else loader.dataset_size,
        loader=loader.told if isinstance(loader, MapStyleLoader | PreparedLoader) else None,
        resumed_from=resumed_from,
        plan_applied=applied,
        notices=notices,
    )
