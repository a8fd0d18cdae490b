"""Whether the ranks of a start add up what they see, and the side group's beginning. Made on the training thread; waits for nobody."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from .across import Layout
from .identity import Identity
from .notices import Notices
from .probes.probe import Probe
from .settings import Settings
from .side import SideGroup, decline
from .watched import Watched


def switched_off(settings: Settings) -> bool:
    """Say whether the setting ``side_group`` or ``TRAINWARDEN_SIDE_GROUP`` turns the side group off."""
    return not settings.side_group or os.environ.get("TRAINWARDEN_SIDE_GROUP", "1").strip().lower() in (
        "0",
        "false",
        "no",
    )


def layout_of(probes: Sequence[Probe]) -> Layout:
    """Return the layout of what these probes measure."""
    return Layout({probe.name: probe.summed for probe in probes})


def begin(
    identity: Identity, watched: Watched, layout: Layout, settings: Settings, notices: Notices
) -> SideGroup | None:
    """Return the side group of a start of several ranks, to be started once all listen to it; None where there is none.

    What a rank holds of sharded parameters stays its own then. A fault costs the side group alone.
    """
    if identity.world_size == 1:
        watched.split = False
        return None
    _say_untold(watched, notices)
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        if switched_off(settings):
            decline(identity.start_id, layout, f"it is turned off on rank {identity.rank}")
            return None
        if not dist.is_gloo_available():
            raise RuntimeError("this torch has no gloo")

        def met(alike: int, all_alike: bool) -> None:
            watched.meet(alike, all_alike)
            _say_untold(watched, notices)

        side = SideGroup(
            identity.rank,
            identity.world_size,
            identity.start_id,
            layout,
            watched.signature(),
            settings.side_timeout,
            notices,
            met,
            weight=1.0 if watched.weighed else None,
        )
        watched.undecided = True
        return side
    except Exception as error:
        notices.fault("side group", error)
        return None


def _say_untold(watched: Watched, notices: Notices) -> None:
    if watched.untold is not None:
        notices.say("sharding", f"global norms are left out: {watched.untold}")
