"""The names that programs give their numbers, and the signals that are meant: one table for logs and for what a script logs.

A word stands for the signal in whose row it is. What is not known keeps a name of its own, which :func:`own_name` makes fit for a
record.
"""

from __future__ import annotations

import re

#: Words for a signal, lower case with ``_`` between them, the most telling first.
SYNONYMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "step",
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
        "time",
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
            "logged_loss",
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
            "grad_norm_pre",
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
            "grad_norm_post",
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
    (
        "update_zero_ratio",
        (
            "update_zero_ratio",
            "update_zero_fraction",
            "zero_update_fraction",
            "zero_update_share",
            "update_ratio_zero_fraction",
        ),
    ),
    (
        "ln_weight_norm",
        (
            "ln_weight_norm",
            "layernorm_weight_norm",
            "layer_norm_weight_norm",
            "norm_weight_norm",
            "rmsnorm_weight_norm",
            "ln_weights_norm",
        ),
    ),
    ("batch_token_id_max", ("batch_token_id_max", "token_id_max", "max_token_id")),
    (
        "batch_supervised_tokens",
        (
            "batch_supervised_tokens",
            "supervised_tokens",
            "valid_tokens",
            "num_valid_tokens",
            "n_valid_tokens",
            "label_tokens",
            "loss_tokens",
            "target_tokens",
        ),
    ),
    (
        "sample_position",
        (
            "sample_position",
            "dataloader_offset",
            "dataloader_position",
            "data_offset",
            "sample_offset",
            "sampler_offset",
            "loader_offset",
        ),
    ),
    # What a batch was read from, as a number or a name: no signal of the table, but a border that spikes may come with (case A29).
    ("shard", ("shard", "shard_id", "shard_index", "shard_idx", "shard_number", "shard_name", "data_shard")),
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
#: Words of a line that a signal cannot bear, and those of the rule language.
TAKEN = frozenset(
    {"type", "seq", "step", "time", "stride", "samples", "shards", "ranks", "phase", "kind"}
    | {"or", "and", "unless", "not", "by", "offset"}
)
EVALUATION = re.compile(r"(?:eval|evaluation|val|valid|validation|test|dev)_.+|.+_(?:val|eval|validation)")

_LONGEST = 120

#: Between the words of a name like ``trainLoss``.
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def normal(name: str) -> str:
    """Return a column's name in lower case with ``_`` for all that is neither letter nor digit."""
    found = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return found.rstrip("_") if found.startswith("_") and name.startswith("_") else found.strip("_")


def own_name(name: str) -> str:
    """Return the name that a number of the user's own has in a record: letters, digits and ``_``, at most 120."""
    own = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:_LONGEST] or "column"
    return f"_{own}" if own[0].isdigit() else own
