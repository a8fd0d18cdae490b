"""TensorBoard: what a script writes with a ``SummaryWriter``, torch's or tensorboardX's, is also told to whoever listens.

The libraries are not imported here: each is followed once the script has. It is given what it was given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


def listen(tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Call ``tell`` with all scalars that are written from now on. Does nothing for writers not loaded, or followed already."""
    for name in MODULES:
        kind = getattr(sys.modules.get(name), "SummaryWriter", None)
        if kind is not None and not hasattr(getattr(kind, "add_scalar", None), "followed"):
            kind.add_scalar = _followed(kind.add_scalar, lambda tag, value: tell({tag: value}))
            kind.add_scalars = _followed(kind.add_scalars, lambda tag, values: _several(tell, tag, values))


def _several(tell: Callable[[Mapping[str, Any]], None], tag: str, values: Any) -> None:
    if isinstance(values, Mapping):
        tell({f"{tag}/{name}": value for name, value in values.items()})


def _followed(original: Callable[..., Any], tell: Callable[[str, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [
            *args,
            *(kwargs[name] for name in ("main_tag", "tag", "scalar_value", "tag_scalar_dict") if name in kwargs),
        ]
        if len(given) >= 2 and isinstance(given[0], str):
            tell(given[0], given[1])
        return original(self, *args, **kwargs)

    followed.followed = True  # type: ignore[attr-defined]
    return followed
