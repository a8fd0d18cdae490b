"""A loader with ``state_dict`` and ``load_state_dict`` (torchdata's StatefulDataLoader, streaming data sets).

It resumes exactly with the number of workers and ranks that it was saved with, and is refused otherwise: its state is one of
each worker. It can skip by dropping whole batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .ranges import RangeSet
from .skips import Skips
from .streams import Stream
from .watched import STATE_KEY, STATE_VERSION, read_state


class StatefulLoader(Stream):
    """See :class:`trainwarden.exporter.loader.WatchedLoader`."""

    kind = "state_dict"
    replayable = True
    can_skip = frozenset({"shift"})

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        dataset: str | None,
        skips: Skips,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        super().__init__(loader, dataset=dataset, rank=rank, world=world)
        self._dropped = {epoch: RangeSet(skips.in_epoch(epoch)) for epoch in skips.epochs()}
        if any(skip.mode == "substitute" for skip in skips.skips):
            self.refused["skip_mode"] = (
                "a loader with a state_dict has no reserve: batches that touch a skipped position are dropped whole"
            )
        if skips.exclude:
            self.refused["exclude"] = "a loader with a state_dict does not say which rows a batch holds"

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, for a checkpoint."""
        return {
            STATE_KEY: STATE_VERSION,
            "kind": self.kind,
            **self._identity(),
            "epoch": self._epoch,
            "position": self._position,
            "inner": self._inner.state_dict(),  # type: ignore[attr-defined]  # watch() made sure of both methods
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of ``state``; raises LoaderStateError where the data would be other data."""
        if STATE_KEY not in state:
            # Saved before the loader was watched: the data goes on exactly, its position is not known.
            self._inner.load_state_dict(state)  # type: ignore[attr-defined]
            self._epoch, self._position, self._begun = 0, 0, False
            self.notices.append("loader: its state was saved unwatched, so positions count from 0 at this resume")
            return
        self._epoch, self._position = read_state(state, self.kind, self._identity())
        self._begun = False
        self._passes += 1
        self._inner.load_state_dict(state["inner"])  # type: ignore[attr-defined]

    def position_after(self, batches: int) -> int:
        """Return the position after so many batches of epoch 0 were handed out to each rank, dropped ones left out."""
        step = (self.batch_size or 1) * self._world
        dropped = self._dropped.get(0)
        spans = [] if dropped is None else [(first // step, -(-end // step)) for first, end in dropped.ranges]
        last = batches - 1
        for first, end in RangeSet(spans).ranges:
            if first <= last:
                last += end - first
        return (last + 1) * step

    def _identity(self) -> dict[str, Any]:
        return {"num_workers": getattr(self._inner, "num_workers", 0), "world": self._world}

    def _is_skipped(self, first: int, end: int) -> bool:
        dropped = self._dropped.get(self._epoch)
        return dropped is not None and dropped.touches(first, end)
