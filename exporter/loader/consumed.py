"""What was handed to the trainer since it last asked: positions, shards and the batches themselves. Host integers only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges, ShardSpan

#: References kept to batches that nobody has asked for yet; a trainer that never closes a step must not fill memory.
BATCHES_KEPT = 64


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one rank was handed since the last call of ``consumed()``.

    ``position`` is the position in the global order of ``epoch`` after it, over all ranks. ``samples`` are this rank's
    positions in the unskipped global order of that epoch, substituted ones included; what belonged to an earlier epoch (a step that
    accumulates over the end of one) is in ``count`` alone. ``shards`` leave substituted samples out. ``count`` and ``substituted`` are
    samples. ``batches`` refers to the newest :data:`BATCHES_KEPT` batches as the loader gave them.
    """

    epoch: int
    position: int
    samples: Ranges
    shards: list[ShardSpan]
    count: int
    substituted: int
    batches: list[Any]


class Tally:
    """Adds up what is handed out between two calls of :meth:`take`."""

    def __init__(self) -> None:
        self._epoch = 0
        self._position = 0
        self._samples: Ranges = []
        self._shards: dict[str, ShardSpan] = {}
        self._count = 0
        self._substituted = 0
        self._batches: deque[Any] = deque(maxlen=BATCHES_KEPT)

    def add(
        self,
        batch: Any,
        *,
        epoch: int,
        position: int,
        samples: Ranges,
        count: int,
        shards: list[ShardSpan] | None = None,
        substituted: int = 0,
    ) -> None:
        """Add one batch that is being handed out."""
        if epoch != self._epoch:
            self._samples, self._shards = [], {}
        self._epoch, self._position = epoch, position
        self._samples = merge_ranges([*self._samples, *samples])
        for span in shards or ():
            known = self._shards.get(span.name, span)
            self._shards[span.name] = ShardSpan(span.name, min(known.first, span.first), max(known.end, span.end))
        self._count += count
        self._substituted += substituted
        self._batches.append(batch)

    def take(self) -> Consumed | None:
        """Return the sum and begin anew; None where nothing was handed out."""
        if not self._batches:
            return None
        taken = Consumed(
            self._epoch,
            self._position,
            self._samples,
            list(self._shards.values()),
            self._count,
            self._substituted,
            list(self._batches),
        )
        self._samples, self._shards, self._count, self._substituted = [], {}, 0, 0
        self._batches.clear()
        return taken
