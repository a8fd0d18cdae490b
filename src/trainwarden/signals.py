"""The one table of signals: what a record may hold, in which unit, and how Prometheus sees it.

Everything that names a series is derived from this table: the exporter's page, the documentation's table, the
rule language's list of names and its "did you mean". A signal's name is its series name without ``train_`` and
``_total``, except ``lr`` (``train_learning_rate``), ``skipped`` (``train_skipped_steps_total``) and
``samples_seen`` (``train_samples_total``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .gpu_signals import CLOCK_REASONS, COUNTERS, GAUGES

Reduction = Literal["mean", "sum", "max", "min", "same", "none"]
SeriesType = Literal["gauge", "counter"]
Cadence = Literal["step", "cadence", "clock"]

#: The parameter groups of a transformer by which norms and ratios are split; ``all`` is the whole model.
GROUPS = ("all", "embedding", "attention", "mlp", "norm", "head", "other")
#: What may be counted as non-finite.
QUANTITIES = ("loss", "grad", "param", "activation", "optimizer")
#: What the training process is doing; a hang is judged against the budget of its phase.
PHASES = ("init", "train", "evaluation", "checkpoint", "data", "exit")
#: Adam's two moments under their names in ``torch.optim``.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: How an attention logit was seen: a bound from norms, rows that were really sampled, or a kernel's log-sum-exp of each row.
#: Never "the maximum".
LOGIT_KINDS = ("bound", "sampled", "lse")
#: The tables of an embedding, and a head that is not tied to it.
TABLES = ("token", "position", "head")

#: Why a guard leaves an update out: the norm of its gradient is not finite, above a given limit, or far above its own median.
SKIP_CAUSES = ("nonfinite", "limit", "surge")

#: What a token may be, where the exporter was told which ids are.
TOKEN_CLASSES = ("digit", "padding")

#: Sources of data that are told apart, and what the rest is called. Their names are the user's own.
MOST_SOURCES, OTHER_SOURCES = 32, "other"

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "group": GROUPS,
    "quantity": QUANTITIES,
    "phase": PHASES,
    "moment": MOMENTS,
    "kind": LOGIT_KINDS,
    "table": TABLES,
    "block": (),  # as many as the model has; their numbers from 0
    "class": TOKEN_CLASSES,
    "cause": SKIP_CAUSES,
    "reason": CLOCK_REASONS,
    "source": (OTHER_SOURCES,),
}


@dataclass(frozen=True, slots=True)
class Signal:
    """One named number of a step record.

    ``labels`` name the keys of the object that a grouped signal is, outermost first. ``reduce`` says how values
    of several ranks become one (``same``: equal on all ranks by construction, ``none``: stays with its rank).
    ``per`` is ``step`` for what is seen at every step, ``cadence`` for what is too dear for that, and ``clock`` for what is
    read every few seconds whatever the steps do: the page shows it as it is read, a record what is new.
    A ``counter`` holds the step's own increment in the record and the running total on the page, except where
    ``cumulative`` says that the record itself holds the running total.
    Where ``probed`` is false the exporter has no probe for it: its value comes from others' logs alone.
    """

    name: str
    unit: str
    help: str
    series: str
    type: SeriesType = "gauge"
    labels: tuple[str, ...] = ()
    reduce: Reduction = "same"
    per: Cadence = "step"
    cumulative: bool = False
    probed: bool = True


def _of_tables(name: str, text: str, reduce: Reduction = "max", unit: str = "rows") -> Signal:
    """Return a signal of each table of tokens, which is looked at now and then."""
    return Signal(name, unit, text, f"train_{name}", labels=("table",), reduce=reduce, per="cadence")


def _of_blocks(name: str, text: str, reduce: Reduction = "max", unit: str = "1") -> Signal:
    """Return a signal of each block that is looked at in due steps."""
    return Signal(name, unit, text, f"train_{name}", labels=("block",), reduce=reduce, per="cadence")


SIGNALS: tuple[Signal, ...] = (
    Signal(
        "loss",
        "nats per token",
        "Loss of the step's batch, before the update; of several ranks the mean.",
        "train_loss",
        reduce="mean",
    ),
    Signal(
        "loss_expected",
        "nats per token",
        "Loss that the step's mix of sources should have, by the present level of each of them.",
        "train_loss_expected",
        reduce="mean",
    ),
    Signal("grad_norm", "1", "L2 norm of the gradient before clipping.", "train_grad_norm", labels=("group",)),
    Signal(
        "clip_ratio",
        "1",
        "Gradient norm over the clipping threshold; above 1 the step was clipped.",
        "train_clip_ratio",
    ),
    Signal("clipped_steps", "steps", "Steps whose gradient was clipped.", "train_clipped_steps_total", type="counter"),
    Signal(
        "grad_norm_clipped",
        "1",
        "L2 norm of the gradient after clipping, as the optimizer takes it.",
        "train_grad_norm_clipped",
        probed=False,
    ),
    Signal("clip_threshold", "1", "Norm to which the gradient is clipped.", "train_clip_threshold", probed=False),
    Signal(
        "grad_zero_ratio",
        "1",
        "Share of gradient elements that are exactly zero.",
        "train_grad_zero_ratio",
        labels=("group",),
        per="cadence",
    ),
    Signal(
        "update_ratio",
        "1",
        "RMS of the optimizer's intended update over RMS of the parameters.",
        "train_update_ratio",
        labels=("group",),
        per="cadence",
    ),
    Signal(
        "update_applied_ratio",
        "1",
        "RMS of a sampled before/after difference over RMS of the same parameters.",
        "train_update_applied_ratio",
        labels=("group",),
        per="cadence",
    ),
    Signal(
        "update_share",
        "1",
        "Share of the update's squared norm by group; all is the largest of them.",
        "train_update_share",
        labels=("group",),
        per="cadence",
    ),
    Signal("update_norm", "1", "L2 norm of the optimizer's update.", "train_update_norm", probed=False),
    Signal(
        "update_zero_ratio",
        "1",
        "Share of the parameters that an update left as they were.",
        "train_update_zero_ratio",
        probed=False,
    ),
    Signal(
        "weight_rms", "1", "Root mean square of the parameters.", "train_weight_rms", labels=("group",), per="cadence"
    ),
    Signal(
        "moment_rms",
        "1",
        "Root mean square of an optimizer moment.",
        "train_moment_rms",
        labels=("moment", "group"),
        per="cadence",
    ),
    Signal("optimizer_step", "steps", "The optimizer's own step counter.", "train_optimizer_step"),
    Signal("beta2", "1", "Decay rate of the optimizer's second moment.", "train_beta2"),
    Signal(
        "lr",
        "1",
        "Learning rate in effect at the step, by optimizer parameter group; all is the largest.",
        "train_learning_rate",
        labels=("group",),
    ),
    Signal(
        "activation_rms",
        "1",
        "Root mean square of what modules give back, by kind of module; all are the blocks.",
        "train_activation_rms",
        labels=("group",),
        reduce="max",
        per="cadence",
    ),
    Signal(
        "activation_absmax",
        "1",
        "Largest absolute value that modules give back, by kind of module; all are the blocks.",
        "train_activation_absmax",
        labels=("group",),
        reduce="max",
        per="cadence",
    ),
    _of_blocks("block_rms", "Root mean square of a block's output."),
    _of_blocks("block_absmax", "Largest absolute value of a block's output."),
    Signal(
        "residual_rms",
        "1",
        "Root mean square of the residual stream where it enters the model's last norm.",
        "train_residual_rms",
        reduce="max",
        per="cadence",
    ),
    Signal(
        "attention_logit",
        "1",
        "Attention logit: a bound from norms, the largest of the sampled rows, or the largest log-sum-exp of a row.",
        "train_attention_logit",
        labels=("kind",),
        reduce="max",
        per="cadence",
    ),
    Signal(
        "grad_row_max",
        "1",
        "Largest L2 norm of a row of an embedding's gradient, before clipping.",
        "train_grad_row_max",
        labels=("table",),
        reduce="max",
        per="cadence",
    ),
    _of_tables("embedding_rows_nonfinite", "Rows of a table of tokens that hold a number that is not finite."),
    _of_tables(
        "embedding_rows_long", "Rows of a table of tokens more than ten times longer than its median trained one."
    ),
    _of_tables(
        "embedding_rows_lost", "Rows of a table of tokens that lost nine tenths of their norm since the last look."
    ),
    _of_tables("embedding_row_max", "Largest L2 norm of a finite row of a table of tokens.", unit="1"),
    _of_tables(
        "embedding_row_ratio", "Largest norm of a row of a table of tokens over the median trained one.", unit="1"
    ),
    _of_tables("embedding_row_argmax", "Token id of the longest finite row of a table of tokens.", "none", "1"),
    _of_blocks(
        "expert_share_max", "Share of choices that the most loaded expert gets, times their number; all: the largest."
    ),
    _of_blocks(
        "expert_share_min",
        "Share of choices that the least loaded expert gets, times their number; all: the smallest.",
        "min",
    ),
    _of_blocks("expert_entropy", "Entropy of experts' shares over that of even ones; all: the smallest.", "min"),
    _of_blocks(
        "dead_experts", "Experts without a token in the last ten steps looked at; all: the sum.", "min", "experts"
    ),
    _of_blocks("expert_dropped_ratio", "Share of choices without room in their expert; all: the mean.", "mean"),
    _of_blocks("router_z", "Largest absolute log-sum-exp of a token's router logits; all: the largest."),
    _of_blocks(
        "router_aux_loss", "Load-balancing loss of experts, without its coefficient: at least 1; all: the mean.", "mean"
    ),
    Signal("loss_scale", "1", "GradScaler's loss scale used at the step.", "train_loss_scale"),
    Signal(
        "loss_scale_backoffs",
        "backoffs",
        "Times the loss scale was lowered.",
        "train_loss_scale_backoffs_total",
        type="counter",
    ),
    Signal(
        "skipped",
        "steps",
        "Optimizer steps whose update was skipped, by a GradScaler or by a guard.",
        "train_skipped_steps_total",
        type="counter",
    ),
    Signal(
        "guard_skipped_steps",
        "steps",
        "Optimizer steps whose update a guard left out, by cause.",
        "train_guard_skipped_steps_total",
        type="counter",
        labels=("cause",),
    ),
    Signal(
        "nonfinite",
        "values",
        "Steps with a non-finite value, by quantity.",
        "train_nonfinite_total",
        type="counter",
        labels=("quantity",),
        reduce="sum",
    ),
    Signal(
        "sample_position", "samples", "Position in the epoch's global order after the step.", "train_sample_position"
    ),
    Signal("epoch", "epochs", "Epoch of the step's batch, from 0.", "train_epoch"),
    Signal(
        "samples_seen",
        "samples",
        "Samples trained on since the run began.",
        "train_samples_total",
        type="counter",
        cumulative=True,
    ),
    Signal(
        "tokens",
        "tokens",
        "Tokens trained on since the run began.",
        "train_tokens_total",
        type="counter",
        cumulative=True,
    ),
    Signal(
        "batch_supervised_tokens",
        "tokens",
        "Tokens of the batch that carry a loss.",
        "train_batch_supervised_tokens",
        reduce="sum",
    ),
    Signal(
        "batch_unique_token_ratio",
        "1",
        "Distinct token ids of the batch over the smaller of its tokens and the vocabulary.",
        "train_batch_unique_token_ratio",
        reduce="min",
    ),
    Signal(
        "batch_longest_repeat_tokens",
        "tokens",
        "Longest run of one token id within a sequence of the batch.",
        "train_batch_longest_repeat_tokens",
        reduce="max",
    ),
    Signal(
        "batch_ids_out_of_range",
        "tokens",
        "Token ids of the batch that the vocabulary does not have.",
        "train_batch_ids_out_of_range",
        reduce="sum",
    ),
    Signal(
        "batch_token_share",
        "1",
        "Share of digits among the batch's tokens that are no padding, and of padding among all of them.",
        "train_batch_token_share",
        labels=("class",),
        reduce="mean",
    ),
    Signal(
        "source_share",
        "1",
        "Share of the batch's samples by source; on the page for the sources that are configured.",
        "train_source_share",
        labels=("source",),
        reduce="mean",
    ),
    Signal(
        "batch_hash",
        "1",
        "Hash of the batch's token ids in their order, below 2^32: equal batches have equal ones.",
        "train_batch_hash",
        reduce="sum",
    ),
    Signal(
        "batch_rows_hash",
        "1",
        "Sum of hashes of the batch's sequences, below 2^32: equal for batches of the same sequences in any order.",
        "train_batch_rows_hash",
        reduce="sum",
    ),
    Signal(
        "sample_overlap",
        "samples",
        "Samples of the rank that another rank read in the same step, told from the positions of both.",
        "train_sample_overlap",
        reduce="sum",
        probed=False,
    ),
    Signal(
        "batch_token_id_max",
        "1",
        "Largest token id of the batch.",
        "train_batch_token_id_max",
        reduce="max",
        probed=False,
    ),
    Signal("vocabulary_size", "tokens", "Token ids of the vocabulary.", "train_vocabulary_size", probed=False),
    Signal(
        "step_duration_seconds",
        "seconds",
        "Wall-clock time from the previous step's end to this one's.",
        "train_step_duration_seconds",
        reduce="max",
    ),
    Signal(
        "rank_loss", "nats per token", "This rank's own loss, before any reduction.", "train_rank_loss", reduce="none"
    ),
    Signal(
        "rank_grad_norm",
        "1",
        "This rank's own gradient norm, before any reduction, where it can be seen.",
        "train_rank_grad_norm",
        reduce="none",
    ),
    Signal(
        "shard_grad_norm",
        "1",
        "L2 norm of the part of the reduced gradient that this rank holds, where it is sharded.",
        "train_shard_grad_norm",
        reduce="none",
    ),
    Signal(
        "rank_compute_seconds",
        "seconds",
        "Time from the previous step's end to the end of this rank's own backward pass, before it waits for other ranks.",
        "train_rank_compute_seconds",
        reduce="none",
    ),
    Signal(
        "param_hash",
        "1",
        "Hash of the bits of all parameters that this rank holds whole, below 2^32: equal replicas have equal ones.",
        "train_param_hash",
        reduce="none",
        per="cadence",
    ),
    Signal(
        "ln_weight_norm",
        "1",
        "Norm of the weights of the normalisation layers: equal on all ranks that hold the same ones.",
        "train_ln_weight_norm",
        reduce="none",
        per="cadence",
        probed=False,
    ),
    Signal(
        "gpu_clocks_event",
        "1",
        "1 while this is a reason for which the GPU's clocks are lowered.",
        "train_gpu_clocks_event",
        labels=("reason",),
        reduce="none",
        per="clock",
    ),
    *(Signal(name, unit, says, f"train_{name}", reduce=how, per="clock") for name, unit, how, says in GAUGES),
    *(
        Signal(name, unit, says, f"train_{name}_total", type="counter", reduce="sum", per="clock")
        for name, unit, says in COUNTERS
    ),
)

BY_NAME: dict[str, Signal] = {signal.name: signal for signal in SIGNALS}


@dataclass(frozen=True, slots=True)
class Series:
    """A series of the page that is not one signal's last value: derived from several steps or from the exporter."""

    name: str
    help: str
    type: SeriesType = "gauge"
    labels: tuple[str, ...] = ()


#: Trailing wall-clock window of the ``…_window_max`` and ``…_window_min`` gauges, in seconds. Not reset by a scrape.
WINDOW_SECONDS = 60.0

DERIVED: tuple[Series, ...] = (
    Series("train_step", "Number of the last optimizer step; goes down after a rollback."),
    Series("train_steps_total", "Optimizer steps executed by this process; never goes down.", "counter"),
    Series("train_last_step_timestamp_seconds", "Unix time at which the last step ended."),
    Series("train_phase", "1 for the phase that the process is in, 0 for the others.", labels=("phase",)),
    Series("train_loss_ema_ratio", "Loss over its own bias-corrected EMA with beta 0.98."),
    Series("train_loss_window_max", "Largest loss of the last 60 seconds; a scrape does not reset it."),
    Series("train_grad_norm_window_max", "Largest gradient norm of the last 60 seconds; a scrape does not reset it."),
    Series("train_grad_norm_window_min", "Smallest gradient norm of the last 60 seconds; a scrape does not reset it."),
    Series("train_checkpoint_last_step", "Step of the newest complete checkpoint."),
    Series(
        "train_checkpoint_last_timestamp_seconds", "Unix time at which the newest complete checkpoint was reported."
    ),
    Series("train_exporter_observe_seconds_total", "Time that the exporter spent on the training thread.", "counter"),
    Series("train_exporter_dropped_steps_total", "Steps that could not be recorded.", "counter"),
    Series("train_exporter_dropped_series_total", "Series refused because of the limit on series.", "counter"),
    Series("train_exporter_lag_steps", "Steps staged on the device and not yet recorded."),
)
