"""Which optimizers' steps make up one step of the training, learnt from the order in which they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

#: So many steps back is remembered which optimizers took part: one that steps at every fifth is waited for.
RECENT = 16


class Cycle:
    """The open step. It ends, by definition, before an optimizer steps that has stepped in it already.

    That an optimizer that always came comes no more is learnt only after a while; until then a step ends as the definition says. An
    optimizer is known by a number, its ``id``. ``known`` are those that there are before any has stepped.
    """

    def __init__(self, known: Iterable[int]) -> None:
        self._recent: deque[frozenset[int]] = deque([frozenset(known)], maxlen=RECENT)
        self._done: set[int] = set()

    @property
    def begun(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._done)

    def repeats(self, optimizer: int) -> bool:
        """Say whether ``optimizer``, which is about to step, has stepped already: a new step of the training then begins."""
        return optimizer in self._done

    def stepped(self, optimizer: int) -> None:
        """Take note of an optimizer's step."""
        self._done.add(optimizer)

    def whole(self) -> bool:
        """Say whether every optimizer has stepped that did so lately: nobody is waited for."""
        return bool(self._done) and frozenset().union(*self._recent) <= self._done

    def close(self) -> None:
        """End the open step."""
        self._recent.append(frozenset(self._done))
        self._done.clear()
