"""Accelerate: an exporter for a loop of one's own around an ``Accelerator``.

The accelerator knows which micro-batch ends an optimizer step, so :meth:`AcceleratedExporter.step` may stand in every one of them; and
it shares a loader out among the ranks, so :meth:`AcceleratedExporter.wrap` follows the loader that it prepared. What
Accelerate computes stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.forensics import Save
from trainwarden.exporter.loader import Skips
from trainwarden.exporter.loader.prepared import PreparedLoader


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    run: str | None = None,
    **settings: Any,
) -> AcceleratedExporter:
    """Return an exporter for what ``accelerator.prepare`` returned.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        exporter = attach(accelerator, model, optimizer, run="gpt-7b")
        loader = exporter.wrap(loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            exporter.step(loss)  # in every micro-step; closes a record where the accelerator made an update

    Call it on every rank. ``settings`` are those of :class:`Exporter`.

    Raises:
        TypeError, ValueError: an argument is of no use; the message names it.
    """
    return AcceleratedExporter(accelerator, model, optimizer, run, **settings)


class AcceleratedExporter(Exporter):
    """An :class:`Exporter` that asks an accelerator where a step ends. See :func:`attach`."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        run: str | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"accelerator: {type(accelerator).__name__} is no accelerate.Accelerator")
        several = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        inner = [_unwrapped(each) for each in several]
        scaler = settings.pop("scaler", accelerator.scaler)
        self._accelerator = accelerator
        self._saving: Future[None] | None = None
        super().__init__(_uncompiled(model), inner, run, scaler=scaler, **settings)

    def step(self, loss: Tensor | float | None = None, tokens: Tensor | float | None = None) -> None:
        """Take a micro-batch's loss, and close the step's record where the accelerator has made an update.

        The record's loss is the mean over the step's micro-batches, of equal weight as ``accelerator.backward`` has them, or
        weighted by ``tokens`` where a loop does that. Call it in every micro-step, behind the optimizer's ``step``.
        """
        if loss is not None:
            self.micro(loss, tokens)
        if self._accelerator.sync_gradients:
            super().step()
            self._all_saved()

    def wrap(
        self,
        loader: Any,
        *,
        seed: int | None = None,
        order: Any = None,
        shards: Any = None,
        reserve: float = 0.01,
        dataset: str | None = None,
    ) -> Any:
        """Return a loader that knows the positions it hands out, and replaces what plans leave out.

        Args:
            loader: what ``accelerator.prepare`` returned, or a DataLoader, which is prepared here.
            seed: makes the order of a shuffling loader a function of this number and the epoch. None leaves it as it is, which
                allows exact resume and skips only with ``DataLoaderConfiguration(use_seedable_sampler=True)``.
            order: of no use here: the order stays Accelerate's.
            shards, dataset: ``(name, first_row, end_row)`` of each shard, and the data set's name, by which a plan excludes data.
            reserve: share of the rows from which stand-ins are drawn; they are trained on as ever, too.

        Its ``state_dict`` holds the position; ``accelerator.register_for_checkpointing(loader)`` saves it along.
        """

        def make(skips: Skips) -> PreparedLoader:
            if order is not None:
                raise ValueError("order: an accelerator's loader keeps its own order; give it a sampler instead")
            return PreparedLoader(
                prepared, skips=skips, order_seed=seed, shards=shards, reserve=reserve, dataset=dataset
            )

        prepared = loader
        if isinstance(loader, DataLoader) and type(loader) not in (DataLoaderShard, DataLoaderDispatcher):
            prepared = self._accelerator.prepare(loader)
        watched = self.follow(make)
        return prepared if watched is None else watched

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, **others: Any) -> Path:
        """Call ``accelerator.save_state`` and report what it wrote as a checkpoint of the last step. On every rank.

        With several ranks it counts as complete once the next step has ended: then all of them have written their part.
        """
        with self.phase("checkpoint"):
            path = Path(self._accelerator.save_state(output_dir, **others))
        self._all_saved()
        self._saving = Future() if self._accelerator.num_processes > 1 else None
        self.checkpoint(self.global_step, path, future=self._saving)
        return path

    def forensics(self, save: Save | None = None, *, keep: int = 2, batches: int = 64) -> None:
        """See :meth:`Exporter.forensics`. Without ``save``, it is ``accelerator.save_state``."""
        super().forensics(self._save_apart if save is None else save, keep=keep, batches=batches)

    def _save_apart(self, folder: Path) -> None:
        """Save into ``folder``, whatever names the accelerator gives by itself: those are counted, and the oldest removed."""
        project = self._accelerator.project_configuration
        named, number = project.automatic_checkpoint_naming, project.iteration
        project.automatic_checkpoint_naming = False
        try:
            self._accelerator.save_state(str(folder))
        finally:
            project.automatic_checkpoint_naming, project.iteration = named, number

    def close(self, reason: str = "finished", code: int | None = 0) -> None:
        """See :meth:`Exporter.close`."""
        self._all_saved()
        super().close(reason, code)

    def _all_saved(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.set_result(None)


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate calls: hooks of its own wrapper never run."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _uncompiled(model: Any) -> Any:
    """Return the module inside of what ``torch.compile`` made of it. The wrapper of several ranks stays."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod
    return model
