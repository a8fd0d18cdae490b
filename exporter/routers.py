"""How a mixture of experts spreads its tokens: loads, probabilities and logits of its routers, put down on the step's sheet.

In steps that are due, each forward that belongs to the step adds what its routers chose; the step's end makes a handful of numbers
a layer of that, on the device. Micro-batches are added up; what checkpointing computes again, evaluations and generation are
not seen, by the same passes as the rest of the model (:mod:`exporter.inside`). Nothing waits, and nothing asks another rank:
all of it is about the tokens of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .blocks import Structure
from .experts import ROUTERS, Given, Router, find_routers, read
from .hooks import modules
from .measure import DEVICE_BLOCK
from .notices import Notices
from .passes import Pass
from .sheet import Sheet
from .watched import local

#: Steps that are looked at, one after another, in which an expert gets no token until it counts as dead. One step alone may miss a
#: rarely chosen one; ten without it, at the usual cadence a hundred steps, are no chance.
DEAD_AFTER = 10
#: The numbers of a layer, in the order in which they are put down.
NUMBERS = ("share_max", "share_min", "entropy", "dead", "balance", "z", "dropped")
#: Numbers that a step puts down at most.
MOST = (len(NUMBERS) + 2) * ROUTERS
#: Types of logits and probabilities that are looked at.
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Passes(Protocol):
    """Who knows which forward belongs to the step."""

    def within(self, key: int, training: bool, function: Any, *arguments: Any) -> None:
        """Call ``function(pass, *arguments)`` if what runs belongs to a step."""

    def beyond(self, function: Any, *arguments: Any) -> None:
        """The same, also behind the forward."""

    def traced_within(self, function: Any, *arguments: Any) -> None:
        """Call ``function(*arguments)`` from an operator of a compiled graph, if what runs belongs to a step."""

    @property
    def due(self) -> bool:
        """Whether the open step is looked at closely."""


@dataclass(slots=True, eq=False)
class Load:
    """What one router did in one pass. ``counts`` and ``probs`` are of shape (experts,); ``z`` is 0-D."""

    counts: Tensor | None = None
    probs: Tensor | None = None
    z: Tensor | None = None
    choices: int = 0
    #: Whether choices can be fewer than tokens ask for.
    capped: bool = False
    losses: list[Tensor | float] = field(default_factory=list)
    dropped: list[Tensor | float] = field(default_factory=list)
    #: Of a gate, until the router around it is done.
    logits: Tensor | None = None


@dataclass(slots=True, eq=False)
class Layer:
    """What is known of a router over the steps. ``idle``: for how many steps each expert has got no token, (experts,)."""

    label: str
    experts: int = 0
    chosen: int = 0
    router: Router | None = None
    idle: Tensor | None = None


class Routers:
    """Listens to the routers of one model; :meth:`told` takes what nobody could find."""

    def __init__(self, model: nn.Module, structure: Structure, notices: Notices) -> None:
        self._notices = notices
        self.routers: list[Router] = []
        try:
            self.routers = find_routers(model, structure)
        except Exception as error:  # somebody's module that answers oddly costs its routers alone
            notices.fault("finding routers", error)
        self._layers = [Layer(router.label, router.experts, router.chosen, router) for router in self.routers]
        self._named = {name: router.number for router in self.routers for name in (router.name, router.label)}
        self._passes: Passes | None = None
        self._rows: dict[int, Tensor] = {}
        #: How many experts a token takes and whether scores are sigmoids, of all routers.
        self._kinds: list[tuple[int, bool]] = []
        self._key = 0
        self._traced = False
        uncounted = [router.name for router in self.routers if not router.counted]
        if uncounted:
            self._notices.say(
                "router",
                f"{uncounted[0]}: nothing says how many experts a token takes (top_k): the first of them is counted alone; "
                "exporter.router() takes the choices themselves",
            )

    def listen(self, passes: Passes) -> list[Any]:
        """Set the hooks and return their handles."""
        self._passes = passes
        handles: list[Any] = []
        if self.routers:
            self._key = modules.number_of(self)
        for router in self.routers:
            gate = router.gate
            row = self._row_of(router)
            if gate is not None:
                # A number of its own: beyond those of the routers.
                number = len(self.routers) + router.number
                handles.append(gate.register_forward_hook(modules.Gave(gate, self, number, row, self._key)))
                row = None
            handles.append(
                router.module.register_forward_hook(modules.Gave(router.module, self, router.number, row, self._key))
            )
        return handles

    def _row_of(self, router: Router) -> Tensor | None:
        """Return what a compiled graph writes into: counts, sums of probabilities, the largest z.

        A graph may hand a copy of it to its operator, which is then told by nothing but its length: as many numbers more as the
        place of the router's kind among all kinds.
        """
        parameter = next(router.module.parameters(), None)
        own_linear = isinstance(router.module, nn.Linear) and type(router.module).forward is not nn.Linear.forward
        if parameter is None or (router.gate is None and own_linear):  # what it gives back first may be no logits
            return None
        kind = (router.chosen, router.sigmoid)
        if kind not in self._kinds:
            self._kinds.append(kind)
        row = torch.zeros(2 * router.experts + 1 + self._kinds.index(kind), device=local(parameter).device)
        row._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        self._rows[router.number] = row
        return row

    def forget(self) -> None:
        """Hear nothing any more."""
        modules.forget(self._key)
        self._passes = None

    # What the hooks tell.

    def entered(self, module: nn.Module) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`; not asked for."""

    def left(self, module: nn.Module) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`; not asked for."""

    def took(self, number: int, given: Any) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`; not asked for."""

    def gave(self, number: int, output: Any) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        passes = self._passes
        if passes is None or not passes.due:
            return
        gate = number >= len(self.routers)
        router = self.routers[number - len(self.routers) if gate else number]
        passes.within(-2 - number, router.module.training, self._look, router, output, gate)

    def _look(self, found: Pass, router: Router, output: Any, gate: bool) -> None:
        load = found.routed.setdefault(router.number, Load())
        given = read(router, output)
        if gate:
            load.logits = given.logits
            return
        if router.gate is not None:
            given.logits, load.logits = load.logits, None
        _add(load, given, router.experts, router.chosen, router.sigmoid)

    def traced(self, x: Tensor, row: Tensor) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        passes = self._passes
        if passes is not None and passes.due:
            passes.traced_within(self._traced_one, x, row)

    def _traced_one(self, x: Tensor, row: Tensor) -> None:
        size = x.shape[-1]
        kind = len(row) - 2 * size - 1
        if not 0 <= kind < len(self._kinds) or x.dtype not in TYPES or not x.numel():
            return
        load = Load()
        _add(load, Given(logits=x), size, *self._kinds[kind])
        if load.counts is None or load.probs is None or load.z is None:
            return
        self._traced = True
        row[:size].add_(load.counts)
        row[size : 2 * size].add_(load.probs)
        row[2 * size].copy_(torch.maximum(row[2 * size], load.z))

    # What a script says itself.

    def told(
        self,
        name: str,
        logits: Tensor | None,
        indices: Tensor | None,
        probs: Tensor | None,
        experts: int | None,
        loss: Tensor | float | None,
        dropped: Tensor | float | None,
    ) -> None:
        """Take what :meth:`exporter.exporter.Exporter.router` was given.

        Raises:
            TypeError, ValueError: shapes or types are not those that it says.
        """
        passes = self._passes
        if passes is None:
            return
        number = self._layer(name)
        layer = self._layers[number]
        if layer.router is not None:
            logits = indices = probs = None
        wide = logits if logits is not None else probs
        size = experts if wide is None else wide.shape[-1]
        given = Given(logits=logits, chosen=indices)
        if wide is not None or indices is not None:
            _check(name, logits, indices, probs, size, layer.experts)
            assert size is not None
            layer.experts = size
            layer.chosen = indices.shape[-1] if indices is not None else layer.chosen or 1
        if (wide is not None or indices is not None) and not passes.due:
            given, probs, indices = Given(), None, None
        passes.beyond(self._told, number, given, probs, loss, dropped)

    def _layer(self, name: str) -> int:
        known = self._named.get(name)
        if known is None:
            if len(self._layers) >= ROUTERS:
                raise ValueError(f"router: {name!r} is one too many: {ROUTERS} layers are looked at")
            known = self._named[name] = len(self._layers)
            self._layers.append(Layer(name))
        return known

    def _told(
        self,
        found: Pass,
        number: int,
        given: Given,
        probs: Tensor | None,
        loss: Tensor | float | None,
        dropped: Tensor | float | None,
    ) -> None:
        load, layer = found.routed.setdefault(number, Load()), self._layers[number]
        given, probs = Given(_plain(given.logits), _plain(given.chosen)), _plain(probs)
        if given.logits is not None or given.chosen is not None or probs is not None:
            _add(load, given, layer.experts, layer.chosen, False, probs)
        for value, kept in ((loss, load.losses), (dropped, load.dropped)):
            if value is not None:
                kept.append(
                    local(value).detach().reshape(()).clone() if isinstance(value, torch.Tensor) else float(value)
                )

    # The end of the step.

    def take(self, sheet: Sheet, passes: Iterable[Pass]) -> None:
        """Put down what the step's passes did, and begin anew."""
        loads: dict[int, list[Load]] = {}
        for one in passes:
            for number, load in one.routed.items():
                loads.setdefault(number, []).append(load)
        for number, load in self._of_graphs():
            loads.setdefault(number, []).append(load)
        groups: dict[tuple[int, torch.device], list[tuple[Layer, Load]]] = {}
        for number in sorted(loads):
            layer, load = self._layers[number], _together(loads[number])
            if load.counts is not None:
                groups.setdefault((layer.experts, load.counts.device), []).append((layer, load))
            _put_told(sheet, layer.label, load)
        for members in groups.values():
            meta = tuple((layer.label, _known(layer, load)) for layer, load in members)
            sheet.add("routers", _summary(members).reshape(-1), meta)

    def _of_graphs(self) -> Iterator[tuple[int, Load]]:
        if not self._traced:
            return
        self._traced = False
        for number, row in self._rows.items():
            size = self._layers[number].experts
            # Of a row that nothing wrote into, the shares are those of nothing: they are not a number, and are left out.
            yield number, Load(row[:size].clone(), row[size : 2 * size].clone(), row[2 * size].clone())
        torch._foreach_zero_(list(self._rows.values()))


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local(tensor).detach()


def _check(
    name: str, logits: Tensor | None, indices: Tensor | None, probs: Tensor | None, experts: int | None, before: int
) -> None:
    for what, value in (("logits", logits), ("probs", probs)):
        if value is not None and (not value.is_floating_point() or value.ndim < 2):
            raise TypeError(f"router: {name}: {what} are floating-point numbers of shape (…, experts)")
    if logits is not None and probs is not None and logits.shape != probs.shape:
        raise ValueError(f"router: {name}: logits are {tuple(logits.shape)} and probs {tuple(probs.shape)}")
    if indices is not None and (indices.is_floating_point() or indices.dtype is torch.bool or indices.ndim < 2):
        raise TypeError(f"router: {name}: indices are whole numbers of shape (…, k), the experts that each token takes")
    if isinstance(experts, bool) or not isinstance(experts, int) or experts < 2:
        raise ValueError(f"router: {name}: give experts=, how many there are, where neither logits nor probs tell")
    if before not in (0, experts):
        raise ValueError(f"router: {name}: it had {before} experts before, and {experts} now")


def _add(load: Load, given: Given, experts: int, chosen: int, sigmoid: bool, probs: Tensor | None = None) -> None:
    """Add tokens to a load. Where nobody says what was chosen, it is the ``chosen`` largest logits or probabilities."""
    logits = given.logits if given.logits is not None and given.logits.dtype in TYPES and given.logits.numel() else None
    wide = logits if logits is not None else probs
    counts: Tensor | None = None
    if given.chosen is not None and given.chosen.numel():
        if given.mask:
            mask = given.chosen.reshape(-1, experts)
            counts, load.choices = mask.sum(0, dtype=torch.float32), load.choices + mask.shape[0] * chosen
            load.capped = True
        else:
            counts, load.choices = _counts(given.chosen, experts), load.choices + given.chosen.numel()
    if wide is not None:
        together = max(1, DEVICE_BLOCK // experts)
        for part in torch.split(wide.reshape(-1, experts), together):  # copies in float32 are bounded
            with (
                torch.autocast(part.device.type, enabled=False)
                if torch._C._is_any_autocast_enabled()
                else nullcontext()
            ):
                _add_probabilities(load, part.float(), logits is not None, sigmoid, probs)
                if given.chosen is None:
                    found = _counts(part.topk(chosen, dim=-1).indices, experts)
                    counts = found if counts is None else counts + found
                    load.choices += part.shape[0] * chosen
        if probs is not None and logits is not None:
            load.probs = _sum(load.probs, probs.reshape(-1, experts).sum(0, dtype=torch.float32))
    if counts is not None:
        load.counts = _sum(load.counts, counts)


def _add_probabilities(load: Load, part: Tensor, are_logits: bool, sigmoid: bool, probs: Tensor | None) -> None:
    if are_logits:
        z = torch.logsumexp(part, dim=-1).abs().amax()
        load.z = z if load.z is None else torch.maximum(load.z, z)
        if probs is not None:
            return
        part = part.sigmoid() if sigmoid else part.softmax(-1)
        if sigmoid:
            part = part / part.sum(-1, keepdim=True)
    load.probs = _sum(load.probs, part.sum(0))


def _counts(indices: Tensor, experts: int) -> Tensor:
    """Return how often each expert is named, (experts,) float32; numbers beyond them (of masked tokens) are nobody's.

    Sorted and cut: counting by bins reads its largest bin on the host, and adding by index is not the same from run to run.
    """
    ordered = indices.reshape(-1).to(torch.int64).sort().values
    edges = torch.searchsorted(ordered, torch.arange(experts + 1, device=ordered.device))
    return edges.diff().to(torch.float32)


def _sum(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _together(loads: Sequence[Load]) -> Load:
    """Return what several passes did: sums of counts and probabilities, the largest z."""
    found = Load()
    for load in loads:
        if load.counts is not None:
            found.counts = _sum(found.counts, load.counts)
        if load.probs is not None:
            found.probs = _sum(found.probs, load.probs)
        if load.z is not None:
            found.z = load.z if found.z is None else torch.maximum(found.z, load.z)
        found.choices += load.choices
        found.capped |= load.capped
        found.losses += load.losses
        found.dropped += load.dropped
    return found


def _known(layer: Layer, load: Load) -> tuple[str, ...]:
    """Return which of :data:`NUMBERS` a load has."""
    biased = layer.router is not None and layer.router.biased
    absent = {"balance": load.probs is None or biased, "z": load.z is None, "dropped": not load.capped}
    return tuple(name for name in NUMBERS if not absent.get(name, False))


def _summary(members: Sequence[tuple[Layer, Load]]) -> Tensor:
    """Return :data:`NUMBERS` of layers with as many experts on one device, (layers, numbers), and remember which experts were idle.

    Where a load lacks something there is a number in its place that :func:`_known` does not name. Balance is that of Switch
    (arXiv 2101.03961, eq. 4): experts times the sum over them of the share of choices and the mean probability; 1 if either is even.
    """
    counts = torch.stack([load.counts for _, load in members if load.counts is not None])
    experts = counts.shape[-1]
    nothing, none = counts.new_zeros(()), counts.new_zeros(experts)
    total = counts.sum(-1, keepdim=True)
    shares = counts / total
    entropy = torch.special.entr(shares).sum(-1) / math.log(experts)
    before = torch.stack([none if layer.idle is None else layer.idle for layer, _ in members])
    idle = torch.where(total == 0, before, torch.where(counts > 0, nothing, before + 1))
    for (layer, _), row in zip(members, idle.unbind(0), strict=True):
        layer.idle = row
    probs = torch.stack([none if load.probs is None else load.probs for _, load in members])
    balance = experts * (shares * (probs / probs.sum(-1, keepdim=True))).sum(-1)
    z = torch.stack([nothing if load.z is None else load.z for _, load in members])
    dropped = torch.stack(
        [
            1 - sums / load.choices if load.capped else nothing
            for sums, (_, load) in zip(total.squeeze(-1).unbind(0), members, strict=True)
        ]
    )
    dead = (idle >= DEAD_AFTER).sum(-1, dtype=torch.float32)
    return torch.stack(
        [experts * shares.amax(-1), experts * shares.amin(-1), entropy, dead, balance, z, dropped], dim=1
    )


def _put_told(sheet: Sheet, label: str, load: Load) -> None:
    """Put down what a script said: the mean over micro-batches."""
    for name, values in (("routers.loss", load.losses), ("routers.dropped", load.dropped)):
        first = next((value for value in values if isinstance(value, torch.Tensor)), None)
        if first is not None:
            all_of_them = [
                value.float() if isinstance(value, torch.Tensor) else first.new_full((), value, dtype=torch.float32)
                for value in values
            ]
            sheet.add(name, torch.stack(all_of_them).mean(), label)
        elif values:
            sheet.host.setdefault(name, {})[label] = math.fsum(float(value) for value in values) / len(values)
