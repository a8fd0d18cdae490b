"""One shard is poisoned, after the middle of the run: long repeats of one byte and binary junk instead of text.

The answer (which shard, which sample positions) stays in the memory of the demo's main process until the run has
ended. What lies on disk is simply dirty data, and neither the daemon nor the receiver is told where.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwarden.exporter.loader.order import make_order
from trainwarden.exporter.loader.shards import Shards
from trainwarden.record import Ranges

from .corpus import Corpus, Rows, Shard
from .scale import Scale

_REPEAT_BYTES = (300, 1001)
_JUNK_BYTES = (60, 161)


@dataclass(frozen=True, slots=True)
class Answer:
    """Where the poison lies. ``ranges`` are sample positions of epoch 0; ``first_step`` to ``last_step`` train on them."""

    shard: str
    ranges: Ranges
    first_step: int
    last_step: int

    @property
    def samples(self) -> int:
        """How many sample positions are poisoned."""
        return sum(end - first for first, end in self.ranges)


def place(corpus: Corpus, seed: int, scale: Scale) -> tuple[Shard, Answer]:
    """Return the first shard that the run with this seed begins to read after its middle."""
    given = [(shard.name, shard.first, shard.end) for shard in corpus.shards]
    order, _ = make_order(
        "blocks",
        len(corpus.rows),
        shards=Shards(given, len(corpus.rows)),
        seed=seed,
        share=scale.reserve,
        batch=scale.batch_size,
    )
    extents = [(order.extent(0, number), shard) for number, shard in enumerate(corpus.shards)]
    after_middle = [(span, shard) for span, shard in extents if span and span[0] >= scale.steps // 2 * scale.batch_size]
    (first, end), shard = min(after_middle, key=lambda found: found[0])
    answer = Answer(
        shard=shard.name,
        ranges=[(first, end)],
        first_step=first // scale.batch_size + 1,
        last_step=(end - 1) // scale.batch_size + 1,
    )
    return shard, answer


def poison(corpus: Corpus, shard: Shard, seed: int) -> None:
    """Overwrite all rows of a shard with junk."""
    corpus.rows[shard.first : shard.end] = junk(shard.end - shard.first, corpus.rows.shape[1], seed)


def junk(rows: int, row_bytes: int, seed: int) -> Rows:
    """Return rows cut from a stream in which one byte, repeated for hundreds, alternates with uniformly random bytes."""
    chance = np.random.default_rng((seed, 0x6A756E6B))
    pieces: list[Rows] = []
    length = 0
    while length < rows * row_bytes:
        repeat = np.full(chance.integers(*_REPEAT_BYTES), chance.integers(256), dtype=np.uint8)
        binary = chance.integers(0, 256, chance.integers(*_JUNK_BYTES), dtype=np.uint8)
        pieces += [repeat, binary]
        length += repeat.size + binary.size
    return np.concatenate(pieces)[: rows * row_bytes].reshape(rows, row_bytes)
