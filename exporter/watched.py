"""The parameters that are watched: an index, a name, a group and a size for each, and the local part of sharded tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from trainwarden.signals import GROUPS

from .copies import mesh_size, opaque, parts, signature
from .groups import group_of
from .measure import DEVICE_BLOCK, Reach

_PLAIN = (torch.Tensor, nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: the shard of a DTensor, else the tensor itself. No collective is issued."""
    if type(tensor) in _PLAIN:
        return tensor
    shard: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def as_numbers(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor as real numbers: two for each that is complex, as optimizers go through them, too."""
    own = local(tensor)
    return torch.view_as_real(own.resolve_conj()) if own.is_complex() and own.layout is torch.strided else own


def is_sharded(tensor: Tensor) -> bool:
    """Say whether other ranks hold other parts of this tensor (a DTensor)."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "_local_tensor")


@dataclass(frozen=True, slots=True)
class Told:
    """What a trainer tells of the tensors that its optimizers update, where torch's own marks do not.

    ``stand_ins`` are pairs (tensor, parameter): an optimizer updates the tensor, a copy in higher precision or a part, in the place of
    the model's parameter. ``weights`` are pairs (tensor, how often what this rank measures of it counts in a sum over all ranks):
    1 / n where n ranks hold the same, 0 where it counts on another rank; None where placements tell that. ``untold`` is the
    sentence why nothing tells it.
    """

    stand_ins: Sequence[tuple[Tensor, Tensor]] = ()
    weights: Sequence[tuple[Tensor, float]] | None = None
    untold: str | None = None


class Watched:
    """Numbers the parameters from 0, in the model's order; those of the optimizers that the model lacks come after."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], told: Told | None = None) -> None:
        told = told or Told()
        self._index: dict[int, int] = {}
        self.params: list[Tensor] = []
        self.names: list[str] = []
        self._groups: list[int] = []
        self._sizes: list[int] = []
        self._parts: list[float] = []
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None
        self.vocabulary: int | None = None
        #: In which type the squares of each quantity are summed.
        self.reach = Reach()
        #: Why it cannot be told which rank holds what of the parameters, None where their placements tell.
        self.untold: str | None = opaque(model) or told.untold
        #: Whether the trainer says what counts how often: ranks hold different things under one name then.
        self.weighed = told.weights is not None
        #: Whether a rank holds a part of what is trained: what it measures alone is not global.
        self.split = self.untold is not None or self.weighed
        #: The numbers of tensors that stand in for parameters, each with that parameter's.
        self.stand_ins: dict[int, int] = {}
        #: Whether other ranks may turn out to train other parameters.
        self.undecided = False
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding):  # positions have one too, and it is the smaller one
                self.vocabulary = max(self.vocabulary or 0, module.num_embeddings)
            for name, parameter in module.named_parameters(recurse=False):
                self._add(parameter, f"{path}.{name}" if path else name, module)
        for tensor, parameter in told.stand_ins:
            self._stand_in(tensor, parameter)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.index_of(parameter)
        for tensor, weight in told.weights or ():
            self._parts[self.index_of(tensor)] = weight

    def _stand_in(self, tensor: Tensor, parameter: Tensor) -> None:
        """Give a tensor name and group of the parameter in whose place it is updated."""
        if id(tensor) not in self._index:
            of = self.index_of(parameter)
            index = self._add(tensor, self.names[of], None)
            self._groups[index] = self._groups[of]
            self.stand_ins[index] = of

    def _add(self, parameter: Tensor, name: str, owner: nn.Module | None) -> int:
        if id(parameter) in self._index:  # tied: it belongs to where it stands first
            return self._index[id(parameter)]
        index = len(self.params)
        self._index[id(parameter)] = index
        self.params.append(parameter)
        self.names.append(name)
        self._groups.append(GROUPS.index(group_of(name, owner)))
        self._sizes.append(as_numbers(parameter).numel())
        self._parts.append(parts(parameter))
        self.split = self.split or is_sharded(parameter)
        self._arrays = None
        return index

    def __len__(self) -> int:
        return len(self.params)

    def index_of(self, parameter: Tensor) -> int:
        """Return the number of a parameter; one that was not known joins as ``other``."""
        found = self._index.get(id(parameter))
        return self._add(parameter, f"parameter {len(self.params)}", None) if found is None else found

    def group(self, index: int) -> str:
        """Return the group that a parameter belongs to."""
        return GROUPS[self._groups[index]]

    def blocks(self, numbers: int) -> int:
        """Return ``numbers`` for each block that the parameters are worked on in."""
        return numbers * int(sum(size // DEVICE_BLOCK for size in self._sizes))

    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        if self._arrays is None:
            self._arrays = (np.array(self._groups, dtype=np.int64), np.array(self._sizes, dtype=np.float64))
        return self._arrays

    def group_sums(self, indices: np.ndarray, values: np.ndarray) -> dict[str, float]:
        """Sum ``values`` of the parameters ``indices`` by group, groups without any left out, ``all`` first."""
        which = self._table()[0][indices]
        sums = np.bincount(which, weights=values, minlength=len(GROUPS))
        found = {"all": float(np.sum(values))}
        found.update({GROUPS[group]: float(sums[group]) for group in np.unique(which)})
        return found

    def sizes_of(self, indices: np.ndarray) -> np.ndarray:
        """Return how many elements each of the parameters ``indices`` has on this rank; a complex one counts as two."""
        sizes: np.ndarray = self._table()[1][indices]
        return sizes

    def group_sizes(self, indices: np.ndarray) -> dict[str, float]:
        """Count the elements of the parameters ``indices`` by group, as :meth:`group_sums`. Each parameter counts once."""
        unique = np.unique(indices)
        return self.group_sums(unique, self._table()[1][unique])

    def group_shares(self, indices: np.ndarray, values: np.ndarray) -> dict[str, float]:
        """Sum ``values`` of the parameters ``indices`` by group, each as often as its parameter is split into parts, or weighs."""
        return self.group_sums(indices, values * np.array(self._parts, dtype=np.float64)[indices])

    def counts(self, indices: np.ndarray) -> np.ndarray:
        """Return 1 for each of the parameters ``indices``, and 0 for those that count on another rank."""
        found: np.ndarray = np.array(self._parts, dtype=np.float64)[indices] != 0
        return found.astype(np.float64)

    @property
    def summable(self) -> bool:
        """Whether ranks hold parts, or may turn out to, and their shares of a sum over all of them can be told."""
        return (self.split or self.undecided) and self.untold is None

    def told(self, indices: Sequence[int], gradients: Sequence[Tensor | None]) -> bool:
        """Say whether gradients are spread over the ranks as their parameters are: not where one is still a partial sum."""
        return not self.split or all(
            getattr(gradient, "placements", None) == getattr(self.params[index], "placements", None)
            for index, gradient in zip(indices, gradients, strict=True)
        )

    def signature(self) -> str:
        """Return the same text on all ranks that train the same parameters."""
        return signature(self.names, self.params)

    def meet(self, alike: int, all_alike: bool) -> None:
        """Take over that ``alike`` ranks train the same parameters as this one, and whether all do."""
        self.split, self.undecided = self.split or not all_alike, False
        sizes = {size for size in map(mesh_size, self.params) if size is not None}
        if self.untold is None and sizes and max(sizes) != alike:  # where one covers them all, they train one model
            self.untold = (
                f"parameters are split over {sorted(sizes)} ranks, and {alike} ranks have parameters of these names"
            )

    def gradients(self, parameters: Iterable[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Return index and local gradient, as real numbers, of each parameter that has a dense, non-empty one."""
        indices: list[int] = []
        gradients: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            gradient = as_numbers(gradient)
            if gradient.numel():
                indices.append(self.index_of(parameter))
                gradients.append(gradient)
        return indices, gradients

    def by_gradient(self) -> dict[int, int]:
        """Map ``id`` of each gradient tensor, as it is now, to the index of its parameter."""
        found = {}
        for index, parameter in enumerate(self.params):
            gradient = parameter.grad
            if gradient is not None:
                found[id(gradient)] = index
        return found
