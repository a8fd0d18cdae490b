"""The numbers by which an exporter works, with their defaults, and the switch that turns all of it off."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwarden.plan import CloseLook, Exclusion, PlanError, check_look, decode_exclusions
from trainwarden.signals import MOST_SOURCES, OTHER_SOURCES

from .vocabulary import TokenClasses

#: Port of local rank 0; each further rank of a host takes the next one.
BASE_PORT = 17070
LAST_PORT = 65535
#: Settings that are whole numbers with the least that each may be, and those that are True or False.
_WHOLE = (("cadence", 1), ("watch_steps", 0), ("max_series", 1), ("ring", 1), ("rotate_bytes", 1))
_SWITCHES = ("own_gradients", "protect_metrics", "side_group", "preflight")


@dataclass(frozen=True, slots=True)
class Settings:
    """How one exporter works.

    ``port``: None is 17070 + local rank, 0 any free port. ``folder`` holds all runs (default ``$TRAINWARDEN_DIR``, else
    ``./.trainwarden``). ``cadence``: the costly probes run every so many steps; ``watch_steps``: and at every step for so
    many steps after something looked odd. ``ring``: records kept in memory. ``rotate_bytes``: size at which a journal
    file is followed by the next. ``reader_seconds``: longest wait of a clean exit for whoever reads the records.
    ``own_gradients``: whether a rank's gradient is looked at before it is reduced over the ranks.
    ``total_steps``: optimizer steps of the whole run, where they are known; :mod:`exporter.preflight` looks at the warm-up by them,
    and ``preflight`` turns its checks off.
    ``sources``: names of the sources that batches say in numbers, from 0; these are on the page, too.
    ``anomaly``: ``(first_step, steps)`` that are looked at as closely as torch allows, see :mod:`exporter.anomaly`.
    ``protect_metrics`` asks the bearer token for ``/metrics`` and ``/-/…`` too. ``side_group``: the ranks add up what they see, in
    the background, and give a rank ``side_timeout`` seconds to answer. ``token_classes`` says which token ids are digits
    and padding, or is the tokenizer that says it; see :class:`exporter.vocabulary.TokenClasses`. ``hardware_seconds``: the GPU is
    asked how it is every so many seconds, 0 never. ``exclude`` is a file of data to leave out, as ``trainwarden incidents suspects``
    writes it; read when the exporter is made, it is the list of what it says.
    """

    run: str
    host: str = "127.0.0.1"
    port: int | None = None
    folder: Path | None = None
    roots: tuple[Path, ...] | None = None
    cadence: int = 10
    watch_steps: int = 50
    max_series: int = 1000
    ring: int = 4096
    rotate_bytes: int = 64 * 2**20
    reader_seconds: float = 3.0
    own_gradients: bool = True
    protect_metrics: bool = False
    side_group: bool = True
    side_timeout: float = 10.0
    hardware_seconds: float = 5.0
    total_steps: int | None = None
    preflight: bool = True
    token_classes: Any = None
    sources: tuple[str, ...] = ()
    anomaly: CloseLook | None = None
    exclude: Any = None

    def __post_init__(self) -> None:
        for name, least in _WHOLE:
            _check_whole(name, getattr(self, name), least)
        if self.total_steps is not None:
            _check_whole("total_steps", self.total_steps, 1, "; leave it out where it is not known")
        if self.port is not None:
            _check_whole("port", self.port, 0, f"; leave it out for {BASE_PORT} + local rank")
            if self.port > LAST_PORT:
                raise ValueError(f"port: {self.port} is above {LAST_PORT}")
        for name in ("reader_seconds", "side_timeout", "hardware_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise TypeError(f"{name}: {seconds!r} is not a number of seconds")
            if not 0 <= seconds < math.inf or (name == "side_timeout" and seconds == 0):
                raise ValueError(
                    f"{name}: {seconds!r} is not a {'positive ' if name == 'side_timeout' else ''}number of seconds"
                )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: {getattr(self, name)!r} is neither True nor False")
        if not isinstance(self.host, str):
            raise TypeError(f"host: {self.host!r} is not a string")
        object.__setattr__(self, "sources", source_names(self.sources))
        object.__setattr__(self, "anomaly", _close_look(self.anomaly))
        object.__setattr__(self, "exclude", left_out(self.exclude))
        if self.token_classes is not None and not isinstance(self.token_classes, TokenClasses):
            object.__setattr__(self, "token_classes", TokenClasses(self.token_classes))


def _check_whole(name: str, value: Any, least: int, hint: str = "") -> None:
    """Refuse what is no whole number, or a smaller one than ``least``.

    Raises:
        TypeError, ValueError: it is. The message names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is not a whole number{hint}")
    if value < least:
        raise ValueError(f"{name}: {value} is {'negative' if least == 0 else 'not positive'}{hint}")


def source_names(given: Any) -> tuple[str, ...]:
    """Return the names of sources as a tuple.

    Raises:
        TypeError, ValueError: they are no names, too many, or not one for each.
    """
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(name, str) and name for name in given)
    ):
        raise TypeError(f"sources: {given!r} is no sequence of names")
    names = tuple(given)
    if len(names) > MOST_SOURCES or len(set(names)) < len(names) or OTHER_SOURCES in names:
        raise ValueError(f"sources: give up to {MOST_SOURCES} different names, none of them {OTHER_SOURCES!r}")
    return names


def left_out(given: Any) -> tuple[Exclusion, ...]:
    """Return what a file of exclusions names, or the exclusions that are given themselves.

    Raises:
        TypeError, ValueError: the file cannot be read, or holds none. The message names it and the field.
    """
    if given is None:
        return ()
    if isinstance(given, str | os.PathLike):
        try:
            return tuple(decode_exclusions(Path(given).read_bytes(), str(given)))
        except OSError as error:
            raise ValueError(f"exclude: {given}: cannot be read: {error.strerror}") from None
        except PlanError as error:
            raise ValueError(
                f"exclude: {error}; such a file is written by `trainwarden incidents suspects --format plan`"
            ) from None
    if isinstance(given, Sequence) and all(isinstance(one, Exclusion) for one in given):
        return tuple(given)
    raise TypeError(f"exclude: {given!r} is no path of a file")


def _close_look(given: Any) -> CloseLook | None:
    """Return the setting ``anomaly``, a pair of whole numbers, as a close look.

    Raises:
        TypeError, ValueError: it is none.
    """
    if given is None or isinstance(given, CloseLook):
        return given
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise TypeError(f"anomaly: {given!r} is not (first_step, steps)")
    for name, value in zip(("first_step", "steps"), given, strict=True):
        _check_whole(f"anomaly {name}", value, 1)
    look = CloseLook(first_step=given[0], steps=given[1])
    check_look(look, "anomaly ")
    return look


def optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an exporter was given as a list.

    Raises:
        TypeError: one of them is none.
    """
    several = list(given) if isinstance(given, list | tuple) else [given]
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer")
    if not several:
        raise TypeError("optimizer: an empty sequence")
    return several


def disabled() -> bool:
    """Say whether ``TRAINWARDEN_DISABLE`` turns the exporter off."""
    return os.environ.get("TRAINWARDEN_DISABLE", "").strip().lower() not in ("", "0", "false", "no")
