"""Values that are no measurements are kept from the rules: to them such a signal is unknown (design §4.9).

Here: a value that has been written again and again, and a loss of exactly 0.0 behind something that was not finite, which a
log's filter put there. What else a filter or a skipped step leaves is found by :mod:`.instrument_masked`. What is not finite itself is passed on: the rules must see it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .block import Block, Bools, Column, Floats
from .instrument import VARYING, Fault, Watch, longest, repeated, same
from .instrument_masked import masked_losses, stale_norms


def screen(watches: dict[str, Watch], block: Block, dead_records: int) -> tuple[Block, list[tuple[int, Fault]]]:
    """Return the block as the rules may see it, and what is to be said, with its row.

    The columns of the given block are not changed. How a stream is cut into blocks makes no difference.
    """
    masked, faults = masked_losses(watches, block)
    stale, more = stale_norms(watches, block)
    faults += more
    block = _without(_without(block, ("loss",), masked), ("grad_norm", "all"), stale)
    hidden: dict[tuple[str, ...], Bools] = {}
    norm = block.columns.get(("grad_norm", "all"))
    broken = np.zeros(len(block), dtype=np.bool_) if norm is None else norm.present & ~np.isfinite(norm.values)
    for name in VARYING:
        key: tuple[str, ...] = (name,) if (name,) in block.columns else (name, "all")
        column = block.columns.get(key)
        if column is None:
            continue
        watch = watches.setdefault(f"screen {name}", Watch())
        others = broken if name == "loss" else np.zeros(len(block), dtype=np.bool_)
        values = column.values if column.present.all() else column.values[column.present]
        if not others.any() and _plain(watch, values, dead_records):
            continue
        found = _hidden(watch, name, column, others, dead_records, faults)
        if found.any():
            hidden[key] = found
    for key, rows in hidden.items():
        block = _without(block, key, rows)
    faults.sort(key=lambda one: one[0])
    return block, faults


def _without(block: Block, key: tuple[str, ...], rows: Bools | None) -> Block:
    """Return the block without the values of a column at these rows."""
    if rows is None:
        return block
    column = block.columns[key]
    return replace(block, columns={**block.columns, key: Column(column.values, column.present & ~rows)})


def _plain(watch: Watch, values: Floats, dead_records: int) -> bool:
    """Take values of which nothing is to be hidden, all at once; False if they need a closer look."""
    if not len(values):
        return True
    if not np.isfinite(values).all() or (values == 0).any():
        return False
    again, held = repeated(values, watch.last), 1
    if again.any():
        most, held = longest(again, watch.held)
        if most >= dead_records:
            return False
    watch.last, watch.held, watch.broken, watch.said = float(values[-1]), held, False, False
    return True


def _hidden(
    watch: Watch, name: str, column: Column, broken: Bools, dead_records: int, faults: list[tuple[int, Fault]]
) -> Bools:
    found: Bools = np.zeros(len(column.values), dtype=np.bool_)
    for row in np.flatnonzero(column.present | broken):
        if broken[row]:
            watch.broken = True
        if not column.present[row]:
            continue
        value = float(column.values[row])
        if not np.isfinite(value):
            watch.broken = True
            continue
        watch.held = watch.held + 1 if same(value, watch.last) else 1
        watch.last = value
        if value == 0 and watch.broken:
            found[row] = True
            if not watch.said:
                watch.said = True
                says = f"{name} is exactly 0 behind a value that was not finite: a filter of the log put it there."
                faults.append((int(row), Fault("masked_nonfinite", name, says)))
        elif watch.held >= dead_records:
            found[row] = True
        elif value != 0 and not broken[row]:
            watch.broken = watch.said = False
    return found
