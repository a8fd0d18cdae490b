"""A loss that a log's filter put where there was none, and a norm that a skipped step left standing (design §4.9).

Trainers replace a loss that is not finite by the mean of those before it: the curve stays plausible and goes on as a line
(case A18). Two things tell: the loss was counted as not finite and is; or the gradient is not finite while the loss has lost its
noise. And a step that was skipped has no gradient norm, but many logs repeat the last one (case A05).
"""

from __future__ import annotations

import numpy as np

from .block import Block, Bools, Column, Floats
from .instrument import Fault, Watch, repeated

#: Losses before it that tell the noise, and the fewest that do.
BEFORE, FEWEST = 50, 20
#: Losses in a row beside a broken gradient that have lost their noise if they move by less than this share of it.
IN_A_ROW, COLLAPSED = 5, 0.05

Faults = list[tuple[int, Fault]]


def masked_losses(watches: dict[str, Watch], block: Block) -> tuple[Bools | None, Faults]:
    """Return the rows whose loss is none, None for no row, and what is to be said."""
    loss = block.columns.get(("loss",))
    if loss is None:
        return None, []
    counted, broken = _counted(block, "loss"), _broken(block)
    if counted is None and broken is None:
        return None, []
    watch = watches.setdefault("masked loss", Watch())
    nowhere: Bools = np.zeros(len(block), dtype=np.bool_)
    counted = nowhere if counted is None else counted
    broken = counted if broken is None else broken | counted
    if not broken.any() and not watch.broken:
        _remember(watch, loss.values[loss.present])
        return None, []
    hidden, faults = nowhere.copy(), []
    for row in np.flatnonzero(loss.present & np.isfinite(loss.values)).tolist():
        value = float(loss.values[row])
        if not broken[row]:
            if watch.broken:
                watch.broken, watch.said, watch.newest = False, False, []
            _remember(watch, np.array([value]))
            continue
        watch.broken = True
        watch.newest = [*watch.newest[1 - IN_A_ROW :], value]
        if value == 0 or not (counted[row] or _noiseless(watch)):  # zeros are looked at elsewhere
            continue
        hidden[row] = True
        if not watch.said:
            watch.said = True
            faults.append((row, Fault("masked_nonfinite", "loss", _says(value, bool(counted[row])))))
    return (hidden if hidden.any() else None), faults


def _says(value: float, counted: bool) -> str:
    if counted:
        return f"The loss was not finite and is written down as {value:.6g}: a filter of the log put it there."
    return (
        f"The loss stays at {value:.6g} while the gradient is not finite: "
        "a filter of the log puts the mean of the losses before it there."
    )


def _counted(block: Block, quantity: str) -> Bools | None:
    column = block.columns.get(("nonfinite", quantity))
    if column is None:
        return None
    with np.errstate(invalid="ignore"):
        found: Bools = column.present & (column.values > 0)
    return found


def _broken(block: Block) -> Bools | None:
    """Say where the gradient is not finite, by its norm or by a counter; None where neither is known."""
    norm = block.columns.get(("grad_norm", "all"))
    found = None if norm is None else norm.present & ~np.isfinite(norm.values)
    for quantity in ("grad", "all"):
        more = _counted(block, quantity)
        if more is not None:
            found = more if found is None else found | more
    return found


def _remember(watch: Watch, values: Floats) -> None:
    sound = values[-BEFORE:]
    if not np.isfinite(sound).all():
        sound = sound[np.isfinite(sound)]
    watch.recent = np.concatenate((watch.recent, sound))[-BEFORE:]


def _noiseless(watch: Watch) -> bool:
    if len(watch.recent) < FEWEST or len(watch.newest) < IN_A_ROW:
        return False
    noise = float(np.median(np.abs(watch.recent - np.median(watch.recent))))
    return max(watch.newest) - min(watch.newest) <= COLLAPSED * 1.4826 * noise


def stale_norms(watches: dict[str, Watch], block: Block) -> tuple[Bools | None, Faults]:
    """Return the rows at which a skipped step repeats the norm before it, None for no row, and what is to be said.

    A step is known to be skipped by its own word, or by a loss scale that fell.
    """
    norm = block.columns.get(("grad_norm", "all"))
    skips, scale = block.columns.get(("skipped",)), block.columns.get(("loss_scale",))
    if norm is None:
        return None, []
    watch, scales = watches.setdefault("stale grad_norm", Watch()), watches.setdefault("stale scale", Watch())
    equal = _equal_to_last(watch, norm)  # also where nothing tells of skipped steps: the next block may
    skipped = np.zeros(len(block), dtype=np.bool_) if scale is None else _fell(scales, scale)
    if skips is not None:
        skipped |= skips.present & (skips.values > 0)
    hidden: Bools = equal & skipped
    faults: Faults = []
    if watch.said or hidden.any():
        for row in np.flatnonzero(norm.present).tolist():
            if hidden[row] and not watch.said:
                says = f"grad_norm repeats {norm.values[row]:g} on a step that was skipped: it is not measured anew."
                faults.append((row, Fault("repeated_signal", "grad_norm", says)))
            watch.said = bool(hidden[row]) or (watch.said and bool(equal[row]))
    return (hidden if hidden.any() else None), faults


def _equal_to_last(watch: Watch, column: Column) -> Bools:
    """Say at which rows a value is the one measured before it."""
    found: Bools = np.zeros(len(column.values), dtype=np.bool_)
    values = column.values[column.present]
    if len(values):
        found[column.present] = repeated(values, watch.last)
        watch.last = float(values[-1])
    return found


def _fell(watch: Watch, column: Column) -> Bools:
    found: Bools = np.zeros(len(column.values), dtype=np.bool_)
    values = column.values[column.present]
    if len(values):
        before = np.concatenate(([watch.last], values[:-1]))
        with np.errstate(invalid="ignore"):
            found[column.present] = values < before
        watch.last = float(values[-1])
    return found
