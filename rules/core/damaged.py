"""Rows of the tables of tokens that a rank found damaged, as its events of kind ``embedding_rows`` tell them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from trainwarden.record import Event

from .counted import counted

#: Events that are remembered, and rows of one that are named: as many as the exporter names.
MOST, NAMED = 64, 8
#: Steps between two looks at the usual cadence: a damage is at most so much older than the event that tells it.
LOOK = 100
#: The tables of tokens: that of the input, and that of the output where it is another.
TABLES = ("token", "head")
#: A token's number is below this.
LARGEST = 2**53


class Damaged(Struct, frozen=True):
    """Rows newly found damaged at a step: tokens, their L2 norms (NaN where not finite) and the median of trained rows.

    ``rows`` counts all damaged rows of the table at that look, those that are not named among them.
    """

    step: int
    rank: int
    table: str
    ids: tuple[int, ...]
    norms: tuple[float, ...]
    median: float
    rows: int

    @property
    def nonfinite(self) -> bool:
        """Whether one of the named rows holds a number that is not finite."""
        return not all(map(math.isfinite, self.norms))


def take(known: list[Damaged], rank: int, event: Event) -> None:
    """Remember an event that names a table and tokens; what else it holds may be missing."""
    fields = event.fields
    table, ids, norms = fields.get("table"), fields.get("ids"), fields.get("norms")
    if event.step is None or table not in TABLES or not isinstance(ids, list) or not 0 < len(ids) <= 3 * NAMED:
        return
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < LARGEST for one in ids):
        return
    told = norms if isinstance(norms, list) and len(norms) == len(ids) else [None] * len(ids)
    counts = [fields.get(name) for name in ("nonfinite", "long", "lost")]
    rows = sum(one for one in counts if isinstance(one, int) and not isinstance(one, bool) and 0 < one < LARGEST)
    named = (tuple(ids[:NAMED]), tuple(map(_number, told[:NAMED])), _number(fields.get("median")))
    known.append(Damaged(event.step, rank, str(table), *named, max(rows, len(ids))))
    del known[:-MOST]


def _number(value: object) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if known else math.nan  # type: ignore[arg-type]


def first(known: Sequence[Damaged], begin: int, end: int) -> tuple[Damaged, ...]:
    """Return those of the first step that has any, from ``begin`` to ``end``, the embedding before the head, then by rank."""
    among = [one for one in known if begin <= one.step <= end]
    step = min((one.step for one in among), default=0)
    return tuple(sorted((one for one in among if one.step == step), key=lambda one: (one.table == "head", one.rank)))


def sentence(found: Sequence[Damaged]) -> str:
    """Return what is said of the first table's rows: whose they are, and how long the worst is beside the others."""
    one = found[0]
    alike = [other for other in found if other.table == one.table]
    norms = {token: norm for other in alike for token, norm in zip(other.ids, other.norms, strict=True)}
    tokens = list(norms)[:NAMED]
    more = 0 if few(alike) else max(len(norms), *(other.rows for other in alike)) - len(tokens)
    listed = ", ".join(map(str, tokens)) + (f" and {more} more" if more > 0 else "")
    rows = f"rows of tokens {listed} were" if len(norms) > 1 else f"row of token {listed} was"
    table = "the head" if one.table == "head" else "the embedding"
    where = f", on rank {one.rank}" if one.rank and len({other.rank for other in alike}) == 1 else ""
    return f"The {rows} found damaged in {table} at step {one.step}{where}: {_how(norms[tokens[0]], one.median)}."


def _how(norm: float, median: float) -> str:
    if not math.isfinite(norm):
        return "not finite"
    against = f" against a median of {median:.4g}" if math.isfinite(median) else ""
    return f"norm {norm:.4g}{against}"


def few(found: Sequence[Damaged]) -> bool:
    """Say whether all that is newly damaged is named: a table of which more is tells of no single token."""
    return all(len(one.ids) < NAMED for one in found)


def between(one: Damaged) -> str:
    """Return the steps in which the damage was done, at the usual cadence of looks."""
    return f"the {counted(min(LOOK, one.step), 'step')} before step {one.step}"
