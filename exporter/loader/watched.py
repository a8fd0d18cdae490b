"""What every kind of watched loader offers, and the state that it puts into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from .consumed import Consumed

#: Marks a state dict as ours and says which version wrote it.
STATE_KEY = "trainwarden_loader"
STATE_VERSION = 1


class LoaderStateError(ValueError):
    """A checkpoint's loader state that this loader cannot continue from. The message says what differs and what to do."""


@runtime_checkable
class WatchedLoader(Protocol):
    """A loader that knows what it has handed out.

    A pass (``iter(loader)``) continues at the loaded or the first position; after a pass that was begun it is the next
    epoch, whether or not the trainer left the pass early.

    ``kind`` is ``map``, ``state_dict`` or ``iterable``. ``replayable``: the same positions give the same samples again.
    ``can_skip`` names what it can do of ``substitute``, ``shift`` and ``exclude``. ``refused`` maps fields of a plan
    that it was given and could not carry out to the reason. ``notices`` are sentences for the person who runs it.
    ``epoch`` is that of the last batch handed out, or of the first to come. ``batch_size`` is samples a rank and batch.
    """

    kind: str
    replayable: bool
    can_skip: frozenset[str]
    refused: dict[str, str]
    notices: list[str]
    dataset_name: str | None

    @property
    def epoch(self) -> int: ...  # noqa: D102 - described above

    @property
    def batch_size(self) -> int | None: ...  # noqa: D102

    @property
    def dataset_size(self) -> int | None: ...  # noqa: D102

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, as plain numbers and text (an inner loader's state apart)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of ``state`` with the next pass.

        Raises:
            LoaderStateError: this loader's data would not be that of the checkpoint.
        """

    def consumed(self) -> Consumed | None:
        """Return what was handed out since the last call, or None; lets go of the batches."""


def read_state(state: Mapping[str, Any], kind: str, expected: Mapping[str, Any]) -> tuple[int, int]:
    """Return (epoch, position) of a state after checking that it is of this kind and agrees with ``expected``.

    Raises:
        LoaderStateError: it does not.
    """
    version = state.get(STATE_KEY)
    if version is None:
        raise LoaderStateError(
            f"this is no state of a watched loader (it has no {STATE_KEY!r}): pass what loader.state_dict() returned"
        )
    if version != STATE_VERSION:
        raise LoaderStateError(f"the loader's state has version {version}, this trainwarden reads {STATE_VERSION}")
    if state.get("kind") != kind:
        raise LoaderStateError(
            f"the state was saved by a loader of kind {state.get('kind')!r}, this one is {kind!r}: wrap the same kind of loader"
        )
    differing = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in expected.items()
        if state.get(name) != value
    ]
    if differing:
        raise LoaderStateError(
            f"the data would differ from the checkpoint's: {'; '.join(differing)}. Wrap the loader as it was, or do not load its "
            "state, which begins at the first position"
        )
    epoch, position = state.get("epoch"), state.get("position")
    if type(epoch) is not int or type(position) is not int or epoch < 0 or position < 0:
        raise LoaderStateError(
            f"the loader's state has epoch {epoch!r} and position {position!r}: both must be whole numbers"
        )
    return epoch, position
