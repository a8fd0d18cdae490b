"""Finds, in a process that said nothing, the optimizers that train and the module whose parameters they hold.

It looks once through the objects that Python's garbage collector knows, at types and references alone; no value is read and nothing is called
that an object could have overridden but ``parameters()`` of modules.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: More optimizers than this are no training loop's: some make one for each parameter and step it in the backward pass.
MOST_OPTIMIZERS = 16


class Unknown(nn.Module):
    """Stands for a model that no module was found for."""


class Several(nn.Module):
    """Stands for models that train together and have no module in common."""


@dataclass(slots=True)
class Found:
    """``model`` owns what ``optimizers`` train; ``called`` are the modules that may be called with a batch, outermost first."""

    optimizers: list[torch.optim.Optimizer]
    model: nn.Module
    called: list[nn.Module]


def objects(kind: type) -> list[Any]:
    """Return the live objects of a type: those that the collector tracks, and those that the script's own names hold."""
    main = vars(sys.modules["__main__"]).values() if "__main__" in sys.modules else ()
    found = {id(one): one for one in (*gc.get_objects(), *main) if issubclass(type(one), kind)}
    return list(found.values())


def holds(optimizer: torch.optim.Optimizer, others: Container[int]) -> bool:
    """Say whether an optimizer holds one of ``others`` (their ids) and has it step: its own step is that one's."""
    for value in vars(optimizer).values():
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        if any(id(one) in others and one is not optimizer for one in inner):
            return True
    return False


def params_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""
    return {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}


def find(stepping: torch.optim.Optimizer) -> Found:
    """Return what trains in this process. ``stepping`` is an optimizer that is about to step.

    Raises:
        LookupError: there is no training loop that could be followed; the message says why.
    """
    gc.collect()  # what only waits to be collected trains nothing
    alive = [one for one in objects(torch.optim.Optimizer) if "param_groups" in vars(one)]
    alive = [one for one in alive if one is stepping or "_optimizer_step_pre_hooks" in vars(one)]
    known = {id(one) for one in alive}
    optimizers = [one for one in alive if params_of(one) and not holds(one, known)]
    if len(optimizers) > MOST_OPTIMIZERS:
        raise LookupError(
            f"{len(optimizers)} optimizers, more than {MOST_OPTIMIZERS}: no step of the training can be told"
        )
    if not any(one is stepping for one in optimizers) and not holds(stepping, known):
        raise LookupError(f"{type(stepping).__name__} trains nothing")
    wanted = set().union(*map(params_of, optimizers))
    roots = _roots(wanted)
    chosen = _cover(wanted, roots)
    if not chosen:
        return Found(optimizers, Unknown(), [])
    places: dict[int, int] = {}
    for root in chosen:
        for parameter in root.parameters():
            places.setdefault(id(parameter), len(places))
    # In the model's order, the same on every rank: learning rates are named by it.
    optimizers.sort(key=lambda one: min(places.get(parameter, len(places)) for parameter in params_of(one)))
    called = [module for root in chosen for module in _called(root, wanted & roots[id(root)][1])]
    if len(chosen) == 1:
        return Found(optimizers, chosen[0], called)
    model = Several()
    for root in chosen:
        name = type(root).__name__.lower()
        while name in model._modules or hasattr(model, name):
            name += "_"
        model.add_module(name, root)
    return Found(optimizers, model, called)


def _roots(wanted: set[int]) -> dict[int, tuple[nn.Module, set[int]]]:
    """Return the modules that no other module holds and that own something wanted, with the ids of their parameters."""
    modules = [one for one in objects(nn.Module) if "_modules" in vars(one)]
    held = {id(child) for one in modules for child in vars(one)["_modules"].values() if child is not None}
    found = {}
    for module in modules:
        if id(module) not in held:
            try:
                owned = {id(parameter) for parameter in module.parameters()}
            except Exception:  # one that is still being made, or was taken apart: it is not what trains
                continue
            if owned & wanted:
                found[id(module)] = (module, owned)
    return found


def _cover(wanted: set[int], roots: dict[int, tuple[nn.Module, set[int]]]) -> list[nn.Module]:
    """Return few roots that own what is wanted: those that own most of it, and of those that own the same the smallest."""
    chosen, left = [], set(wanted)
    while left:
        best = max(roots.values(), key=lambda root: (len(root[1] & left), -len(root[1]), _wraps(root[0])), default=None)
        if best is None or not best[1] & left:
            break  # parameters without a module
        chosen.append(best[0])
        left -= best[1]
    return chosen


def _wraps(module: nn.Module) -> bool:
    """Say whether a module hands its call on to another one that has all its parameters."""
    return sum(child is not None for child in vars(module)["_modules"].values()) == 1


def _called(root: nn.Module, wanted: set[int]) -> list[nn.Module]:
    """Return ``root`` and the modules in it that own all that is wanted, from outside to inside.

    It ends at a compiled one: what is called inside is not called any more, or would have to be compiled again.
    """
    found: list[nn.Module] = []
    module: nn.Module | None = root
    while module is not None and not isinstance(module, torch.jit.ScriptModule):
        if getattr(module, "_compiled_call_impl", None) is not None:
            break
        found.append(module)
        if type(module).__name__ == "OptimizedModule":
            break
        module = next(
            (child for child in module.children() if wanted <= {id(parameter) for parameter in child.parameters()}),
            None,
        )
    return found
