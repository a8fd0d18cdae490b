"""Parameters, moments and the intended update, in one pass over memory.

Parameters and both moments are the largest things a step reads; reading them once for four series is half the cost of this
room. On a CPU the pass goes block by block through the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainwarden.exporter.intended import (
    adam_directions,
    adam_factors,
    adam_squares,
    has_factors,
    is_adam,
    is_known,
    is_sgd,
    moments_of,
    sgd_update,
    shares,
)
from trainwarden.exporter.measure import (
    DEVICE_BLOCK,
    HOST_ALONE,
    HOST_BLOCK,
    SMALL,
    accumulation,
    blocks,
    end_to_end,
    full_precision,
    norms_of,
    segment_sums,
    segments,
)
from trainwarden.exporter.probes.probe import Probe, Shares, Totals, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched, as_numbers
from trainwarden.record import Value
from trainwarden.signals import GROUPS, MOMENTS

#: Numbers of blocks and the parameters that the blocks are of, by device and what the numbers are.
Found = dict[tuple[torch.device, str], tuple[list[int], list[Tensor]]]
#: Square and number of elements by group.
Sums = Mapping[str, tuple[float, float]]
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(slots=True)
class _Chunk:
    """Blocks of one device and one parameter group that are worked on together.

    On a CPU small tensors are ``packed``: they are laid end to end, and what is made of them is summed piece by piece. Then
    ``epsilons`` has one number for each.
    """

    device: torch.device
    packed: bool = False
    size: int = 0
    numbers: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    lists: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, index: int, size: int, parts: dict[str, Tensor]) -> None:
        self.size += size
        self.indices.append(index)
        for name, tensor in parts.items():
            self.lists.setdefault(name, []).append(tensor)

    def put(self, found: Found, name: str, numbers: Tensor) -> None:
        """Note a number of each block."""
        indices, known = found.setdefault((self.device, name), ([], []))
        indices.extend(self.indices)
        known.append(numbers)


class OptimizerState(Probe):
    """Signals ``weight_rms``, ``moment_rms``, ``update_ratio`` and ``update_share`` by group, of the parameters that were updated.

    Weights are those after the update. The intended update of an optimizer that is not torch's Adam, AdamW or SGD is absent, and
    with it the ratio of the groups that have a parameter of it; that of a skipped step is zero.
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
    whole = ("weight_rms", "moment_rms", "update_ratio", "update_share")

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._last_groups: dict[str, float] = {}
        self._scratch: Tensor | None = None

    def after(self, update: Update) -> None:
        """Go through parameters and state once."""
        found: Found = {}
        reach = self._watched.reach
        wide = {name: reach.wide(name) for name in ("weight", "update", *MOMENTS)}
        place = {id(parameter): at for at, parameter in enumerate(update.params)}
        for group in update.optimizer.param_groups:
            members = [(place[id(parameter)], parameter) for parameter in group["params"] if id(parameter) in place]
            for chunk in _chunks(update, group, members):
                if chunk.device.type == "cpu" and not chunk.packed and self._scratch is None:
                    self._scratch = torch.empty(HOST_BLOCK)
                scratch = self._scratch if chunk.device.type == "cpu" else None
                sgd = is_sgd(update.optimizer)
                seen = _look_packed(chunk, group, sgd) if chunk.packed else _look(chunk, group, sgd, wide, scratch)
                for name, numbers in seen:
                    chunk.put(found, name, numbers)
        for (_, name), (indices, numbers_of) in found.items():
            entry, _, moment = name.partition(".")
            update.sheet.add(entry, torch.cat(numbers_of), (moment, np.array(indices, dtype=np.int64)))
        if not is_known(update.optimizer):
            update.sheet.host["update_unknown"] = True
        which = np.array(update.indices, dtype=np.int64)
        update.sheet.host.setdefault("updated", []).append((id(update.optimizer), which))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the root mean squares, the ratio and the shares."""
        if self._watched.split:
            return {}
        sums = {}
        for name, (indices, squares) in self._squares(reading).items():
            by_group, sizes = self._watched.group_sums(indices, squares), self._watched.group_sizes(indices)
            sums[name] = {group: (square, sizes[group]) for group, square in by_group.items()}
        return self._signals(reading, sums)

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
        sums = {
            name: {
                group: (totals[f"{name}_square.{group}"], totals[f"{name}_elements.{group}"])
                for group in GROUPS
                if totals[f"{name}_elements.{group}"] > 0
            }
            for name in ("weight", *MOMENTS, "update")
        }
        return self._signals(reading, sums)

    def _signals(self, reading: Reading, sums: Mapping[str, Sums]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        weights, updates = sums.get("weight", {}), sums.get("update", {})
        if weights:
            found["weight_rms"] = {group: _root_mean(weights[group]) for group in weights}
        moments: dict[str, Value] = {
            moment: {group: _root_mean(of_group) for group, of_group in sums[moment].items()}
            for moment in MOMENTS
            if sums.get(moment)
        }
        if moments:
            found["moment_rms"] = moments
        whole = {group: _root_mean(updates[group]) for group in updates if _as_many(updates[group], weights.get(group))}
        if whole:
            self._last_groups = dict.fromkeys(whole, 0.0)
        if reading.skipped and reading.due and not whole and self._last_groups:
            found["update_ratio"] = dict(self._last_groups)
        elif whole:
            ratios = {group: (whole[group], _root_mean(weights[group])) for group in whole}
            found["update_ratio"] = {
                group: update / weight for group, (update, weight) in ratios.items() if weight != 0
            }
        if not reading.host.get("update_unknown"):
            portions = shares({group: square for group, (square, _) in updates.items()})
            if portions:
                found["update_share"] = dict(portions)
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
                indices, norms = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
                found[name] = indices, self._square(name, indices, norms)
        updates = self._updates(reading)
        if updates is not None:
            found["update"] = updates
        return found

    def _square(self, name: str, indices: np.ndarray, norms: np.ndarray) -> np.ndarray:
        self._watched.reach.saw(name, norms, self._watched.sizes_of(indices))
        with np.errstate(over="ignore"):
            squares: np.ndarray = norms**2
            return squares

    def _updates(self, reading: Reading) -> tuple[np.ndarray, np.ndarray] | None:
        """Return parameters and the squares of their intended updates; zero where a GradScaler skipped them."""
        indices, squares = [], []
        for (_, which), values in reading.pieces("update_norms"):
            indices.append(which)
            squares.append(self._square("update", which, values))
        if "direction_norms" in reading.values:
            rates, decays = self._by_parameter(reading, "adam_rates"), self._by_parameter(reading, "adam_decays")
            for which, decay in reading.host.get("adam_decays", ()):
                decays[which] = decay
            directions = self._by_parameter(reading, "direction_norms", square=True)
            products = self._by_parameter(reading, "direction_products")
            weights = self._by_parameter(reading, "weight_norms", square=True)
            which = np.unique(np.concatenate([which for (_, which), _ in reading.pieces("direction_norms")]))
            self._watched.reach.saw("update", np.sqrt(directions[which]), self._watched.sizes_of(which))
            indices.append(which)
            with np.errstate(over="ignore", invalid="ignore"):
                squares.append(
                    adam_squares(directions[which], products[which], weights[which], rates[which], decays[which])
                )
        if not indices:
            return None
        of_whom, all_squares = np.concatenate(indices), np.concatenate(squares)
        skipped = [which for optimizer, which in reading.host.get("updated", ()) if optimizer in reading.skipped_by]
        if skipped:  # a fused optimizer tells its hooks of a step that it did not make
            all_squares[np.isin(of_whom, np.concatenate(skipped))] = 0.0
        return of_whom, all_squares

    def _by_parameter(self, reading: Reading, entry: str, square: bool = False) -> np.ndarray:
        """Sum an entry's numbers, or their squares, by parameter; 0 where there are none."""
        found = np.zeros(len(self._watched))
        with np.errstate(over="ignore"):
            for (_, which), values in reading.pieces(entry):
                np.add.at(found, which, values**2 if square else values)
        return found


def _look(
    chunk: _Chunk, group: dict[str, Any], sgd: bool, wide: Mapping[str, bool], scratch: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is measured of a chunk by its name, a number for each block."""
    lists = chunk.lists
    yield "weight_norms", norms_of(lists["param"], wide["weight"])
    for moment in MOMENTS:
        if moment in lists:
            yield f"moment_norms.{moment}", norms_of(lists[moment], wide[moment])
    if "epsilon" in lists and lists.keys() >= set(MOMENTS):
        second = lists["max_exp_avg_sq"] if group["amsgrad"] else lists["exp_avg_sq"]
        directions = adam_directions(lists["exp_avg"], second, lists["epsilon"], scratch)
        pairs = zip(directions, full_precision(lists["param"]), strict=True)
        yield "direction_products", torch.stack([torch.dot(direction, param) for direction, param in pairs])
        yield "direction_norms", norms_of(directions, wide["update"])
    elif sgd:
        buffers = lists.get("momentum_buffer") if group["momentum"] else None
        yield (
            "update_norms",
            norms_of(sgd_update(group, lists["param"], lists.get("grad", []), buffers), wide["update"]),
        )


def _look_packed(chunk: _Chunk, group: dict[str, Any], sgd: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the same of small tensors on a CPU, in as many calls however many they are. Sums are in float64."""
    sizes = [tensor.numel() for tensor in chunk.lists["param"]]
    of = segments(sizes)
    laid = {name: end_to_end(tensors) for name, tensors in chunk.lists.items() if name != "epsilon"}
    whole = {name: elements.to(accumulation(elements)) for name, elements in laid.items()}

    def norm(elements: Tensor) -> Tensor:
        return segment_sums(elements.double().square(), sizes, of).sqrt_()

    yield "weight_norms", norm(whole["param"])
    for moment in MOMENTS:
        if moment in whole:
            yield f"moment_norms.{moment}", norm(whole[moment])
    if "epsilon" in chunk.lists and whole.keys() >= set(MOMENTS):
        second = whole["max_exp_avg_sq"] if group["amsgrad"] else whole["exp_avg_sq"]
        (epsilons,) = chunk.lists["epsilon"]
        directions = whole["exp_avg"] / second.sqrt().add_(epsilons[torch.tensor(chunk.numbers)][of])
        yield "direction_products", segment_sums(directions.double() * whole["param"], sizes, of)
        yield "direction_norms", norm(directions)
    elif sgd:
        gradients = [whole["grad"]] if "grad" in whole else []
        buffers = [whole["momentum_buffer"]] if group["momentum"] and "momentum_buffer" in whole else None
        (moved,) = sgd_update(group, [whole["param"]], gradients, buffers)
        yield "update_norms", norm(moved)


def _root_mean(of_group: tuple[float, float]) -> float:
    square, elements = of_group
    return math.sqrt(square / elements) if square >= 0 else math.nan


def _as_many(some: tuple[float, float], others: tuple[float, float] | None) -> bool:
    """Say whether two sums are over as many elements: an update of a part says nothing of the whole."""
    return others is not None and abs(some[1] - others[1]) < 0.5


def _chunks(update: Update, group: dict[str, Any], members: list[tuple[int, Tensor]]) -> Iterator[_Chunk]:
    """Yield the blocks of a parameter group, and of the state that goes with them, in bounded chunks."""
    states = [update.optimizer.state.get(parameter, {}) for _, parameter in members]
    adam = bool(states) and is_adam(update.optimizer) and all("exp_avg_sq" in state for state in states)
    adam = adam and has_factors(group, [state["step"] for state in states])
    epsilons: Tensor | None = None
    by_number: Sequence[Tensor] = ()
    if adam:
        rates, epsilons, decay = adam_factors(update.optimizer, group, [state["step"] for state in states])
        which = np.array([update.indices[at] for at, _ in members], dtype=np.int64)
        update.sheet.add("adam_rates", rates, ("", which))
        if isinstance(decay, torch.Tensor):
            update.sheet.add("adam_decays", decay.expand(len(which)), ("", which))
        else:
            update.sheet.host.setdefault("adam_decays", []).append((which, decay))
    names = _needed(update, group, states, adam)
    open_chunks: dict[tuple[Any, ...], _Chunk] = {}
    for number, ((at, parameter), state) in enumerate(zip(members, states, strict=True)):
        own = as_numbers(parameter)
        tensors = {"param": own}
        for name in names:
            value = _usable(update.gradients[at] if name == "grad" else state.get(name), own)
            if value is not None:
                tensors[name] = value
        device, host = own.device, own.device.type == "cpu"
        small = host and own.numel() <= SMALL
        key = (device, own.dtype, small, *tensors)
        limit = HOST_BLOCK if host else DEVICE_BLOCK
        if epsilons is not None and not small and not by_number:
            by_number = epsilons.unbind()
        for parts in (tensors,) if small else blocks(tensors):
            size = parts["param"].numel()
            if epsilons is not None and not small:
                parts["epsilon"] = by_number[number]
            if host and size >= HOST_ALONE:
                alone = _Chunk(device)
                alone.add(update.indices[at], size, parts)
                yield alone
                continue
            chunk = open_chunks.get(key)
            if chunk is not None and chunk.size + size > limit:
                yield open_chunks.pop(key)
                chunk = None
            if chunk is None:
                chunk = open_chunks[key] = _Chunk(device, packed=small)
                if epsilons is not None and small:
                    chunk.lists["epsilon"] = [epsilons]
            chunk.numbers.append(number)
            chunk.add(update.indices[at], size, parts)
    yield from open_chunks.values()


def _usable(value: Any, parameter: Tensor) -> Tensor | None:
    """Return a state as this rank has it if it is numbers, one for each of the parameter's: not codes of eight bits, nor rows and columns."""
    if not isinstance(value, torch.Tensor):
        return None
    own = as_numbers(value)
    usable = (
        type(own) in _PLAIN
        and own.is_floating_point()
        and own.shape == parameter.shape
        and own.device == parameter.device
    )
    return own if usable else None


def _needed(update: Update, group: dict[str, Any], states: list[Any], adam: bool) -> tuple[str, ...]:
    """Return what is read beside the parameters, by its name in the optimizer's state."""
    if is_sgd(update.optimizer):
        momentum = ("momentum_buffer",) if group["momentum"] else ()
        return momentum if momentum and not group["nesterov"] else ("grad", *momentum)
    names = moments_of(update.optimizer, states)
    return (*names, "max_exp_avg_sq") if adam and group["amsgrad"] else names
