"""What one closely watched step puts down: rows and flags on their devices, and beside them, on the host, what each is about.

A step may have many passes; rows of like passes are put together on the device, so that what is kept grows with the model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .numbers import ROW, combined, first
from .where import Site

#: First modules, operations and nodes of a pass that are told of.
MODULES, OPERATIONS, NODES = 16, 64, 16
#: Passes of a step of which the first modules and operations are told, operations of each, and nodes of a backward pass.
PASSES, IN_PASS, IN_BACKWARD = 256, 65_536, 262_144

#: What an operation is called, and where it was called from.
Called = tuple[str, Site]
Packed = tuple[tuple[int, ...], Tensor]


class Flags:
    """Flags in their order, packed into the numbers of the first that are set."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}

    def add(self, number: int, flag: Tensor) -> None:
        """Put down a 0-D flag of what has this number; numbers ascend."""
        numbers, flags = self._by_device.setdefault(flag.device, ([], []))
        numbers.append(number)
        flags.append(flag)

    def pack(self, most: int) -> Iterator[Packed]:
        """Yield, for each device, what the flags are of, and the places of the first that are set. Begins anew."""
        packs, self._by_device = self._by_device, {}
        for numbers, flags in packs.values():
            yield tuple(numbers), first(torch.stack(flags), most)


class Rows:
    """One row for each number that came."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._packed: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def add(self, number: int, found: Tensor) -> None:
        """Put a row to what is known of its number."""
        known = self._rows.get(number)
        same = known is not None and known.device == found.device
        self._rows[number] = combined(known, found) if known is not None and same else found

    def pack(self) -> list[Packed]:
        """Return what came since the last time, one tensor (numbers, 7) a device. Begins anew."""
        by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        for number in sorted(self._rows):
            numbers, rows = by_device.setdefault(self._rows[number].device, ([], []))
            numbers.append(number)
            rows.append(self._rows[number])
        self._rows = {}
        return [(tuple(numbers), torch.stack(rows)) for numbers, rows in by_device.values()]

    def fold(self, packs: list[Packed]) -> None:
        """Put packs together with those before that are of the same numbers."""
        for numbers, rows in packs:
            key = (rows.device, numbers)
            known = self._packed.get(key)
            self._packed[key] = rows if known is None else combined(known, rows)

    def entries(self) -> list[Packed]:
        """Return all that was folded."""
        return [(numbers, rows.reshape(-1)) for (_, numbers), rows in self._packed.items()]


class Call(NamedTuple):
    """A call of ``module``, and the operations that it began with and ended before; ``around`` is the module that called (-1: none).

    ``sources`` are the operations that made what it was given.
    """

    module: int
    began: int
    ended: int
    around: int
    sources: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Pass:
    """One forward. ``calls`` by their end; ``sources``, for each operation, those that made what it was given.

    ``made``: what an operation made of finite values. ``harm``: the same without -Inf of masks; ``given``: what a call was given, alike.
    ``cured``: it was given what is not finite, and gave finite values alone.
    """

    opener: int
    counts: bool
    calls: list[Call] = field(default_factory=list)
    operations: list[Called] = field(default_factory=list)
    sources: list[tuple[int, ...]] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)
    bad: Flags = field(default_factory=Flags)
    given: Flags = field(default_factory=Flags)
    made: Flags = field(default_factory=Flags)
    harm: Flags = field(default_factory=Flags)
    cured: Flags = field(default_factory=Flags)
    taken: Tensor | None = None
    packed: list[Packed] = field(default_factory=list)
    first_modules: list[Packed] = field(default_factory=list)
    first_given: list[Packed] = field(default_factory=list)
    first_operations: list[Packed] = field(default_factory=list)
    first_harm: list[Packed] = field(default_factory=list)
    first_cured: list[Packed] = field(default_factory=list)

    def commit(self, gradient: Tensor) -> None:
        """A gradient goes back through the pass: it belongs to the step."""
        self.counts = True

    def pack(self) -> None:
        """Put the numbers together, so that a pass keeps few tensors."""
        self.packed += self.rows.pack()
        self.first_modules += self.bad.pack(MODULES)
        self.first_given += self.given.pack(MODULES)
        self.first_operations += self.made.pack(OPERATIONS)
        self.first_harm += self.harm.pack(OPERATIONS)
        self.first_cured += self.cured.pack(OPERATIONS)


#: A node of the backward pass: its name, the module that its forward ran in (-1: none), and where from.
Node = tuple[str, int, Site]


@dataclass(slots=True, eq=False)
class Gathering:
    """All of one step."""

    step: int
    passes: list[Pass] = field(default_factory=list)
    outputs: Rows = field(default_factory=Rows)
    gradients: Rows = field(default_factory=Rows)
    nodes: list[Node] = field(default_factory=list)
    ran: Flags = field(default_factory=Flags)
    packed_nodes: list[Packed] = field(default_factory=list)
    roots: list[tuple[Tensor, Node]] = field(default_factory=list)
    incoming: list[Tensor] = field(default_factory=list)
    before: Rows | None = None
    updating: Rows = field(default_factory=Rows)
    updated: bool = False
    parameters: Rows = field(default_factory=Rows)
    scaled: bool = False

    def fold(self, last: bool = False) -> None:
        """Put together what has come. Passes that do not count yet wait; after the ``last`` time they are left out."""
        self.gradients.fold(self.gradients.pack())
        for one in self.passes:
            if one.counts or last:
                if one.counts:
                    self.outputs.fold(one.packed)
                one.packed = []
        self.packed_nodes += self.ran.pack(NODES)


@dataclass(slots=True)
class Layout:
    """What the numbers of a step are of, by the names that they are sent under; what was seen beside numbers. ``closed``: it did not break off."""

    step: int
    entries: dict[str, tuple[int, ...]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    roots: list[Node] = field(default_factory=list)
    scaled: bool = False
    left_out: int = 0
    closed: bool = True


def laid_out(step: Gathering, room: int) -> tuple[Layout, list[tuple[str, Tensor]]]:
    """Return a step's layout and what is to be sent, no more than ``room`` numbers: what tells who was first goes before the rest."""
    layout = Layout(step=step.step, nodes=step.nodes, scaled=step.scaled)
    sent: list[tuple[str, Tensor]] = []

    def put(name: str, numbers: tuple[int, ...], values: Tensor) -> None:
        nonlocal room
        if values.numel() > room:
            layout.left_out += len(numbers)
            return
        room -= values.numel()
        name = f"{name}.{len(sent)}"
        layout.entries[name] = numbers
        sent.append((name, values))

    layout.passes = [one for one in step.passes if one.counts][:PASSES]
    for number, one in enumerate(layout.passes):
        firsts = {
            "module": one.first_modules,
            "given": one.first_given,
            "operation": one.first_operations,
            "harm": one.first_harm,
            "cured": one.first_cured,
        }
        for name, packs in firsts.items():
            for numbers, values in packs:
                put(f"{name}.{number}", numbers, values)
        if one.taken is not None:
            put(f"taken.{number}", (number,), one.taken.reshape(1))
    for numbers, values in step.packed_nodes:
        put("node.0", numbers, values)
    for flag, node in step.roots:
        layout.roots.append(node)
        put("root.0", (len(layout.roots) - 1,), flag.reshape(1))
    for flag in step.incoming:
        put("incoming.0", (0,), flag.reshape(1))
    rows: list[tuple[str, Rows | None]] = [
        ("before", step.before),
        ("gradient", step.updating),
        ("parameter", step.parameters),
        ("output", step.outputs),
        ("output_gradient", step.gradients),
    ]
    for kind, known in rows:
        for numbers, values in [] if known is None else known.entries():
            put(f"{kind}.0", numbers, values)
    return layout, sent


def rows_of(layout: Layout, values: dict[str, Any], what: str) -> Iterator[tuple[int, Any]]:
    """Yield number and row of each entry of one kind that has arrived."""
    for name, numbers in layout.entries.items():
        if name.split(".")[0] == what and name in values:
            for at, number in enumerate(numbers):
                yield number, values[name][ROW * at : ROW * at + ROW]
