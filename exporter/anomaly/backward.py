"""Each node of a backward pass: which was the first to make of finite gradients what is not finite.

The one function through which Python starts the engine is wrapped while somebody listens. Before a pass the graph is walked from its
roots, and each node is given a hook that takes note of what it was given and what it made. Nodes that add a gradient to its
parameter are left out: what they are given was made by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge

from trainwarden.exporter.hooks.replaced import Replaced, named_as

#: Under which a node's metadata say that it has its hook.
MARK = "trainwarden"


class Listener(Protocol):
    """Who wants to know. None of these may raise."""

    def backward(self, roots: list[Any], gradients: Any) -> None:
        """The engine is about to start from ``roots``, with ``gradients`` coming in."""

    def backward_over(self, error: BaseException | None) -> None:
        """The engine is done, or an exception comes out of it."""


_replaced = Replaced()
_listeners: list[Any] = []


def listen(listener: Listener) -> None:
    """Tell ``listener`` of every backward pass from now on."""
    _listeners.append(listener)
    if not _replaced.on:
        _replaced.put(torch.autograd, "_engine_run_backward", _engine)


def forget(listener: Listener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _replaced.give_back()


def _engine(run: Any) -> Any:
    def watched_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        telling = list(_listeners)
        for listener in telling:
            listener.backward(list(t_outputs), args[0] if args else None)
        try:
            answer = run(t_outputs, *args, **kwargs)
        except BaseException as error:
            for listener in telling:
                listener.backward_over(error)
            raise
        for listener in telling:
            listener.backward_over(None)
        return answer

    return named_as(watched_run_backward, run)


def node_of(root: Any) -> Any:
    """Return the node that a root of a backward pass begins at, or None."""
    return root.node if isinstance(root, GradientEdge) else root.grad_fn


def unhooked(roots: list[Any], step: int, most: int) -> Iterator[Any]:
    """Yield the nodes that lead to the roots, ``most`` of them, that have no hook of this step yet, and mark them. No order is promised."""
    waiting = [node for node in map(node_of, roots) if node is not None]
    met = set(waiting)
    while waiting and len(met) <= most:
        node = waiting.pop()
        if node.name().endswith("AccumulateGrad"):
            continue
        if node.metadata.get(MARK) != step:
            node.metadata[MARK] = step
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                waiting.append(following)
