"""What was first in a step: the drain thread's side of a close look. Pure: numbers that have arrived, in; a finding, out.

The stages of a step in their order: what the outermost module was given (``input``), the forward pass, the loss, the backward pass, the
gradients as the optimizer gets them (``reduction`` over the ranks, or ``accumulation`` over the passes), the update. The first that has
something that is not finite, where all before it had none, is told of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .gathering import Call, Layout, Node, Pass, rows_of
from .numbers import COUNT, FINITE, WORSE
from .where import Site, place, told

Values = Mapping[str, Any]
Finding = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Named:
    """What numbers stand for. ``holding`` are the modules that hold parameters, ``ranks`` how many train together."""

    modules: Sequence[str]
    parameters: Sequence[str]
    holding: Collection[int] = field(default_factory=frozenset)
    ranks: int = 1

    def module(self, number: int) -> str:
        """Return the name of a module; the outermost has that of all of it."""
        return self.modules[number] or "the model"


def bad(layout: Layout, values: Values, what: str) -> list[int]:
    """Return the numbers whose row of one kind has an element that is not finite, ascending."""
    return sorted(
        number for number, row in rows_of(layout, dict(values), what) if not float(row[FINITE]) >= float(row[COUNT])
    )


def find(layout: Layout, values: Values, named: Named, bad_before: Collection[int]) -> Finding | None:
    """Return what was first in a step, None where all was finite. ``bad_before``: parameters that were not finite before it."""
    roots = [layout.roots[number] for number in _set(layout, values, "root.0")]
    outputs = dict(rows_of(layout, dict(values), "output"))
    openers = {one.opener for one in layout.passes}
    reached = bool(roots) or any(_finite(outputs.get(opener)) is False for opener in openers)
    found = _forward(layout, values, named, outputs, bad_before) if reached else None
    if found is None and roots:
        found = {"module": "loss", "stage": "loss", **_by(roots[0][0], roots[0][2])}
    if found is None:
        found = _backward(layout, values, named)
    if found is not None and layout.scaled:
        found["scaled"] = True
    return found or _update(layout, values, named, bad_before)


def _forward(
    layout: Layout, values: Values, named: Named, outputs: Mapping[int, Any], bad_before: Collection[int]
) -> Finding | None:
    for number, one in enumerate(layout.passes):
        more = {"micro_batch": number} if len(layout.passes) > 1 else {}
        for at in _firsts(layout, values, f"module.{number}"):
            call = one.calls[at]
            module = call.module
            row = outputs.get(module)
            if row is not None and not row[WORSE] and module not in named.holding:
                continue  # -Inf alone, of what holds no parameter: a mask
            if next(_set(layout, values, f"taken.{number}"), None) is not None:
                return {"module": named.module(one.opener), "stage": "input", **more}
            found = {
                "module": named.module(module),
                "stage": "forward",
                **more,
                **_operation(one, call, layout, values, number),
            }
            own = f"{named.modules[module]}." if named.modules[module] else ""
            known = next((index for index in sorted(bad_before) if named.parameters[index].startswith(own)), None)
            if known is not None:
                found["parameter"] = named.parameters[known]
            if "op" not in found and known is None and at in _firsts(layout, values, f"given.{number}"):
                return {**found, **_around(one, call, layout, values, named, number)}
            return found
    return None


def _operation(one: Pass, call: Call, layout: Layout, values: Values, number: int) -> Finding:
    """Return the first operation within a call that made it of finite values; what may be a mask only where nothing else is."""
    for what in ("harm", "operation"):
        for at in _firsts(layout, values, f"{what}.{number}"):
            if call.began <= at < call.ended:
                return _by(*one.operations[at])
    return {}


def _around(one: Pass, call: Call, layout: Layout, values: Values, named: Named, number: int) -> Finding:
    """Return the module that made what a call was given, and the operation: the first of those that it goes back to."""
    harm = set(_firsts(layout, values, f"harm.{number}"))
    waiting, met, made = list(call.sources), set(_firsts(layout, values, f"cured.{number}")), []
    while waiting:
        at = waiting.pop()
        if at in harm:
            made.append(at)  # of finite values: what is before it did no harm
        elif at not in met:
            met.add(at)
            waiting += one.sources[at]
    if not made:
        return {"module": named.module(call.around)} if call.around >= 0 else {}
    within = [other for other in one.calls if other.began <= min(made) < other.ended]
    inner = min(within, key=lambda other: other.ended - other.began).module if within else one.opener
    return {"module": named.module(inner), **_by(*one.operations[min(made)])}


def _backward(layout: Layout, values: Values, named: Named) -> Finding | None:
    gradients = bad(layout, values, "gradient")
    if layout.closed and not gradients and not bad(layout, values, "output_gradient"):
        return None  # what was made was thrown away again
    if next(_set(layout, values, "incoming.0"), None) is not None:
        return {"module": "loss", "stage": "backward", "op": "the gradient that backward() was given"}
    for at in _firsts(layout, values, "node.0"):
        name, module, site = layout.nodes[at]
        return {"module": named.module(module) if module >= 0 else "loss", "stage": "backward", **_by(name, site)}
    if not gradients:
        return None
    parameter = named.parameters[gradients[0]]
    stage = "reduction" if named.ranks > 1 else "accumulation"
    return {"module": _owner(parameter), "stage": stage, "parameter": parameter}


def _update(layout: Layout, values: Values, named: Named, bad_before: Collection[int]) -> Finding | None:
    made = [number for number in bad(layout, values, "parameter") if number not in bad_before]
    if not made or bad(layout, values, "gradient"):
        return None
    parameter = named.parameters[made[0]]
    return {"module": _owner(parameter), "stage": "update", "parameter": parameter}


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _by(name: str, site: Site) -> Finding:
    return {"op": name, "at": place(site), "traceback": told(site)} if site else {"op": name}


def _finite(row: Any) -> bool | None:
    return None if row is None else bool(row[FINITE] >= row[COUNT])


def _firsts(layout: Layout, values: Values, what: str) -> Iterator[int]:
    """Yield the numbers that :func:`exporter.anomaly.numbers.first` told of, of all devices, ascending."""
    found = []
    for name, numbers in layout.entries.items():
        if name.startswith(f"{what}.") and name in values:
            found += [numbers[int(at)] for at in values[name] if 0 <= at < len(numbers)]
    yield from sorted(found)


def _set(layout: Layout, values: Values, what: str) -> Iterator[int]:
    """Yield the numbers of the flags of one kind that are set."""
    for name, numbers in layout.entries.items():
        if name.startswith(f"{what}.") and name in values and values[name][0]:
            yield numbers[0]


__all__ = ["Finding", "Named", "Node", "bad", "find"]
