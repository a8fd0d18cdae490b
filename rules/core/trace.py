"""The remembered records of one start: a bounded, columnar history of the few signals that judgement looks at.

It serves evidence, trends and the comparison of a resumed attempt with its parent; detection has its own windows in the
rule language. Memory is bounded by ``limit`` rows; the oldest go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges, ShardSpan, Step
from trainwarden.signals import MOST_SOURCES

from .block import Block, Bools, Floats, Ints

#: What is remembered: the name here, then signal and labels of the record.
TRACKED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss",)),
    ("grad_norm", ("grad_norm", "all")),
    ("update_ratio", ("update_ratio", "all")),
    ("lr", ("lr", "all")),
    ("clip_ratio", ("clip_ratio",)),
    ("loss_scale", ("loss_scale",)),
    ("skipped", ("skipped",)),
    ("guard_nonfinite", ("guard_skipped_steps", "nonfinite")),
    ("guard_limit", ("guard_skipped_steps", "limit")),
    ("guard_surge", ("guard_skipped_steps", "surge")),
    ("optimizer_step", ("optimizer_step",)),
    ("beta2", ("beta2",)),
    ("exp_avg", ("moment_rms", "exp_avg", "all")),
    ("exp_avg_sq", ("moment_rms", "exp_avg_sq", "all")),
    ("nonfinite_loss", ("nonfinite", "loss")),
    ("nonfinite_grad", ("nonfinite", "grad")),
    ("nonfinite_param", ("nonfinite", "param")),
    ("epoch", ("epoch",)),
    ("sample_position", ("sample_position",)),
    ("samples_seen", ("samples_seen",)),
    ("shard", ("shard",)),
    ("shard_id", ("shard_id",)),
    ("batch_longest_repeat_tokens", ("batch_longest_repeat_tokens",)),
    ("batch_unique_token_ratio", ("batch_unique_token_ratio",)),
    ("batch_supervised_tokens", ("batch_supervised_tokens",)),
    ("substituted_samples", ("substituted_samples",)),
    ("loss_expected", ("loss_expected",)),
    ("grad_zero_ratio", ("grad_zero_ratio", "all")),
    ("update_applied_ratio", ("update_applied_ratio", "all")),
    ("weight_rms", ("weight_rms", "all")),
    ("activation_absmax", ("activation_absmax", "all")),
    ("attention_logit_sampled", ("attention_logit", "sampled")),
    ("attention_logit_lse", ("attention_logit", "lse")),
    ("grad_norm_embedding", ("grad_norm", "embedding")),
    ("embedding_row_ratio", ("embedding_row_ratio", "token")),
    ("router_z", ("router_z", "all")),
    ("dead_experts", ("dead_experts", "all")),
    ("rank_grad_norm", ("rank_grad_norm",)),
    ("gpu_throttled", ("gpu_throttled",)),
)

#: The mix of sources, where records tell it: a column a source, named ``source_share/NAME``; a source that a record does not name is NaN.
SOURCES = "source_share"

#: The batch's fingerprint: what dirty data looks like.
FINGERPRINT = ("batch_longest_repeat_tokens", "batch_unique_token_ratio", "batch_supervised_tokens")

_NOTHING = -1
#: A cut moves everything: it is made once for this part of the limit.
SLACK = 4


def _ints(n: int) -> Any:
    return np.full(n, _NOTHING, dtype=np.int64)


class Trace(Struct):
    """Rows of consecutive records. Columns grow by doubling, and are cut to the newest ``limit`` rows a quarter beyond it.

    A step's samples are one range in nearly all runs and its shards one or two spans, so both are kept as numbers, with the odd
    row that has more beside them.
    """

    limit: int
    n: int = 0
    step_column: np.ndarray = field(default_factory=lambda: _ints(0))
    time_column: np.ndarray = field(default_factory=lambda: np.zeros(0))
    stride_column: np.ndarray = field(default_factory=lambda: _ints(0))
    values: dict[str, np.ndarray] = field(default_factory=dict)
    present: dict[str, np.ndarray] = field(default_factory=dict)
    sample_first: np.ndarray = field(default_factory=lambda: _ints(0))
    sample_end: np.ndarray = field(default_factory=lambda: _ints(0))
    more_samples: dict[int, Ranges] = field(default_factory=dict)
    shard_of: np.ndarray = field(default_factory=lambda: _ints(0))
    more_shards: dict[int, list[int]] = field(default_factory=dict)
    spans: list[ShardSpan] = field(default_factory=list)

    def __len__(self) -> int:
        return self.n

    def append(self, record: Step) -> None:
        """Remember one record. Steps ascend."""
        if self.n == len(self.step_column):
            self._resize(max(64, 2 * self.n))
        row = self.n
        self.step_column[row] = record.step
        self.time_column[row] = record.time
        self.stride_column[row] = record.stride
        for name, labels in TRACKED:
            value = record.value(*labels)
            if value is None and name == "sample_position" and record.samples:
                value = float(max(end for _, end in record.samples))
            if value is None:
                if name in self.values:
                    self.present[name][row] = False
                continue
            if name not in self.values:
                self.values[name] = np.full(len(self.step_column), np.nan)
                self.present[name] = np.zeros(len(self.step_column), dtype=np.bool_)
            self.values[name][row] = value
            self.present[name][row] = True
        shares = record.signals.get(SOURCES)
        for source, share in shares.items() if isinstance(shares, dict) else ():
            column = self._source(source)
            if column is not None and not isinstance(share, dict):
                self.values[column][row], self.present[column][row] = share, True
        self._put_samples(row, record)
        self._put_shards(row, record)
        self.n += 1
        if self.n >= self.limit + self.limit // SLACK:
            self._cut(self.n - self.limit)

    def extend(self, block: Block, records: Sequence[Step], first: int, end: int) -> None:
        """Remember the records ``[first, end)`` of a block: as :meth:`append` one after another, and much quicker."""
        while first < end:
            rows = min(end - first, self.limit + self.limit // SLACK - self.n)
            self._put(block, records[first : first + rows], first)
            first += rows
            if self.n >= self.limit + self.limit // SLACK:
                self._cut(self.n - self.limit)

    def _put(self, block: Block, records: Sequence[Step], first: int) -> None:
        rows = len(records)
        if self.n + rows > len(self.step_column):
            self._resize(max(64, 2 * self.n, self.n + rows))
        into, source = slice(self.n, self.n + rows), slice(first, first + rows)
        self.step_column[into] = block.step[source]
        self.time_column[into] = block.time[source]
        self.stride_column[into] = block.stride[source]
        for name, labels in TRACKED:
            column = block.columns.get(labels)
            if column is None and len(labels) == 1:
                column = block.columns.get((*labels, "all"))
            if column is None or not column.present[source].any():
                if name in self.values:
                    self.present[name][into] = False
                continue
            if name not in self.values:
                self.values[name] = np.full(len(self.step_column), np.nan)
                self.present[name] = np.zeros(len(self.step_column), dtype=np.bool_)
            self.values[name][into] = column.values[source]
            self.present[name][into] = column.present[source]
        for key, shares in block.columns.items():
            if key[0] == SOURCES and len(key) == 2 and shares.present[source].any():
                own = self._source(key[1])
                if own is not None:
                    self.values[own][into] = np.where(shares.present[source], shares.values[source], np.nan)
                    self.present[own][into] = shares.present[source]
        self.sample_first[into] = self.sample_end[into] = self.shard_of[into] = _NOTHING
        self._put_all_samples(into, records)
        last: list[ShardSpan] = []
        place = _NOTHING
        for row, record in enumerate(records, start=self.n):
            if record.shards:
                if len(record.shards) > 1 or record.shards != last:
                    self._put_shards(row, record)
                    last, place = record.shards, int(self.shard_of[row])
                else:
                    self.shard_of[row] = place
        self.n += rows

    def _source(self, source: str) -> str | None:
        """Return the column of a source; None for one beyond those that an exporter tells apart."""
        name = f"{SOURCES}/{source}"
        if name not in self.values:
            if len(self.sources()) > MOST_SOURCES:
                return None
            self.values[name] = np.full(len(self.step_column), np.nan)
            self.present[name] = np.zeros(len(self.step_column), dtype=np.bool_)
        return name

    def sources(self) -> list[str]:
        """Return the sources that records named."""
        return [name.partition("/")[2] for name in self.values if name.startswith(f"{SOURCES}/")]

    def _put_all_samples(self, into: slice, records: Sequence[Step]) -> None:
        samples = [record.samples for record in records]
        counts = set(map(len, samples))
        if counts == {1}:
            pairs = np.array([ranges[0] for ranges in samples], dtype=np.int64)
            if (pairs[:, 0] < pairs[:, 1]).all():
                self.sample_first[into], self.sample_end[into] = pairs[:, 0], pairs[:, 1]
                return
        if counts != {0}:
            for row, record in enumerate(records, start=into.start):
                if record.samples:
                    self._put_samples(row, record)

    def _put_samples(self, row: int, record: Step) -> None:
        samples = record.samples
        if len(samples) != 1 or samples[0][0] >= samples[0][1]:
            samples = merge_ranges(samples)
        self.sample_first[row], self.sample_end[row] = (samples[0][0], samples[-1][1]) if samples else (-1, -1)
        if len(samples) > 1:
            self.more_samples[record.step] = samples

    def _put_shards(self, row: int, record: Step) -> None:
        found = [self._span(span) for span in record.shards]
        self.shard_of[row] = found[0] if found else _NOTHING
        if len(found) > 1:
            self.more_shards[record.step] = found

    def _span(self, span: ShardSpan) -> int:
        # A shard is read in neighbouring steps: it is among the last few that were seen, or it is new.
        for place in range(len(self.spans) - 1, max(-1, len(self.spans) - 9), -1):
            if self.spans[place] == span:
                return place
        self.spans.append(span)
        return len(self.spans) - 1

    def _resize(self, size: int) -> None:
        def grown(old: Any, filling: Any) -> Any:
            new = np.full(size, filling, dtype=old.dtype)
            new[: self.n] = old[: self.n]
            return new

        self.step_column = grown(self.step_column, _NOTHING)
        self.time_column = grown(self.time_column, np.nan)
        self.stride_column = grown(self.stride_column, 1)
        self.sample_first = grown(self.sample_first, _NOTHING)
        self.sample_end = grown(self.sample_end, _NOTHING)
        self.shard_of = grown(self.shard_of, _NOTHING)
        for name in self.values:
            self.values[name] = grown(self.values[name], np.nan)
            self.present[name] = grown(self.present[name], False)

    def _cut(self, rows: int) -> None:
        keep = slice(rows, self.n)
        self.step_column = self.step_column[keep].copy()
        self.time_column = self.time_column[keep].copy()
        self.stride_column = self.stride_column[keep].copy()
        self.sample_first = self.sample_first[keep].copy()
        self.sample_end = self.sample_end[keep].copy()
        for name in self.values:
            self.values[name] = self.values[name][keep].copy()
            self.present[name] = self.present[name][keep].copy()
        self.n -= rows
        oldest = int(self.step_column[0])
        self.more_samples = {step: ranges for step, ranges in self.more_samples.items() if step >= oldest}
        self.more_shards = {step: places for step, places in self.more_shards.items() if step >= oldest}
        own = self.shard_of[keep]
        used = sorted(set(np.unique(own[own >= 0]).tolist()).union(*self.more_shards.values()))
        renamed = {old: new for new, old in enumerate(used)}
        self.spans = [self.spans[old] for old in used]
        self.shard_of = np.where(own >= 0, np.searchsorted(np.array(used, dtype=np.int64), own), _NOTHING)
        self.more_shards = {step: [renamed[old] for old in places] for step, places in self.more_shards.items()}

    def compact(self) -> None:
        """Give back the room kept for growth, before the trace is stored."""
        self._resize(self.n)

    @property
    def steps(self) -> Ints:
        """Step numbers, ascending."""
        found: Ints = self.step_column[: self.n]
        return found

    def times(self) -> Floats:
        """Unix seconds of the records."""
        found: Floats = self.time_column[: self.n]
        return found

    def column(self, name: str) -> Floats:
        """Return a signal's values; what is absent is NaN here, see :meth:`measured`."""
        found: Floats | None = self.values.get(name)
        return np.full(self.n, np.nan) if found is None else found[: self.n]

    def measured(self, name: str) -> Bools:
        """Say at which rows the signal was measured (a measured NaN is)."""
        found: Bools | None = self.present.get(name)
        return np.zeros(self.n, dtype=np.bool_) if found is None else found[: self.n]

    def left_out(self, rows: slice) -> Floats:
        """Return in how many steps of each record a guard left the update out; 0 where there is none."""
        causes = [self.column(f"guard_{cause}")[rows] for cause in ("nonfinite", "limit", "surge")]
        found: Floats = np.nansum(causes, axis=0)
        return found

    def row(self, step: int) -> int:
        """Return the first row whose step is at least ``step``; ``len(self)`` where there is none."""
        return int(np.searchsorted(self.steps, step))

    def rows(self, first: int, end: int) -> slice:
        """Return the rows with ``first <= step < end``."""
        return slice(self.row(first), self.row(end))

    def at(self, name: str, step: int) -> float | None:
        """Return a signal's value in the record of exactly ``step``, or None."""
        row = self.row(step)
        if row >= self.n or self.step_column[row] != step or not self.measured(name)[row]:
            return None
        return float(self.values[name][row])

    def samples(self, row: int) -> Ranges:
        """Return the sample positions that a row's step consumed."""
        more = self.more_samples.get(int(self.step_column[row]))
        if more is not None:
            return list(more)
        first, end = int(self.sample_first[row]), int(self.sample_end[row])
        return [] if first < 0 else [(first, end)]

    def shards(self, row: int) -> list[ShardSpan]:
        """Return the shards that a row's step drew from."""
        more = self.more_shards.get(int(self.step_column[row]))
        if more is not None:
            return [self.spans[place] for place in more]
        place = int(self.shard_of[row])
        return [] if place < 0 else [self.spans[place]]

    def stride(self) -> int:
        """Return the usual stride of the records, at least 1."""
        return max(1, int(np.median(self.stride_column[max(0, self.n - 50) : self.n]))) if self.n else 1

    def interval(self) -> float | None:
        """Return the usual seconds between the newest records, or None."""
        gaps = np.diff(self.times()[-50:])
        gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
        return float(np.median(gaps)) if len(gaps) else None

    def cadence(self, name: str) -> int:
        """Return the usual number of steps between two measurements of a signal, at least 1."""
        steps = self.steps[self.measured(name)][-50:]
        return max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1


def joined(older: Trace, newer: Trace) -> Trace:
    """Return the rows of both, ``newer`` behind ``older``; steps ascend over the border."""
    if not len(older):
        return newer
    names = dict.fromkeys([*older.values, *newer.values])
    shift = len(older.spans)
    shards = newer.shard_of[: newer.n]
    return Trace(
        limit=newer.limit,
        n=older.n + newer.n,
        step_column=np.concatenate([older.steps, newer.steps]),
        time_column=np.concatenate([older.times(), newer.times()]),
        stride_column=np.concatenate([older.stride_column[: older.n], newer.stride_column[: newer.n]]),
        values={name: np.concatenate([older.column(name), newer.column(name)]) for name in names},
        present={name: np.concatenate([older.measured(name), newer.measured(name)]) for name in names},
        sample_first=np.concatenate([older.sample_first[: older.n], newer.sample_first[: newer.n]]),
        sample_end=np.concatenate([older.sample_end[: older.n], newer.sample_end[: newer.n]]),
        more_samples=older.more_samples | newer.more_samples,
        shard_of=np.concatenate([older.shard_of[: older.n], np.where(shards >= 0, shards + shift, shards)]),
        more_shards=older.more_shards | {at: [place + shift for place in own] for at, own in newer.more_shards.items()},
        spans=[*older.spans, *newer.spans],
    )
