"""Any iterable of batches: positions are counted, nothing can be skipped, and nothing is replayed.

After a resume the numbers go on where they were; which data comes is up to the iterable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .skips import Skips
from .streams import Stream
from .watched import STATE_KEY, STATE_VERSION, read_state


class PlainLoader(Stream):
    """See :class:`trainwarden.exporter.loader.WatchedLoader`. ``why`` says why it is not one of the better kinds."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        why: str,
        dataset: str | None,
        skips: Skips,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        super().__init__(loader, dataset=dataset, rank=rank, world=world)
        self.notices.append(f"loader: positions only, not replayable and without skips: {why}")
        if skips.skips:
            self.refused["skip_samples"] = f"this loader cannot skip: {why}"
        if skips.exclude:
            self.refused["exclude"] = f"this loader cannot exclude: {why}"

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, for a checkpoint."""
        return {STATE_KEY: STATE_VERSION, "kind": self.kind, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of ``state``; raises LoaderStateError where the data would be other data."""
        self._epoch, self._position = read_state(state, self.kind, {})
        self._begun = False
        self._passes += 1
