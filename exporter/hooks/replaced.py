"""Functions and methods of others' that are given a wrapper of ours while somebody listens, and given back when nobody does.

Where somebody else has put a wrapper of his own around ours in the meantime, his stays, and so does ours inside of it: it
tells nobody then, and is not put there a second time when somebody listens again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

Wrapper = TypeVar("Wrapper")


class Replaced:
    """What one kind of hook has replaced. ``on`` says that it has, and was not asked to give back since."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, Any, Any]] = []
        self._kept: set[tuple[int, str]] = set()
        self.on = False

    def __len__(self) -> int:
        return len(self._all)

    def put(self, owner: type[Any] | ModuleType, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace what a class or a module has under ``name`` itself by ``wrap`` of it."""
        self.on = True
        if (id(owner), name) not in self._kept:
            original = vars(owner)[name]
            wrapper = wrap(original)
            _set(owner, name, wrapper)
            self._all.append((owner, name, original, wrapper))

    def put_everywhere(self, wrappers: Mapping[int, Any]) -> None:
        """Replace functions by their wrappers, given by the functions' ``id``, wherever a loaded module has one as a global."""
        for module in list(sys.modules.values()):
            space = getattr(module, "__dict__", None) if isinstance(module, ModuleType) else None
            for name, value in () if space is None else list(space.items()):
                if id(value) in wrappers:
                    self.put(module, name, lambda original: wrappers[id(original)])

    def give_back(self) -> list[Any]:
        """Put back what was there, and return the wrappers that are called no more."""
        self.on = False
        kept, returned = [], []
        for owner, name, original, wrapper in reversed(self._all):
            if vars(owner).get(name) is wrapper:
                _set(owner, name, original)
                returned.append(wrapper)
            else:
                kept.append((owner, name, original, wrapper))
        self._all = kept[::-1]
        self._kept = {(id(owner), name) for owner, name, _, _ in kept}
        return returned


def named_as(wrapper: Wrapper, original: Any, module: str | None = None) -> Wrapper:
    """Give a wrapper the name of what it stands for: whoever kept it (a model's activation) is pickled as he would be without it.

    ``module`` is where it is found under that name, where that is not where the original is from. Returns the wrapper.
    """
    named: Any = wrapper
    named.__doc__, named.__name__, named.__qualname__ = original.__doc__, original.__name__, original.__qualname__
    named.__module__ = original.__module__ if module is None else module
    return wrapper


def go_through(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Have a method of this one object go through ``around``, which is given the method first; return what undoes that.

    Raises:
        AttributeError: the object has no such method.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def mine(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    def undo() -> None:
        if vars(owner).get(name) is mine:
            delattr(owner, name)

    setattr(owner, name, mine)
    return undo


def _set(owner: type[Any] | ModuleType, name: str, value: Any) -> None:
    if isinstance(owner, ModuleType):
        vars(owner)[name] = value  # some modules refuse to be written to
    else:
        setattr(owner, name, value)
