"""The numbers of the judgement: the ``policy:`` part of the daemon's configuration.

Rules say what is seen; these say how long to wait, how sure to be and how much may be done. Every field has a default that
is safe: observe only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Mode = Literal["observe", "approve", "act"]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
CountOrNone = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Step = Annotated[int, Meta(ge=1, le=2**53)]
Word = Annotated[str, Meta(min_length=1, max_length=40)]


class PlannedChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that is known beforehand: the runs of a name, the first step that is trained under it, what changes."""

    step: Step
    """The first step that is trained under the change."""
    kind: Word
    """stage, mixture, batch_size, lr_phase, or with planned: true a word of your own."""
    planned: bool = False
    """true: every rule is excused, whatever the kind, as with an event that says so; a word of your own needs it."""
    run: str = "*"
    """The run's display name, or a pattern with * and ?."""
    settle_steps: CountOrNone | None = None
    """Steps of the burn-in; the policy's settle_steps by default."""
    note: str = ""
    """What people are told of it."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the judgement core. Steps are optimizer steps, also where records have a stride."""

    mode: Mode = "observe"
    """observe: only say what would be done; approve: a person confirms every action; act: do it."""
    max_rollbacks: CountOrNone = 2
    """Rollbacks of one run before it is handed over to a person."""
    max_rollbacks_per_day: CountOrNone = 3
    """Requests that end an attempt of one run within 24 hours, before the next one waits."""
    max_actions_per_day: CountOrNone = 20
    """Requests that end an attempt of any run within 24 hours: what befalls many runs at once is no run's fault."""
    decision_ttl: Seconds = 86_400.0
    """Seconds that a decided action may wait before its gates; then it is handed to a person and not done any more."""
    lower_lr: bool = False
    """Allow to lower the learning rate of a running attempt for a while, where it is the cause and the run is not destroyed."""
    max_lower_lr: CountOrNone = 3
    """Times that the learning rate of one attempt is lowered before more is done."""
    lower_lr_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Factor on the scheduled learning rate while it is lowered."""
    lower_lr_steps: Count = 500
    """Steps for which the learning rate is lowered; then it comes back by itself."""
    lower_lr_return_steps: CountOrNone = 100
    """Steps of the ramp over which it comes back."""
    lower_lr_ahead_seconds: Seconds = 60.0
    """Seconds from the request to the step from which on the rate is lowered, at the run's pace: by then all ranks must have read it."""
    soft_steps: Count = 50
    """Steps that the loss must stay abnormal before the learning rate is lowered: case A01 heals in thirty."""
    probe: bool = False
    """Allow a probe where the cause is unclear between data and state or hardware and a replay would tell."""
    max_probes: CountOrNone = 1
    """Probes of one run before it is handed over as it is."""
    receiver: bool = False
    """A receiver is configured: actions can be delivered and checkpoints pinned."""
    quarantine: bool = False
    """Ask the trainer for a copy of its damaged state when an incident is confirmed; it saves one where its script says how."""
    quarantine_seconds: Seconds = 60.0
    """Seconds for which a decided rollback waits for that copy."""
    report_url: str | None = None
    """Address of an incident's page with ``{id}`` in it; goes into the webhook."""

    confirm_steps: Count = 3
    """Steps with an abnormal loss after which an incident is confirmed."""
    heal_steps: Count = 50
    """Steps without a firing alert after which an incident may close; alerts that fire before that join it."""
    level_steps: Count = 200
    """Steps over which the loss level after an incident is compared with the trend before it."""
    persist_steps: Count = 100
    """Steps that the loss must stay abnormal without healing before a rollback is considered."""
    dirty_steps: Count = 12
    """Steps of dirty data in a row, loss or gradient abnormal and not healing, that justify an earlier rollback."""
    nonfinite_steps: Count = 5
    """Steps with a non-finite loss in a row after which the weights count as destroyed."""
    open_steps: Count = 3000
    """Steps after which an incident that neither heals nor settles is handed over to a person."""
    warmup_steps: CountOrNone = 50
    """First steps of a run, and first steps of an attempt after its resume, in which nothing is done to it."""
    cooldown_steps: CountOrNone = 50
    """Steps that an attempt which was rolled back must have run before it may be rolled back again."""
    settle_steps: CountOrNone = 100
    """Steps of the burn-in after a planned change that says nothing of its own: case B03 settles within fifty."""
    confidence: Share = 0.5
    """Confidence in the cause below which an action needs a person's approval even in mode act."""
    verify_steps: Count = 200
    """Steps after the skip and any ramp over which a rolled-back run is compared with its own earlier trend."""
    rewarmup_steps: CountOrNone = 100
    """Steps of the learning rate's ramp after an optimizer reset."""
    lr_factor: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Factor on the learning rate where the learning rate was the cause."""

    stall_seconds: Seconds = 900.0
    """Seconds that any phase may go on without a sign of progress (case F03: 15 minutes in training)."""
    stall_step_seconds: Seconds = 1800.0
    """Seconds that a learned budget of a step has at most, unless three usual steps take longer (case A33: 30 minutes)."""
    stall_init_seconds: Seconds = 2700.0
    """Seconds from a start to its first record (case F03: 45 minutes)."""
    stall_evaluation_seconds: Seconds = 3600.0
    """Seconds that an evaluation may take until three were seen; then, twice the longest but one (case D03)."""
    stall_checkpoint_seconds: Seconds = 3600.0
    """Seconds that saving may take until three checkpoints were seen; then, twice the longest but one."""
    unseen_seconds: Seconds = 600.0
    """Seconds without an answer of any exporter after which a run is said not to be seen (case F03: 10 minutes)."""
    gone_seconds: Seconds = 86_400.0
    """Seconds after a run's end, or without any answer, after which what it left open is closed: its restart is not awaited longer."""

    max_action_age: Seconds = 60.0
    """Seconds; with a newest record older than this and than three usual record intervals, nothing is delivered."""
    request_ttl: Seconds = 900.0
    """Seconds for which a delivered request is worth carrying out."""
    watermark_steps: Count = 64
    """A rank is no longer awaited once it is this many steps behind the newest one (and watermark_seconds)."""
    watermark_seconds: Seconds = 20.0
    """A rank is no longer awaited once its missing record is this old (and watermark_steps behind)."""
    history_steps: Annotated[int, Meta(ge=200, le=1_000_000)] = 4000
    """Records kept in memory for each start: the baseline, and what a resumed attempt is compared with."""
    dead_records: Count = 50
    """Equal values in a row after which a signal that should vary is reported as dead or repeated."""

    planned_changes: tuple[PlannedChange, ...] = ()
    """What is known of runs beforehand. Not a field of the policy: it stands at the top of the configuration."""
