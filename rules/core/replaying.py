"""What an incident becomes when the next attempt makes its steps again (case A38).

A start that resumes before an incident's onset, with nothing changed, repeats the experiment: a fault of the data, of the schedule or
of a deterministic kernel comes again. Where the same data pass without it, it was a transient fault, and the machine is suspect.
"""

from __future__ import annotations

from trainwarden.plan import Applied

from .attribution import weigh
from .facts import Finding, high_gradient, high_loss
from .reasoning import answered
from .replays import same_batches
from .state import Alive, Incident, IncidentState, Run
from .trace import Trace
from .turn import Turn

#: Steps behind the onset that must have been made again; a record may cover several.
BEHIND = 20
#: Steps before the onset whose samples are compared.
COMPARED = 50
#: What speaks for and against causes when the same data passed.
CLEARED = (
    ("hardware", 0.65),
    ("data", -0.9),
    ("learning_rate", -0.9),
    ("model", -0.6),
    ("optimizer_state", -0.6),
    ("numeric", -0.5),
)
#: Verdicts of a loss or a gradient that turn out to have been a passing thing.
PASSING = ("outlier", "transient_spike", "slow_recovery", "level_shift", "divergence", "grad_surge")


def expect(run: Run, alive: Alive, report: Applied | None) -> None:
    """Note for which incidents of the attempt before a new start repeats the experiment."""
    source = alive.resumed_from
    if source is None or (report is not None and _changes(report)):
        return
    for incident in run.incidents.values():
        repeated = source < incident.onset - incident.uncertainty and incident.attempt in run.traces
        if repeated and incident.severity != "info" and incident.attempt < alive.start.attempt:
            incident.replayed_in = alive.start.start_id


def awaited(run: Run, start_id: str) -> bool:
    """Say whether an incident waits for a start to make its steps again."""
    return any(incident.replayed_in == start_id for incident in run.incidents.values())


def look(turn: Turn, run: Run, alive: Alive, step: int, time: float) -> None:
    """Judge incidents of the attempt before whose steps have been made again by ``step``."""
    for incident in run.incidents.values():
        if incident.replayed_in != alive.start.start_id:
            continue
        if step >= incident.onset + BEHIND * alive.trace.stride():
            incident.replayed_in = None
            other = run.traces.get(incident.attempt)
            if other is not None and _passed(alive.trace, other, incident):
                _clear(turn, alive, incident, step, time)


def _changes(report: Applied) -> bool:
    return bool(
        report.reset_optimizer
        or report.lr_factor != 1.0
        or report.rewarmup_steps
        or report.skip_samples
        or report.exclude
    )


def _passed(trace: Trace, other: Trace, incident: Incident) -> bool:
    """Say whether the steps were abnormal the first time, and the same data passed this time without it."""
    first, end = incident.onset - incident.uncertainty, incident.onset + BEHIND * trace.stride()
    if not _abnormal(other, incident, incident.onset, end) or _abnormal(trace, incident, first, end):
        return False
    return same_batches(trace, other, incident.onset - COMPARED, incident.onset)


def _abnormal(trace: Trace, incident: Incident, first: int, end: int) -> bool:
    rows = trace.rows(first, end)
    _, loss_high, _ = high_loss(trace, rows, incident.trend)
    return bool(loss_high.any() or high_gradient(trace, rows, incident.usual).any())


def _clear(turn: Turn, alive: Alive, incident: Incident, step: int, time: float) -> None:
    says = (
        f"Attempt {alive.start.attempt} made step {incident.onset} again with the same data and it passed: not the data, nor anything "
        "deterministic, but a transient fault, of the machine most likely."
    )
    found = [
        Finding(kind="replayed", step=incident.onset, cause=cause, weight=weight, says=says)
        for cause, weight in CLEARED
    ]
    cause = weigh([*incident.findings, *found], incident.onset)
    incident.cause, incident.confidence, incident.scores = cause.name, cause.confidence, cause.scores
    incident.findings, incident.cheapest_test = cause.findings, cause.cheapest_test
    incident.reasoned = answered(incident.reasoned, "not_reproducible", "found", says, cause.explained)
    incident.suspect_samples = []
    if incident.verdict in PASSING:
        incident.verdict = "transient_spike"
    words = incident.verdict.replace("_", " ").capitalize()
    incident.summary = (
        f"{words} from step {incident.onset}, gone when attempt {alive.start.attempt} made the step again with the same data, "
        f"cause {cause.name.replace('_', ' ')} (confidence {cause.confidence:.2f})."
    )
    state: IncidentState | None = "recovered" if incident.state == "inconclusive" else None
    turn.note(incident, time, step, says, state)
