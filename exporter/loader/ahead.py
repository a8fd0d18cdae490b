"""A watched loader from which a trainer draws ahead of what it trains: each batch counts when its own step is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from .consumed import BATCHES_KEPT, Consumed, Tally
from .watched import WatchedLoader


class DrawnAhead:
    """Around a :class:`WatchedLoader`, whose attributes can be read through it. ``state_dict`` is of what was drawn."""

    def __init__(self, loader: WatchedLoader) -> None:
        self.loader: Any = loader
        #: Batches that were drawn and wait for their turn; at most as many as a tally keeps.
        self.ahead = 0
        self._drawn: deque[Consumed] = deque()
        self._tally = Tally()

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            found = self.loader.consumed()
            if found is not None:
                self._drawn.append(found)
                self._release(BATCHES_KEPT)
            yield batch

    def _release(self, keep: int) -> None:
        while len(self._drawn) > keep:
            one = self._drawn.popleft()
            self._tally.add(
                one.batches[-1],
                epoch=one.epoch,
                position=one.position,
                samples=one.samples,
                count=one.count,
                shards=one.shards,
                substituted=one.substituted,
            )

    def consumed(self) -> Consumed | None:
        """Return what was drawn since the last call and does not wait, or None."""
        self._release(self.ahead)
        return self._tally.take()

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
