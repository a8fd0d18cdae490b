"""Puts together what a step ate: record by record the samples, the rows behind them, and their text. What is not known says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges, encode_numbers

from .dataset import DataSet
from .records import DataError, Found, Record

#: Signals of a record that are shown with its samples.
SHOWN = (
    "loss",
    "loss_expected",
    "source_share",
    "batch_unique_token_ratio",
    "batch_longest_repeat_tokens",
    "batch_token_share",
)
#: Those of them that are numbers by a name.
BY_NAME_ONLY = frozenset(("source_share", "batch_token_share"))

#: ``(epoch, positions) -> rows``, each with ``position``, ``row``, ``shard``, ``row_in_shard`` and ``instead_of``, as the exporter's
#: loader tells them (:class:`exporter.loader.rebuilt.Row`). It raises ValueError where the rows cannot be told.
RowsAt = Callable[[int, Ranges], Sequence[Any]]
#: Makes it from the fields of a start event; raises ValueError, too.
Rebuild = Callable[[Mapping[str, Any]], RowsAt]


@dataclass(slots=True)
class Asked:
    """What is wanted of each step. ``limit``: samples of a rank and step, 0 for all. ``characters`` of each text, 0 for all."""

    rebuild: Rebuild
    dataset: DataSet | None = None
    limit: int = 32
    characters: int = 0


@dataclass(slots=True)
class _Telling:
    asked: Asked
    rebuilt: dict[tuple[str, int], RowsAt | str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    #: Why texts could not be read, once that was so.
    unread: str | None = None

    def say(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    def rows_at(self, record: Record) -> RowsAt | str:
        """Return what tells the rows of this record's start, or the sentence that says why nothing does."""
        key = (record.start_id, record.rank)
        if key not in self.rebuilt:
            if record.start is None:
                self.rebuilt[key] = (
                    "the start event is not in the journal any more: which rows lay at the positions is not known"
                )
            else:
                try:
                    self.rebuilt[key] = self.asked.rebuild(record.start)
                except ValueError as error:
                    self.rebuilt[key] = str(error)
                except Exception as error:  # what it says of the loader is damaged, or an order of the user's failed
                    self.rebuilt[key] = f"the order cannot be rebuilt: {type(error).__name__}: {error}"
        return self.rebuilt[key]


def assemble(run: str, run_uid: str | None, found: Found, asked: Asked) -> dict[str, Any]:
    """Return everything that is known, as plain data; see docs/data-show.md for its fields."""
    telling = _Telling(asked, notices=list(found.notices))
    steps = [_step(records, telling) for records in found.steps.values()]
    raw = {"run": run, "run_uid": run_uid, "steps": steps, "notices": telling.notices, "unread": telling.unread}
    whole: dict[str, Any] = encode_numbers(raw)
    return whole


def _step(records: Sequence[Record], telling: _Telling) -> dict[str, Any]:
    first = records[0]
    start = next((record.start for record in records if record.start is not None), {})
    told = start.get("loader") or {}
    epoch = first.step.value("epoch")
    return {
        "step": first.step.step,
        "attempt": first.attempt,
        "start_id": first.start_id,
        "time": first.step.time,
        "epoch": None if epoch is None else int(epoch),
        "samples": [list(span) for span in merge_ranges([span for record in records for span in record.step.samples])],
        "dataset": start.get("dataset"),
        "order": told.get("order"),
        "seed": told.get("seed"),
        "ranks": [_rank(record, telling) for record in records],
    }


def _rank(record: Record, telling: _Telling) -> dict[str, Any]:
    step = record.step
    count = sum(end - first for first, end in step.samples)
    rows, why = _rows(record, telling)
    limit = telling.asked.limit
    shown = rows[:limit] if limit else rows
    return {
        "rank": record.rank,
        **{name: step.signals[name] for name in SHOWN if name in step.signals and _fits(name, step.signals[name])},
        "samples": [list(span) for span in step.samples],
        "count": count,
        "substituted": int(step.value("substituted_samples") or 0),
        "shards": [{"name": span.name, "first": span.first, "end": span.end} for span in step.shards],
        "rows": [_row(row, telling) for row in shown],
        "more": len(rows) - len(shown),
        "unknown": why,
    }


def _fits(name: str, value: Any) -> bool:
    """Say whether a signal is a number, or numbers by a name, as it has to be: nobody vouches for a journal."""
    if isinstance(value, dict):
        return name in BY_NAME_ONLY and not any(isinstance(one, dict) for one in value.values())
    return name not in BY_NAME_ONLY


def _rows(record: Record, telling: _Telling) -> tuple[Sequence[Any], str | None]:
    """Return the rows of a record, or why they are not known."""
    samples, epoch = record.step.samples, record.step.value("epoch")
    if not samples:
        return [], "no sample positions were recorded: pass the loader through exporter.wrap()"
    rows_at = telling.rows_at(record)
    if isinstance(rows_at, str):
        return [], rows_at
    size, dataset = (record.start or {}).get("dataset_size"), telling.asked.dataset
    if dataset is not None and size is not None and len(dataset) != size:
        telling.say(
            f"the data set that is named has {len(dataset)} rows, and the one that was trained on had {size}: what is shown may be other data"
        )
    try:
        return rows_at(int(epoch or 0), samples), None
    except ValueError as error:
        return [], str(error)
    except Exception as error:
        return [], f"the order cannot be rebuilt: {type(error).__name__}: {error}"


def _row(row: Any, telling: _Telling) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "position": row.position,
        "row": row.row,
        "shard": row.shard,
        "row_in_shard": row.row_in_shard,
        "instead_of": row.instead_of,
    }
    dataset = telling.asked.dataset
    if dataset is None or telling.unread is not None:
        return shown
    try:
        sample = dataset.read(row.row)
    except DataError as error:
        telling.unread = str(error)
        return shown
    most = telling.asked.characters or None
    text, tokens = sample.text, sample.tokens
    length = len(text if text is not None else tokens or ())
    shown.update(
        file=sample.file,
        byte=sample.byte,
        line=sample.line,
        text=None if text is None else _written(text[:most]),
        tokens=None if tokens is None else tokens[:most],
        length=length,
        cut=most is not None and most < length,
    )
    return shown


def _written(text: str) -> str:
    """Return a text that can be written as UTF-8: a byte that was none stands as ``\\xNN``, half a character as ``\\uNNNN``."""
    return _HALVES.sub(_number, text)


#: Surrogates: half a character, or (PEP 383) a byte that was no UTF-8.
_HALVES = re.compile("[\ud800-\udfff]")


def _number(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
