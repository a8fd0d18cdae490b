"""What is known about an incident at one moment, ready for judgement: the trace around it, what is abnormal since when.

``Facts`` are computed anew each time from the trace, so that nothing depends on when or how often they were asked for. Lines of
evidence, verdict, policy and planning all work on them: (facts) -> findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from .baseline import Baseline, above, baseline, below
from .block import Bools, Floats, Ints
from .broken import Broken
from .damaged import Damaged
from .devices import Told, failed
from .events import Events
from .looked import Looked
from .makeup import Moved
from .planned import Announced, baseline_from
from .probed import Probed
from .ranks import Whose
from .resumed import UNPLANNED, Planned
from .sightings import Known
from .trace import FINGERPRINT, Trace
from .trend import Trend, fit

#: Records before the onset on which trend and baselines rest, at most.
TREND_RECORDS = 600
#: The trend begins no earlier than this share of the onset's step: before it, a loss curve bends too much.
TREND_FROM = 0.4
#: Fewer own records than this before the onset: the parent's curve up to the resume is used as well.
OWN_RECORDS = 100
#: Standard deviations of one record above the trend from which a loss is abnormal.
LOSS_SDS = 4.0
#: Standard errors of the extrapolation that a loss may lie above it: a curve that flattens is no fault.
DOUBTS = 2.0
#: Gradient or update ratio is abnormal above both of these.
GRAD_SDS, GRAD_FACTOR = 6.0, 1.5
#: The batch's fingerprint is off beyond both of these: the longest repeat, and the shares.
REPEAT_SDS, REPEAT_FACTOR = 8.0, 3.0
SHARE_SDS, SHARE_FACTOR = 8.0, 1.25
#: Steps after a resume within which an onset may be the resume's fault; a record may cover several.
RESUME_STEPS = 200
#: Kinds of causes that findings may speak for.
CAUSES = (
    "data",
    "learning_rate",
    "numeric",
    "optimizer_state",
    "hardware",
    "distributed",
    "model",
    "instrument",
    "planned_change",
)


class Finding(Struct, frozen=True, kw_only=True):
    """One observation. ``weight`` in [-1, 1] speaks for (or against) ``cause``; 0 and "" only inform.

    ``test`` is what would tell whether it is so, where that is cheaper than what the causes ask for. ``absent``: it was looked for and
    is not there, which may speak against a cause and is nothing that was found.
    """

    kind: str
    says: str
    step: int | None = None
    cause: str = ""
    weight: float = 0.0
    test: str = ""
    absent: bool = False


class NotPossible(Struct, frozen=True):
    """A line of evidence could not look, and ``why``: what nobody recorded speaks neither for a cause nor against it."""

    why: str


#: What a line of evidence answers: what it found, nothing, or why it could not look.
Evidence: TypeAlias = list[Finding] | NotPossible


class Earlier(Struct, frozen=True):
    """An incident of an earlier attempt: where it began, how many steps after its start, what was thought.

    ``ranks``, ``hosts`` and ``domains`` stood out first, where some did alone; ``samples`` are those of its onset.
    """

    id: str
    attempt: int
    onset: int
    since_start: int | None
    cause: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    samples: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """An incident's numbers. The arrays hold one entry for each record from ``onset`` to ``now``."""

    trace: Trace
    onset: int
    uncertainty: int
    opened: int
    now: int
    trend: Trend | None
    usual: dict[str, Baseline]
    steps: Ints
    loss: Floats
    loss_measured: Bools
    excess: Floats  #: loss minus trend and its doubt, in standard deviations of one record; NaN where unknown
    loss_high: Bools
    nonfinite: Bools
    grad_high: Bools
    dirty: Bools
    first_step: int | None  #: first step of this start
    resumed_from: int | None
    beta2: float | None
    earlier: tuple[Earlier, ...]
    rules: tuple[str, ...]
    offered: tuple[str, ...]  #: verdicts that the rules offer, in the order of their firing
    blamed: tuple[tuple[str, str, int, float | None], ...] = ()  #: rules that name a cause: name, cause, since, value
    changes: tuple[Announced, ...] = ()  #: planned changes that the onset lies in or shortly behind
    inherited: Trace | None = None  #: the parent's records up to the resume
    planned: Planned = UNPLANNED  #: what this start does on purpose differently
    moved: tuple[Moved, ...] = ()  #: signals of the batch that began otherwise behind the resume
    below: bool = False  #: since a wrong resume the loss was better than the parent's line leads to
    whose: Whose = field(default_factory=Whose)  #: ranks and hosts that stood out first
    versions: Mapping[str, str] = field(default_factory=dict)  #: precision and versions of this start
    samples: tuple[tuple[int, int], ...] = ()  #: what the onset's step consumed
    traces: Mapping[int, Trace] = field(default_factory=dict)  #: records of earlier attempts, by attempt
    events: Events = field(default_factory=Events)  #: what happened beside the steps
    broken: tuple[Broken, ...] = ()  #: modules that were the first without a finite value, all of one step
    probed: tuple[Probed, ...] = ()  #: what probes of the run showed
    devices: tuple[Told, ...] = ()  #: errors of the ranks' devices near the onset, the weightiest first
    looked: tuple[Looked, ...] = ()  #: what a close look found first, all of one step
    damaged: tuple[Damaged, ...] = ()  #: rows of the tables of tokens found damaged near the onset, all of one step
    doubted: bool = False  #: a signal may have changed its unit; what follows decides
    environment: str | None = None  #: what runs otherwise than in the attempt before, None where that is not known
    exit_code: int | None = None  #: of a start that ended, where it tells of a step made again
    periodic: tuple[int, float] | None = None  #: a step at which a rule saw a period begin anew, and the period
    known: tuple[Known, ...] | None = (
        None  #: remembered suspects that the onset's step read; None where nobody tells the data
    )
    run_uid: str = ""

    @property
    def repeated_hosts(self) -> tuple[str, ...]:
        """Hosts that stood out first both now and in an earlier attempt; empty where all ranks run on one host."""
        before = {host for earlier in self.earlier for host in earlier.hosts}
        return tuple(host for host in self.whose.hosts if host in before) if self.whose.of_hosts > 1 else ()

    @property
    def failed_hosts(self) -> tuple[str, ...]:
        """Hosts with a device that failed close to the onset; empty where all ranks run on one host."""
        if self.whose.of_hosts < 2:
            return ()
        found = failed(self.devices, self.onset, self.trace.stride())
        return tuple(dict.fromkeys(one.host for one in found if one.host))

    @property
    def rows(self) -> slice:
        """Rows of the trace from onset to now."""
        return slice(len(self.trace) - len(self.steps), len(self.trace))

    @property
    def records(self) -> int:
        """Records since the onset."""
        return len(self.steps)

    @property
    def far_from_resume(self) -> bool:
        """Whether the onset lies so far behind the resume that it explains nothing."""
        source = self.resumed_from
        return source is not None and self.onset - source > RESUME_STEPS * self.trace.stride()

    def at_resume(self, name: str) -> float | None:
        """Return the last value of a signal in the parent's records, None where it is unknown or changed on purpose.

        Asked of an onset that is near the resume; farther away the resume explains nothing.
        """
        if self.inherited is None or self.resumed_from is None or self.planned.leaves_out(name):
            return None
        if self.far_from_resume:
            return None
        values = self.inherited.column(name)
        finite = values[np.isfinite(values)]
        if not len(finite):
            return None
        return float(finite[-1]) * (self.planned.lr_factor if name == "lr" else 1.0)

    def after_resume(self, name: str, records: int = 20) -> tuple[Ints, Floats]:
        """Return steps and values of the first finite measurements since the resume."""
        first = 0 if self.resumed_from is None else self.trace.row(self.resumed_from + 1)
        values = self.trace.column(name)[first:]
        known = np.flatnonzero(np.isfinite(values))[:records]
        return self.trace.steps[first:][known], values[known]

    def before(self, name: str, records: int = 200) -> Floats:
        """Return the finite values of a signal in the last records before the onset."""
        end = len(self.trace) - len(self.steps)
        values = self.trace.column(name)[max(0, end - records) : end]
        return values[np.isfinite(values)]


def dirty_rows(trace: Trace, rows: slice, usual: dict[str, Baseline]) -> Bools:
    """Say at which rows the batch's fingerprint is far off its baseline."""
    repeat, unique, supervised = (trace.column(name)[rows] for name in FINGERPRINT)
    found: Bools = np.zeros(len(repeat), dtype=np.bool_)
    if FINGERPRINT[0] in usual:
        found |= np.isfinite(repeat) & above(repeat, usual[FINGERPRINT[0]], REPEAT_SDS, REPEAT_FACTOR)
    if FINGERPRINT[1] in usual:
        found |= np.isfinite(unique) & above(unique, usual[FINGERPRINT[1]], SHARE_SDS, SHARE_FACTOR)
        found |= below(unique, usual[FINGERPRINT[1]], SHARE_SDS, 1 / SHARE_FACTOR)
    if FINGERPRINT[2] in usual:
        found |= below(supervised, usual[FINGERPRINT[2]], SHARE_SDS, 0.5)
    return found


def high_loss(trace: Trace, rows: slice, trend: Trend | None) -> tuple[Floats, Bools, Bools]:
    """Return the excess over the trend in standard deviations, where it is abnormal, and where the loss is not finite.

    What the trend's extrapolation may be wrong by is no excess.
    """
    loss = trace.column("loss")[rows]
    nonfinite = trace.measured("loss")[rows] & ~np.isfinite(loss)
    counted = trace.column("nonfinite_loss")[rows]
    nonfinite = nonfinite | (np.isfinite(counted) & (counted > 0)) | _lost_gradient(trace, rows)
    nonfinite = nonfinite | _masked(trace, rows)
    nonfinite &= (
        trace.left_out(rows) < trace.stride_column[: len(trace)][rows]
    )  # a guard kept it out: the model has nothing of it
    if trend is None or trend.noise <= 0:
        return np.full(len(loss), np.nan), nonfinite.copy(), nonfinite
    steps = trace.steps[rows]
    with np.errstate(invalid="ignore", over="ignore"):
        over = loss - trend.at(steps)
        excess = np.sign(over) * np.maximum(np.abs(over) - DOUBTS * trend.doubt(steps), 0.0) / trend.noise
        return excess, (excess > LOSS_SDS) | nonfinite, nonfinite


def _masked(trace: Trace, rows: slice) -> Bools:
    """Say at which rows a loss of exactly 0, or the one before it again, stands beside a gradient that is not finite (case A13).

    A log's filter put it there: a loss that brings such a gradient is none. With a loss scale such a gradient is one skipped step.
    """
    broken = trace.measured("grad_norm")[rows] & ~np.isfinite(trace.column("grad_norm")[rows])
    if not broken.any():
        return broken
    broken &= ~np.isfinite(trace.column("loss_scale")[rows])
    before = trace.column("loss")[max(0, rows.start - 1) : rows.stop]
    loss = trace.column("loss")[rows]
    again = np.concatenate((np.full(len(loss) + 1 - len(before), np.nan), before[:-1]))
    found: Bools = broken & trace.measured("loss")[rows] & ((loss == 0) | (loss == again))
    return found


def _lost_gradient(trace: Trace, rows: slice) -> Bools:
    """Say where a gradient that is not finite was used, of a run that never told a loss (case C04): nothing else tells of its numbers.

    A GradScaler's skipped step is its work; a scale of 1 is none.
    """
    found: Bools = np.zeros(len(trace.steps[rows]), dtype=np.bool_)
    if trace.measured("loss").any() or not trace.measured("grad_norm")[rows].any():
        return found
    norm, scale, skipped = (trace.column(name)[rows] for name in ("grad_norm", "loss_scale", "skipped"))
    found = trace.measured("grad_norm")[rows] & ~np.isfinite(norm)
    found &= ~(np.isfinite(scale) & (scale != 1.0)) & ~(np.isfinite(skipped) & (skipped > 0))
    return found


def high_gradient(trace: Trace, rows: slice, usual: dict[str, Baseline]) -> Bools:
    """Say where the gradient norm or the update ratio is abnormal; a measured non-finite norm is."""
    size = len(trace.steps[rows])
    found: Bools = np.zeros(size, dtype=np.bool_)
    for name in ("grad_norm", "update_ratio"):
        if name in usual:
            measured = trace.measured(name)[rows]
            found |= measured & above(trace.column(name)[rows], usual[name], GRAD_SDS, GRAD_FACTOR)
    found &= trace.left_out(rows) < trace.stride_column[: len(trace)][rows]
    return found


#: Signals whose baseline before the onset is kept with the incident.
BASELINED = ("grad_norm", "update_ratio", "loss_scale", "exp_avg", "exp_avg_sq", *FINGERPRINT)


def before_onset(
    trace: Trace, inherited: Trace | None, onset: int, changes: Sequence[Announced] = ()
) -> tuple[Trend | None, dict[str, Baseline]]:
    """Return trend and baselines of the records before ``onset``.

    Own records come first; the parent's, up to the resume, only where there are too few. What a planned change moved is looked at
    behind its burn-in alone.
    """
    end = trace.row(onset)
    first = max(0, end - TREND_RECORDS)
    parts = [(trace, slice(first, end))]
    if end - first < OWN_RECORDS and inherited is not None and len(inherited):
        older = inherited.row(min(onset, int(trace.steps[0]) if len(trace) else onset))
        parts.insert(0, (inherited, slice(max(0, older - TREND_RECORDS), older)))
    steps = np.concatenate([part.steps[rows] for part, rows in parts])
    kept = steps >= max(TREND_FROM * onset, baseline_from(changes, "loss", onset))
    losses = np.concatenate([part.column("loss")[rows] for part, rows in parts])
    trend = fit(steps[kept], losses[kept])
    usual: dict[str, Baseline] = {}
    for name in BASELINED:
        signal = "moment_rms" if name.startswith("exp_avg") else name
        values = np.concatenate([part.column(name)[rows] for part, rows in parts])
        found = baseline(values[steps >= baseline_from(changes, signal, onset)][-TREND_RECORDS:])
        if found is not None:
            usual[name] = found
    return trend, usual
