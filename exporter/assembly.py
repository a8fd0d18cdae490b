"""Puts the parts of one exporter together. They are made here once, and know each other only through what they are given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwarden.record import Header
from trainwarden.runfolder import RunFolder, RunFolderError
from trainwarden.signals import WINDOW_SECONDS

from .blocks import Structure
from .cadence import Cadence
from .combining import begin, layout_of
from .description import describe
from .drain import Drain
from .hardware import Hardware
from .http import Application
from .identity import Identity, establish
from .inside import Inside
from .notices import Notices
from .observer import Observer
from .preflight import Preflight, facts
from .probes.activations import Activations
from .probes.attention_logit import AttentionLogit
from .probes.clip import Clip
from .probes.embedding_rows import EmbeddingRows
from .probes.fingerprint import Fingerprint
from .probes.first_nonfinite import FirstNonfinite
from .probes.grad_norm import GradNorm
from .probes.grad_row_max import GradRowMax
from .probes.grad_zero import GradZero
from .probes.hardware import Hardware as HardwareProbe
from .probes.learning_rate import LearningRate
from .probes.logged import Logged
from .probes.loss import Loss
from .probes.loss_scale import LossScale
from .probes.nonfinite import Nonfinite
from .probes.optimizer_state import OptimizerState
from .probes.optimizer_step import OptimizerStep
from .probes.own_gradient import OwnGradient
from .probes.probe import Probe
from .probes.replica_hash import ReplicaHash
from .probes.router import RouterLoad
from .probes.samples import Samples
from .probes.sources import Sources
from .probes.step_time import StepTime
from .probes.update_applied import UpdateApplied
from .recorder import Recorder
from .rendered import Rendered
from .reports import Reports
from .routers import Routers
from .series import Page
from .serving import Serving
from .settings import Settings
from .side import SideGroup
from .sinks.journal import Journal
from .sinks.ring import Ring
from .soft import KIND, Soft
from .staging import Staging
from .watched import Told, Watched, local


@dataclass(slots=True)
class Parts:
    """What an attached exporter works with. ``fields`` begin its start event."""

    identity: Identity
    folder: RunFolder
    watched: Watched
    observer: Observer
    staging: Staging
    recorder: Recorder
    drain: Drain
    page: Page
    serving: Serving
    reports: Reports
    fields: dict[str, Any]
    hardware: Hardware
    soft: Soft
    side: SideGroup | None = None
    routers: Routers | None = None


def default_probes(
    watched: Watched,
    optimizers: list[torch.optim.Optimizer],
    world_size: int = 1,
    settings: Settings | None = None,
    devices: Collection[torch.device] = (),
    structure: Structure | None = None,
    notices: Notices | None = None,
    hardware: Hardware | None = None,
) -> list[Probe]:
    """Return the probes of an exporter, in the order in which a record lists what they saw."""
    structure = structure or Structure()
    return [
        Logged(),  # first: what is measured wins over what was logged
        Loss(world_size),
        GradNorm(watched),
        Clip(watched),
        LearningRate(optimizers),
        LossScale(),
        Nonfinite(),
        Samples(),
        Fingerprint(None if settings is None else settings.token_classes, devices),
        Sources(() if settings is None else settings.sources, notices),
        StepTime(),
        GradZero(watched),
        OptimizerState(watched),
        UpdateApplied(watched),
        OptimizerStep(),
        OwnGradient(),
        ReplicaHash(world_size),
        Activations(structure.spots),
        AttentionLogit(),
        GradRowMax(watched),
        EmbeddingRows(watched),
        RouterLoad(),
        FirstNonfinite(structure, watched),
        *([] if hardware is None else [HardwareProbe(hardware)]),
    ]


def assemble(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: Settings,
    folder: RunFolder,
    scaler: Any,
    notices: Notices,
    told: Told | None = None,
) -> Parts:
    """Make the parts and set them to work."""
    identity = establish(folder, notices)
    watched = Watched(model, optimizers, told)
    cadence = Cadence(settings.cadence, settings.watch_steps)
    devices = {local(parameter).device for parameter in watched.params}
    inside = Inside(model, notices)
    hardware = Hardware(settings.hardware_seconds, notices)
    probes = default_probes(
        watched, list(optimizers), identity.world_size, settings, devices, inside.structure, notices, hardware
    )
    observer = Observer(optimizers, watched, probes, cadence, notices)
    # A due step puts down about seven numbers a parameter and block; nothing else grows with the model.
    staging = Staging(devices, capacity=16 * len(watched) + watched.blocks(16) + inside.numbers + 1024)
    ring = Ring(settings.ring)
    journal = Journal(
        folder.journal(identity.attempt, identity.start_id, identity.rank),
        Header(
            run_uid=identity.run_uid,
            run=identity.run,
            attempt=identity.attempt,
            start_id=identity.start_id,
            rank=identity.rank,
        ),
        notices,
        settings.rotate_bytes,
    )
    say = partial(notices.say, "series")
    page = Page(identity.run, identity.rank, settings.max_series, WINDOW_SECONDS, settings.sources, say)
    preflight = None
    if settings.preflight and identity.rank == 0:  # what is set is set for all
        known = facts(model, optimizers, watched, settings.total_steps)
        preflight = Preflight(known, lambda: observer.precisions)
    recorder = Recorder(probes, cadence, ring, journal, page, notices, preflight, lambda: watched.split)
    layout = layout_of(probes)
    side = begin(identity, watched, layout, settings, notices)
    drain = Drain(recorder, notices, side, layout)
    page.own = lambda: {
        "train_exporter_observe_seconds_total": observer.seconds,
        "train_exporter_dropped_steps_total": float(drain.dropped + journal.lost),
        "train_exporter_lag_steps": float(drain.lag),
    }
    fields = describe(identity, model, optimizers, watched, scaler)
    page.identify(
        {
            name: str(fields[name])
            for name in ("run_uid", "attempt", "start_id", "model", "world_size", "commit", "precision", "optimizer")
            if fields[name] is not None
        }
    )
    application = Application(
        identity,
        ring,
        Rendered(page),
        _token(folder, notices),
        start_line=lambda: recorder.start_line,
        folder=lambda start_id: _journal_of(folder, start_id, identity.rank),
        protect_metrics=settings.protect_metrics,
    )
    serving = Serving(settings, identity, folder, application)
    serving.start(notices)
    drain.start()
    observer.attach(model if settings.own_gradients and identity.world_size > 1 else None)
    inside.attach(observer)
    reports = Reports(drain, staging, watched, notices)
    hardware.measured = page.measured
    hardware.happened = lambda told: reports.event("hardware", max(observer.step - 1, 0), told)
    hardware.look(watched.params)
    hardware.begin()
    soft = Soft(
        folder,
        identity,
        optimizers,
        reached=lambda: max(observer.step - 1, 0),
        report=lambda step, fields: reports.event(KIND, step, fields),
        notices=notices,
        side=side,
    )
    drain.look = soft.look
    if side is not None:
        side.beside = soft
        side.on_closed = lambda step, reason: reports.event("side_group", step, {"open": False, "reason": reason})
        side.start()
    return Parts(
        identity,
        folder,
        watched,
        observer,
        staging,
        recorder,
        drain,
        page,
        serving,
        reports,
        fields,
        hardware,
        soft,
        side,
        inside.routers,
    )


def _token(folder: RunFolder, notices: Notices) -> str | None:
    try:
        return folder.token(create=True)
    except (OSError, RunFolderError) as error:
        notices.fault("bearer token", error)
        return None


def _journal_of(folder: RunFolder, start_id: str, rank: int) -> Path | None:
    """Return the folder of a start's journal by its id, or None. The id comes from outside: it is compared, not joined."""
    for attempt in reversed(folder.attempts()):
        for entry in (folder.path / f"attempt-{attempt}").iterdir():
            if entry.name == start_id and (entry / f"rank-{rank}").is_dir():
                return entry / f"rank-{rank}"
    return None
