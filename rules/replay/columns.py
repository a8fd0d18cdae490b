"""From the names that a log gives its numbers to signals.

A log's own words for the known signals are listed here; ``--map`` overrides them. What is not known becomes a signal of the
user's under a name that the rule language takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

from trainwarden.record import Value
from trainwarden.rules.core.language.operators import FUNCTIONS
from trainwarden.signals import BY_NAME, GROUPS

from .rows import STEP, TIME, Notices
from .texts import time_of

#: Words for a signal, lower case with ``_`` between them, the most telling first.
SYNONYMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        STEP,
        (
            "step",
            "global_step",
            "trainer_global_step",
            "train_global_step",
            "iteration",
            "iter",
            "_step",
            "steps",
            "train_step",
            "train_steps",
            "optimizer_step",
            "it",
            "iter_num",
            "num_updates",
            "update",
            "updates",
            "iterations",
            "iteration_number",
            "training_step",
            "optim_step",
            "opt_step",
            "train_iter",
            "train_iteration",
            "step_num",
            "n_iter",
            "batch",
            "current_steps",
        ),
    ),
    (
        TIME,
        (
            *("time", "timestamp", "_timestamp", "wall_time", "walltime", "unix_time", "created_at", "datetime"),
            *("date", "asctime", "ts", "logged_at"),
        ),
    ),
    (
        "loss",
        (
            "loss",
            "train_loss",
            "training_loss",
            "lm_loss",
            "train_loss_step",
            "train_lm_loss",
            "loss_train",
            "train_ce_loss",
            "train_cross_entropy_loss",
            "train_crossentropyloss",
            "loss_metrics_global_avg_loss",
            "global_avg_loss",
            "train_train_loss",
            "training_loss_step",
            "train_cross_entropy",
            "train_nll_loss",
            "train_total_loss",
            "train_loss_mean",
            "language_model_loss",
            "total_loss",
            "ce_loss",
            "nll_loss",
            "cross_entropy",
            "reduced_train_loss",
            "avg_loss",
            "mean_loss",
            "loss_mean",
            "loss_avg",
            "batch_loss",
            "train_loss_epoch",
        ),
    ),
    (
        "grad_norm",
        (
            "grad_norm",
            "gradient_norm",
            "global_grad_norm",
            "train_grad_norm",
            "train_gradient_norm",
            "train_global_grad_norm",
            "total_grad_norm",
            "optim_total_grad_norm",
            "grad_norm_total",
            "grad_norm_all",
            "grad_2_0_norm_total",
            "grad_2_norm_total",
            "l2_norm_grad_global",
            "gradnorm",
            "gnorm",
            "train_gnorm",
            "grad_norm_pre_clip",
            "grad_norm_before_clip",
            "grad_norm_unclipped",
            "pre_clip_grad_norm",
            "pre_clip_norm",
            "optim_grad_norm",
            "global_norm",
            "grad_norm_global",
            "global_gradient_norm",
            "gradient_global_norm",
            "grad_l2_norm",
            "gradient_norm_total",
        ),
    ),
    (
        "lr",
        (
            "lr",
            "learning_rate",
            "train_lr",
            "train_learning_rate",
            "optim_lr",
            "optim_learning_rate_group0",
            "lr_adamw",
            "lr_adam",
            "lr_adamw_pg1",
            "lr_adam_pg1",
            "lr_decoupledadamw_group0",
            "lr_group0",
            "lr_group_0",
            "lr_pg1",
            "lr_0",
            "learning_rate_0",
            "current_lr",
            "optimizer_lr",
            "trainer_lr",
        ),
    ),
    ("loss_scale", ("loss_scale", "train_loss_scale", "grad_scale", "amp_scale", "loss_scaler")),
    (
        "grad_norm_clipped",
        (
            "grad_norm_clipped",
            "clipped_grad_norm",
            "grad_norm_post_clip",
            "grad_norm_after_clip",
            "post_clip_grad_norm",
            "post_clip_norm",
        ),
    ),
    (
        "clip_threshold",
        ("clip_threshold", "max_grad_norm", "grad_clip", "clip_grad", "gradient_clip_val", "gradient_clipping", "clip"),
    ),
    (
        "router_aux_loss",
        ("router_aux_loss", "aux_loss", "load_balancing_loss", "moe_aux_loss", "train_aux_loss", "lb_loss"),
    ),
    ("update_zero_ratio", ("update_zero_ratio", "update_zero_fraction", "zero_update_fraction", "zero_update_share")),
    ("batch_token_id_max", ("batch_token_id_max", "token_id_max", "max_token_id")),
    ("vocabulary_size", ("vocabulary_size", "vocab_size", "vocab", "padded_vocab_size")),
    (
        "nonfinite.loss",
        ("number_of_nan_iterations", "nonfinite_total", "train_nonfinite_total", "nonfinite_loss_total"),
    ),
    (
        "skipped",
        (
            "skipped",
            "number_of_skipped_iterations",
            "skipped_iterations",
            "skipped_iters",
            "skipped_steps_total",
            "train_skipped_steps_total",
            "skipped_total",
        ),
    ),
    (
        "samples_seen",
        ("samples_seen", "samples", "consumed_samples", "train_consumed_samples", "num_samples_seen", "samples_total"),
    ),
    (
        "tokens",
        (
            "tokens",
            "tokens_seen",
            "consumed_tokens",
            "num_input_tokens_seen",
            "train_tokens",
            "total_tokens",
            "tokens_total",
            "n_tokens_seen",
            "throughput_total_tokens",
            "train_tokens_seen",
            "total_tokens_seen",
            "cumulative_tokens",
            "tokens_processed",
        ),
    ),
    ("epoch", ("epoch", "train_epoch", "trainer_epoch", "current_epoch")),
    ("step_duration_seconds", ("step_duration_seconds", "step_time", "iteration_time", "seconds_per_step")),
)
_COUNTS = re.compile(r"step|iter|update|token|sample", re.IGNORECASE)
_THOUSANDS = re.compile(rb"\d{1,3}(?:,\d{3})+")
_TIMES = frozenset(dict(SYNONYMS)[TIME])
#: Words of a line that a signal cannot bear, and those of the rule language.
TAKEN = frozenset(
    {"type", "seq", "step", "time", "stride", "samples", "shards", "ranks", "phase", "kind"}
    | {"or", "and", "unless", "not", "by", "offset"}
)
EVALUATION = re.compile(r"(?:eval|evaluation|val|valid|validation|test|dev)_.+|.+_(?:val|eval|validation)")
#: Signals of the user's own that one log may bring.
MOST_OWN = 256
#: Unix times of this century, in seconds; a thousand times that is milliseconds.
OLDEST, NEWEST = 946_684_800.0, 4_102_444_800.0

_LONGEST = 120
_MOST_WAYS = 512


#: Between the words of a name like ``trainLoss``.
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_time(name: str) -> bool:
    """Say whether a column of this name tells when."""
    return normal(name) in _TIMES


def told_by(name: str, text: bytes) -> float | None:
    """Return what a text that is no plain number tells in a column of this name, or None.

    A date and time in a column that tells when, as Unix seconds; a whole number with commas between its thousands in one that
    counts (in others a comma may be a decimal mark).
    """
    if _COUNTS.search(name) and _THOUSANDS.fullmatch(text.strip()):
        return float(text.replace(b",", b""))
    return time_of(text) if is_time(name) else None


def normal(name: str) -> str:
    """Return a column's name in lower case with ``_`` for all that is neither letter nor digit."""
    found = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return found.rstrip("_") if found.startswith("_") and name.startswith("_") else found.strip("_")


class MapError(ValueError):
    """A ``--map`` that cannot be meant. The message says what one looks like."""


def parse_maps(texts: Iterable[str]) -> dict[str, str]:
    """Return column to signal from texts like ``loss=train/loss``.

    Raises:
        MapError: a text is none of that kind, or the signal's name is none.
    """
    found: dict[str, str] = {}
    for text in texts:
        signal, equal, column = text.partition("=")
        signal = signal.strip()
        if not equal or not column:
            raise MapError(f"--map {text}: write SIGNAL=COLUMN, for example --map loss=train/loss")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[a-z_]+)?", signal):
            raise MapError(f"--map {text}: {signal!r} is no name of a signal: letters, digits and _")
        if signal in TAKEN - {STEP, TIME, "samples"} or signal in FUNCTIONS:
            raise MapError(f"--map {text}: {signal} is a word of trainwarden's own: choose another name")
        found[column] = "samples_seen" if signal == "samples" else signal
    return found


class _Way(msgspec.Struct):
    """How a row with certain names is mapped."""

    step: str | None
    time: str | None
    plain: list[tuple[str, str]]
    grouped: list[tuple[str, str, str]]


class Columns:
    """Decides once for each name in a log what it is, and maps rows by that."""

    def __init__(self, maps: Mapping[str, str], notices: Notices) -> None:
        self._maps = dict(maps)
        self._notices = notices
        self._target: dict[str, str] = {}
        self._taken: set[str] = set()
        self._leading: frozenset[str] | None = None
        self._own = 0
        self._ways: dict[tuple[str, ...], _Way] = {}
        self._totals: dict[str, float] = {}
        #: Raw names of evaluation results.
        self.evaluations: set[str] = set()

    def decide(self, names: Iterable[str], example: Mapping[str, float] | None = None) -> None:
        """Take in names that were not seen yet; where two could be one signal, the more telling word wins."""
        new = [name for name in names if name not in self._target]
        for name in new:
            if name in self._maps:
                self._give(name, self._maps[name])
        by_normal: dict[str, str] = {}
        for name in new:
            by_normal.setdefault(normal(name), name)
        for name in new:
            by_normal.setdefault(normal(_HUMP.sub("_", name)), name)
        mapped = set(self._maps.values())
        for signal, words in SYNONYMS:
            for word in words:
                found = by_normal.get(word)
                if found is None or found in self._target or signal in self._taken or signal in mapped:
                    continue
                if signal == TIME and _seconds((example or {}).get(found, math.nan)) is None:
                    continue
                self._give(found, signal)
        for name in new:
            if name not in self._target:
                self._give(name, self._other(name))

    def _give(self, name: str, signal: str) -> None:
        self._target[name] = signal
        self._taken.add(signal)
        self._leading = None
        known = BY_NAME.get(signal.partition(".")[0])
        if known is not None and known.type == "counter" and not known.cumulative and normal(name).endswith("_total"):
            self._totals[name] = math.nan

    def _other(self, name: str) -> str:
        """Return the signal that a name is none of the synonyms for: one of the table, a group's, or the user's own."""
        plain = normal(name)
        known = plain in BY_NAME and not {"quantity", "moment", "kind"} & set(BY_NAME[plain].labels)
        if known and plain not in self._taken and plain not in self._maps.values():
            return plain
        for group in GROUPS:
            base = plain.removesuffix(f"_{group}")
            if base != plain and base in BY_NAME and BY_NAME[base].labels == ("group",):
                return f"{base}.{group}"
        if EVALUATION.fullmatch(plain):
            self.evaluations.add(name)
        if self._own >= MOST_OWN:
            self._notices.add("columns", f"More than {MOST_OWN} columns are not known: {name} was left out.")
            return ""
        self._own += 1
        own = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:_LONGEST] or "column"
        if own[0].isdigit():
            own = f"_{own}"
        if own in BY_NAME or own in TAKEN or own in FUNCTIONS:
            own = f"log_{own}"
        unique, count = own, 2
        while unique in self._taken:
            unique, count = f"{own}_{count}", count + 1
        return unique

    def map(self, values: Mapping[str, float]) -> tuple[float | None, float | None, dict[str, Value]]:
        """Return step, Unix time and signals of one row."""
        names = tuple(values)
        way = self._ways.get(names) or self._way(names, values)
        signals: dict[str, Value] = {signal: values[name] for name, signal in way.plain}
        for name, signal, label in way.grouped:
            groups = signals.setdefault(signal, {})
            assert isinstance(groups, dict)
            groups[label] = values[name]
        step = None if way.step is None else values[way.step]
        return step, None if way.time is None else _seconds(values[way.time]), signals

    def take(self, values: Mapping[str, float]) -> tuple[float | None, float | None, dict[str, Value]]:
        """Map the next row of a log: as :meth:`map`, and a running total becomes what it grew by since the row before."""
        step, time, signals = self.map(values)
        for name in self._totals.keys() & values.keys():
            signal, _, label = self._target[name].partition(".")
            before, self._totals[name] = self._totals[name], values[name]
            grown = max(0.0, values[name] - before) if before == before else 0.0
            groups = signals.get(signal)
            if isinstance(groups, dict):
                groups[label or "all"] = grown
            else:
                signals[signal] = grown
        return step, time, signals

    def _way(self, names: tuple[str, ...], example: Mapping[str, float]) -> _Way:
        """Find out how rows with these names are mapped; the same ones come again and again."""
        self.decide(names, example)
        parts = [(name, *self._target[name].partition(".")[::2]) for name in names if self._target[name]]
        of_groups = {signal for _, signal, label in parts if label}
        way = _Way(
            step=next((name for name, signal, _ in parts if signal == STEP), None),
            time=next((name for name, signal, _ in parts if signal == TIME), None),
            plain=[(name, signal) for name, signal, _ in parts if signal not in of_groups | {STEP, TIME}],
            grouped=[(name, signal, label or "all") for name, signal, label in parts if signal in of_groups],
        )
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        self._ways[names] = way
        return way

    def names(self) -> list[str]:
        """Return the columns that came, by the names that the log gives them."""
        return list(self._target)

    def report(self) -> None:
        """Say which names of ``--map`` never came."""
        for column, signal in self._maps.items():
            if column not in self._target:
                there = ", ".join(list(self._target)[:20]) or "none"
                self._notices.add("map", f"--map {signal}={column}: there is no such column; there are: {there}.")
        if "loss" not in self._taken and self._target:
            there = ", ".join(list(self._target)[:20])
            says = f"No column is known to be the loss; name it with --map loss=COLUMN. There are: {there}."
            self._notices.add("no_loss", says, signal="loss")

    def leads(self, signals: Mapping[str, Value]) -> bool:
        """Say whether a row with these signals is one of the training's own: with the loss, or where there is none, with any."""
        if self._leading is None:
            known = {signal.partition(".")[0] for signal in self._taken} & BY_NAME.keys() - {"epoch"}
            self._leading = frozenset({"loss"} if "loss" in known else known)
        return not self._leading or not self._leading.isdisjoint(signals)

    def has_step(self) -> bool:
        """Say whether some column gives the step."""
        return STEP in self._taken


def _seconds(value: float) -> float | None:
    """Return a Unix time in seconds from one in seconds or milliseconds, or None for what is no time of this century."""
    if OLDEST < value < NEWEST:
        return value
    return value / 1000 if OLDEST < value / 1000 < NEWEST else None
