"""Parameters, moments and the intended update, in one pass over memory.

Parameters and both moments are the largest things a step reads; reading them once for three series is half the cost of this
room. On a CPU the pass goes block by block through the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwarden.exporter.intended import (
    adam_directions,
    adam_factors,
    adam_squares,
    has_factors,
    is_adam,
    is_known,
    is_sgd,
    sgd_update,
)
from trainwarden.exporter.measure import DEVICE_BLOCK, HOST_ALONE, HOST_BLOCK, blocks, foreach_norm, full_precision
from trainwarden.exporter.probes.probe import Probe, Shares, Totals, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched, local
from trainwarden.record import Value
from trainwarden.signals import GROUPS, MOMENTS

#: Numbers of blocks and the parameters that the blocks are of, by device and what the numbers are.
Found = dict[tuple[torch.device, str], tuple[list[int], list[Tensor]]]


@dataclass(slots=True)
class _Chunk:
    """Blocks of one device and one parameter group that are worked on together."""

    device: torch.device
    size: int = 0
    indices: list[int] = field(default_factory=list)
    lists: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, index: int, size: int, parts: dict[str, Tensor]) -> None:
        self.size += size
        self.indices.append(index)
        for name, tensor in parts.items():
            self.lists.setdefault(name, []).append(tensor)

    def put(self, found: Found, name: str, numbers: list[Tensor]) -> None:
        """Note a number of each block."""
        indices, known = found.setdefault((self.device, name), ([], []))
        indices.extend(self.indices)
        known.extend(numbers)


class OptimizerState(Probe):
    """Signals ``weight_rms``, ``moment_rms`` and ``update_ratio`` by group, of the parameters that were updated.

    Weights are those after the update. The intended update of an optimizer that is not torch's Adam, AdamW or SGD is absent;
    that of a skipped step is zero.
    """

    name = "optimizer_state"
    costly = True
    summed = (
        "weight_square",
        "weight_elements",
        *(f"{moment}_{what}" for moment in MOMENTS for what in ("square", "elements")),
        "update_square",
        "update_elements",
    )

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._last_groups: dict[str, float] = {}

    def after(self, update: Update) -> None:
        """Go through parameters and state once."""
        found: Found = {}
        place = {id(parameter): at for at, parameter in enumerate(update.params)}
        for group in update.optimizer.param_groups:
            members = [(place[id(parameter)], parameter) for parameter in group["params"] if id(parameter) in place]
            for chunk in _chunks(update, group, members):
                lists = chunk.lists
                results = {"weight_norms": lists["param"]}
                if "exp_avg" in lists:
                    results["moment_norms.exp_avg"] = lists["exp_avg"]
                    results["moment_norms.exp_avg_sq"] = lists["exp_avg_sq"]
                if "epsilon" in lists and "exp_avg" in lists:
                    second = lists["max_exp_avg_sq"] if group["amsgrad"] else lists["exp_avg_sq"]
                    directions = adam_directions(lists["exp_avg"], second, lists["epsilon"])
                    results["direction_norms"] = directions
                    pairs = zip(directions, full_precision(lists["param"]), strict=True)
                    chunk.put(found, "direction_products", [torch.dot(direction, param) for direction, param in pairs])
                elif is_sgd(update.optimizer):
                    buffers = lists.get("momentum_buffer") if group["momentum"] else None
                    results["update_norms"] = sgd_update(group, lists["param"], lists.get("grad", []), buffers)
                for name, tensors in results.items():
                    chunk.put(found, name, foreach_norm(tensors))
        for (_, name), (indices, norms) in found.items():
            entry, _, moment = name.partition(".")
            update.sheet.add(entry, torch.stack(norms), (moment, np.array(indices, dtype=np.int64)))
        if is_known(update.optimizer):
            update.sheet.host["update_known"] = True

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the root mean squares and the ratio."""
        if self._watched.split:
            return {}
        means = {name: self._root_mean(*squares) for name, squares in self._squares(reading).items()}
        return self._signals(reading, means)

    def shares(self, reading: Reading) -> Shares | None:
        """Return this rank's squares, of how many elements each."""
        if not (self._watched.summable and reading.measured):
            return None
        found = {}
        for name, (indices, squares) in self._squares(reading).items():
            unique = np.unique(indices)
            found[f"{name}_square"] = self._watched.group_shares(indices, squares)
            found[f"{name}_elements"] = self._watched.group_shares(unique, self._watched.sizes_of(unique))
        return found

    def joined(self, reading: Reading, totals: Totals) -> dict[str, Value]:
        """Return the same over all ranks."""
        means = {
            name: {
                group: _root(totals[f"{name}_square.{group}"] / totals[f"{name}_elements.{group}"])
                for group in GROUPS
                if totals[f"{name}_elements.{group}"] > 0
            }
            for name in ("weight", *MOMENTS, "update")
        }
        return self._signals(reading, means)

    def _signals(self, reading: Reading, means: dict[str, dict[str, float]]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        weights, updates = means.get("weight", {}), means.get("update", {})
        if weights:
            found["weight_rms"] = dict(weights)
        moments: dict[str, Value] = {moment: dict(means[moment]) for moment in MOMENTS if means.get(moment)}
        if moments:
            found["moment_rms"] = moments
        if updates:
            self._last_groups = dict.fromkeys(updates, 0.0)
        if reading.skipped and reading.due and self._last_groups:
            found["update_ratio"] = dict(self._last_groups)
        elif updates:
            found["update_ratio"] = {
                group: updates[group] / weights[group] for group in updates if weights.get(group, 0.0) != 0.0
            }
        return found

    def _squares(self, reading: Reading) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return, of what was measured, parameters and the squares of their norms."""
        found = {}
        for name, entry, moment in (
            ("weight", "weight_norms", ""),
            *((each, "moment_norms", each) for each in MOMENTS),
        ):
            pieces = [(which, values) for (known, which), values in reading.pieces(entry) if known == moment]
            if pieces:
                norms = np.concatenate([values for _, values in pieces])
                found[name] = np.concatenate([which for which, _ in pieces]), norms**2
        updates = self._updates(reading)
        if updates is not None:
            found["update"] = updates
        return found

    def _updates(self, reading: Reading) -> tuple[np.ndarray, np.ndarray] | None:
        """Return parameters and the squares of their intended updates."""
        indices, squares = [], []
        for (_, which), values in reading.pieces("update_norms"):
            indices.append(which)
            squares.append(values**2)
        rates, decays = self._by_parameter(reading, "adam_rates"), self._by_parameter(reading, "adam_decays")
        for which, decay in reading.host.get("adam_decays", ()):
            decays[which] = decay
        directions = self._by_parameter(reading, "direction_norms", square=True)
        if directions.any() or "direction_norms" in reading.values:
            products = self._by_parameter(reading, "direction_products")
            weights = self._by_parameter(reading, "weight_norms", square=True)
            which = np.unique(np.concatenate([which for (_, which), _ in reading.pieces("direction_norms")]))
            indices.append(which)
            squares.append(
                adam_squares(directions[which], products[which], weights[which], rates[which], decays[which])
            )
        return (np.concatenate(indices), np.concatenate(squares)) if indices else None

    def _by_parameter(self, reading: Reading, entry: str, square: bool = False) -> np.ndarray:
        """Sum an entry's numbers, or their squares, by parameter; 0 where there are none."""
        found = np.zeros(len(self._watched))
        for (_, which), values in reading.pieces(entry):
            np.add.at(found, which, values**2 if square else values)
        return found

    def _root_mean(self, indices: np.ndarray, squares: np.ndarray) -> dict[str, float]:
        sums = self._watched.group_sums(indices, squares)
        sizes = self._watched.group_sizes(indices)
        return {group: _root(sums[group] / sizes[group]) for group in sums}


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _chunks(update: Update, group: dict[str, Any], members: list[tuple[int, Tensor]]) -> Iterator[_Chunk]:
    """Yield the blocks of a parameter group, and of the state that goes with them, in bounded chunks."""
    states = [update.optimizer.state.get(parameter, {}) for _, parameter in members]
    adam = bool(states) and is_adam(update.optimizer) and all("exp_avg_sq" in state for state in states)
    adam = adam and has_factors(group, [state["step"] for state in states])
    epsilons: list[Tensor] = []
    if adam:
        rates, epsilons, decay = adam_factors(update.optimizer, group, [state["step"] for state in states])
        which = np.array([update.indices[at] for at, _ in members], dtype=np.int64)
        update.sheet.add("adam_rates", rates, ("", which))
        if isinstance(decay, torch.Tensor):
            update.sheet.add("adam_decays", decay.expand(len(which)), ("", which))
        else:
            update.sheet.host.setdefault("adam_decays", []).append((which, decay))
    names = _needed(update, group, adam)
    open_chunks: dict[tuple[torch.device, torch.dtype, frozenset[str]], _Chunk] = {}
    for number, ((at, parameter), state) in enumerate(zip(members, states, strict=True)):
        tensors = {"param": local(parameter)}
        for name in names:
            value = update.gradients[at] if name == "grad" else state.get(name)
            if isinstance(value, torch.Tensor) and local(value).shape == tensors["param"].shape:
                tensors[name] = local(value)
        device = tensors["param"].device
        key = (device, tensors["param"].dtype, frozenset(tensors))
        cut = {name: blocks(tensor) for name, tensor in tensors.items()}
        limit = HOST_BLOCK if device.type == "cpu" else DEVICE_BLOCK
        for piece in range(len(cut["param"])):
            parts = {name: flat[piece] for name, flat in cut.items()}
            if adam:
                parts["epsilon"] = epsilons[number]
            size = parts["param"].numel()
            if device.type == "cpu" and size >= HOST_ALONE:
                alone = _Chunk(device)
                alone.add(update.indices[at], size, parts)
                yield alone
                continue
            chunk = open_chunks.setdefault(key, _Chunk(device))
            chunk.add(update.indices[at], size, parts)
            if chunk.size >= limit:
                yield open_chunks.pop(key)
    yield from open_chunks.values()


def _needed(update: Update, group: dict[str, Any], adam: bool) -> tuple[str, ...]:
    """Return what is read beside the parameters, by its name in the optimizer's state."""
    if is_sgd(update.optimizer):
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return momentum if momentum and not group["nesterov"] else ("grad", *momentum)
    return (*MOMENTS, "max_exp_avg_sq") if adam and group["amsgrad"] else MOMENTS
