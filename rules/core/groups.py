"""In which parameter groups or modules the gradient norm is that an incident speaks of.

A norm is a sum of squares: where most of its excess over the records before lies in one or two groups, these are named (cases A32
and B13: 95 % in the output projection). Labels of the table of signals are groups, any other that a log gives is a module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct, field

from trainwarden.record import Step, Value
from trainwarden.signals import GROUPS

from .facts import Finding

#: Records that are remembered, and labels of one record that are.
KEPT, LABELS = 128, 64
#: Share of the excess that the named ones must make up, and how many they may be: what is everywhere is nowhere.
MOST, FEW = 0.7, 2
#: Verdicts of slow growth: no records before it are left to compare with.
DRIFTS = ("drift",)


#: How a flat log calls the norm of a module, and what behind it is no module.
FLAT = "grad_norm_"
#: How logs call a module's share of the squared norm: as an object by module, or flat with the module behind it (case A32).
SHARES = ("grad_norm_sq_share", "grad_norm_share", "grad_sq_share", "grad_share")
NO_MODULES = frozenset(
    {"all", "total", "global", "clipped", "unclipped", "clip", "scaled", "pre", "post", "before", "after", "pre_clip"}
    | {
        "post_clip",
        "before_clip",
        "after_clip",
        "max",
        "min",
        "mean",
        "avg",
        "median",
        "std",
        "ema",
        "window_max",
        "window_min",
    }
)


class Norms(Struct):
    """Squared norms by label of one record."""

    step: int
    squares: dict[str, float]


class GroupNorms(Struct):
    """The newest records that hold gradient norms by group."""

    rows: list[Norms] = field(default_factory=list)

    def extend(self, records: Sequence[Step]) -> None:
        """Remember consecutive records; one after another or together is the same."""
        for record in records[-KEPT:]:
            shares, norms = _shares(record), _norms(record)
            if shares is None and norms is None:
                continue
            squares = {
                label: value if shares is not None else value * value
                for label, value in (shares or norms or {}).items()
                if label not in NO_MODULES and isinstance(value, float) and math.isfinite(value)
            }
            if 0 < len(squares) <= LABELS:
                self.rows.append(Norms(record.step, squares))
        if len(self.rows) > KEPT:
            del self.rows[:-KEPT]


def _norms(record: Step) -> dict[str, Value] | None:
    """Return a record's norms by label, None where it holds none: grouped, or as columns of their own."""
    norms = record.signals.get("grad_norm")
    if isinstance(norms, dict) and len(norms) > 1:
        return norms
    flat = [name for name in record.signals if name.startswith(FLAT)]
    return {name[len(FLAT) :]: record.signals[name] for name in flat} if len(flat) > 1 else None


def _shares(record: Step) -> dict[str, Value] | None:
    """Return each module's part of a record's squared norm, None where it holds only norms, or no norm to take a part of."""
    norm = record.value("grad_norm")
    for name in SHARES:
        told = record.signals.get(name)
        shares = told if isinstance(told, dict) else {}
        flat = f"{name}_"
        shares = shares or {one[len(flat) :]: record.signals[one] for one in record.signals if one.startswith(flat)}
        if shares and norm is not None:
            whole = norm * norm
            return {label: value * whole for label, value in shares.items() if isinstance(value, float)}
    return None


def where(norms: GroupNorms, onset: int, drifts: bool) -> list[tuple[str, float]]:
    """Return the labels that hold most of the excess since ``onset`` with their share of it, none where it is everywhere.

    ``drifts``: it grew so slowly that all of the norm is the excess.
    """
    since = [row for row in norms.rows if row.step >= onset or drifts]
    before = [] if drifts else [row for row in norms.rows if row.step < onset]
    if not since or (not drifts and not before):
        return []
    usual, now = _means(before), _means(since)
    excess = {label: max(0.0, value - usual.get(label, 0.0)) for label, value in now.items()}
    total = sum(excess.values())
    if len(excess) < 2 or not 0 < total < math.inf:
        return []
    named: list[tuple[str, float]] = []
    for label, value in sorted(excess.items(), key=lambda item: (-item[1], item[0])):
        named.append((label, value / total))
        if sum(share for _, share in named) >= MOST:
            return named if len(named) <= FEW else []
    return []


def finding(named: Sequence[tuple[str, float]], onset: int, drifts: bool) -> Finding:
    """Return what is said of them."""
    parts = " and ".join(f"{100 * share:.0f} % in {label}" for label, share in named)
    what = "the squared gradient norm" if drifts else "the growth of the squared gradient norm"
    return Finding(kind="grad_groups", says=f"Of {what}, {parts}.", step=onset)


def split(named: Sequence[tuple[str, float]]) -> tuple[list[str], list[str]]:
    """Return the groups and the modules among the labels."""
    labels = [label for label, _ in named]
    return [one for one in labels if one in GROUPS], [one for one in labels if one not in GROUPS]


def _means(rows: Sequence[Norms]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        for label, value in row.squares.items():
            sums[label] = sums.get(label, 0.0) + value
    return {label: value / len(rows) for label, value in sums.items()}
