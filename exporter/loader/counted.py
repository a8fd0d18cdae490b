"""Samples that no loader of ours hands out: a trainer that reads in one order, without end, says how many it has consumed.

Only the numbers are known here, never the data: there is nothing to draw from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .consumed import Consumed
from .skips import Skips
from .watched import STATE_KEY, STATE_VERSION, read_state


class CountedSamples:
    """Positions by a trainer's count of samples. See :class:`trainwarden.exporter.loader.WatchedLoader`.

    The order is a function of seed and position over all passes of a run, as in Megatron-core's ``GPTDataset``, so that there is one
    epoch. A step's samples go to those that read in turns, micro-batch by micro-batch (``MegatronPretrainingSampler``,
    ``--dataloader-type single``).

    Args:
        skips: what plans leave out; it is refused with the reason ``why``.
        micro_batch_size: samples of one reader in a micro-batch, None where that is not known: then its ranges are absent.
        reads: (place, number) of those that read different samples.
        tells: whether this rank tells its ranges: of several that read the same, one does.
        dataset: the data set's name.
    """

    kind = "iterable"
    replayable = True
    can_skip: frozenset[str] = frozenset()
    epoch = 0
    dataset_size = None

    def __init__(
        self,
        skips: Skips,
        micro_batch_size: int | None,
        reads: tuple[int, int],
        tells: bool,
        dataset: str | None,
        why: str,
    ) -> None:
        self.batch_size = micro_batch_size
        self._place, self._number = reads
        self._tells = tells
        self.dataset_name = dataset
        self.notices: list[str] = []
        asked = {"skip_samples": skips.skips, "exclude": skips.exclude}
        self.refused = {name: f"nothing can be left out: {why}" for name, what in asked.items() if what}
        self._position = self._begin = 0
        self._is_new = False

    def place(self, position: int) -> None:
        """Go on after so many samples."""
        self._position = self._begin = int(position)

    def consume(self, position: int) -> None:
        """Take over that so many samples have been consumed in all, this step's with them."""
        if not self._is_new:
            self._begin = self._position
        self._position, self._is_new = int(position), True

    def consumed(self) -> Consumed | None:
        """Return what was consumed since the last call, or None."""
        if not self._is_new:
            return None
        self._is_new = False
        own = max(0, self._position - self._begin) // self._number
        samples = self._ranges() if self._tells else []
        return Consumed(self.epoch, self._position, samples, [], own, 0, [])

    def _ranges(self) -> list[tuple[int, int]]:
        begin, end, size = self._begin, self._position, self.batch_size
        if end <= begin:
            return []
        if self._number == 1:
            return [(begin, end)]
        if size is None or (end - begin) % (size * self._number):
            return []
        return [(at, at + size) for at in range(begin + self._place * size, end, size * self._number)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {STATE_KEY: STATE_VERSION, "kind": self.kind, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the position of ``state``; raises LoaderStateError where it is none of this kind."""
        self.place(read_state(state, self.kind, {})[1])

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("samples are counted here, and not handed out: draw from the trainer's own loader")

    def __len__(self) -> int:
        raise TypeError("samples are counted here, and not handed out: their number is not known")

    def __bool__(self) -> bool:
        return True
