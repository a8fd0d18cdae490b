"""A probe: an attempt that makes the steps around an onset again, because the records alone cannot tell what caused it (design §4.8).

Which test parts the causes follows from the incident. An onset right behind an evaluation: the same steps without it (case A39). Ranks of
one host stood out, and there are others: the same steps elsewhere (cases A24, A38). Else the same samples again, with a state from before
anything was wrong: what comes again goes with the samples, what does not was in the optimizer's state or the machine.

The answer is read from the new attempt's records, against those of the parent at the same steps. An attempt that stays well goes on: it is
the rollback that its answer asks for. One in which it comes again is ended by the plan that follows from what is known then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainwarden.plan import MOST_PROBED, Checks, Plan, Probe, ProbeKind, merge_ranges
from trainwarden.record import Event, Ranges

from .drift import first_sign
from .events import behind
from .facts import LOSS_SDS, Facts, high_gradient, high_loss
from .machines import listed, narrow
from .planning import Planned, Refusal, expected_counter, expected_lr, fallback_reason, named
from .probed import Answer, Probed
from .replays import NEAR, same_losses, same_samples
from .settings import Settings
from .spacing import Going, advice, none_at_all
from .state import Alive, Checkpoint, Executed, Incident, Verification
from .suspects import FROM_THE_START, suspects
from .targets import choose
from .trace import Trace

#: Steps behind the onset that are made again at least, and records behind the confirmation; a record may cover several.
BEHIND, BEYOND = 20, 10
#: Steps before the onset whose samples are compared.
COMPARED = 50
#: Abnormal records of which it has come again before all steps were made.
ENOUGH = 3
#: Share of the first excess that makes it the same event, up to an excess of so many standard deviations: behind a reset a loss is a
#: little high anyhow.
ALIKE, FAR = 0.25, 40.0
#: A score of the optimizer's state from which a passed replay speaks for it before the machine.
STATE_SPOKE = 0.3


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer in words, with what it says for and against causes."""

    answer: Answer
    says: str
    weights: dict[str, float]


# What is asked.


def plan_probe(
    facts: Facts,
    alive: Alive,
    checkpoints: Sequence[Checkpoint],
    executed: Sequence[Executed],
    probed: Sequence[Probed],
    settings: Settings,
    confirmed: int | None = None,
) -> Planned | Refusal:
    """Make the plan of the attempt that would tell; ``confirmed`` is the step at which the incident was confirmed.

    A replay begins one memory of the second moment before the onset, or with a reset optimizer where no checkpoint is that old: else
    what came in before the onset would make it come again, and be taken for the data's doing.
    """
    kind, hosts, event = kind_of(facts)
    near = max(NEAR * facts.trace.stride(), facts.uncertainty)
    known = next((one for one in probed if one.kind == kind and abs(one.onset - facts.onset) <= near), None)
    if known is not None:
        return Refusal(f"this was tried: {known.says[0].lower()}{known.says[1:]}")
    carried = "optimizer_state" if kind == "replay" else "data"
    doubt = facts.uncertainty if event is None else max(facts.uncertainty, facts.onset - event)
    drift = first_sign(facts.trace, alive.inherited, facts.onset)
    chosen = choose(checkpoints, executed, facts.onset, doubt, carried, facts.beta2 or alive.beta2, None, drift)
    first = facts.onset - facts.uncertainty
    if chosen is None:
        return Refusal(
            f"there is no complete checkpoint older than step {facts.onset - doubt}", none_at_all(checkpoints, first)
        )
    stride = facts.trace.stride()
    last = max(facts.onset + BEHIND * stride, (confirmed or facts.onset) + BEYOND * stride)
    found = suspects(facts)
    asked = Probe(
        kind=kind,
        first_step=max(first, chosen.target.step + 1),
        steps=min(last - max(first, chosen.target.step + 1) + 1, MOST_PROBED),
        samples=found.ranges,
        epoch=found.epoch,
    )
    reset = chosen.too_young
    ramp = settings.rewarmup_steps if reset else 0
    reasons = {"target": f"Step {chosen.target.step} is {chosen.says}.", "probe": would_tell(asked, facts.onset, hosts)}
    if chosen.fallbacks:
        reasons["fallback_targets"] = fallback_reason(chosen)
    if reset:
        reasons["reset_optimizer"] = "What the optimizer remembers of the steps before must not make it come again."
    if ramp:
        reasons["rewarmup_steps"] = f"The rate ramps up over {ramp} steps after the reset."
    if hosts:
        reasons["exclude_hosts"] = f"It began on {listed(list(hosts))} alone: the test is to run elsewhere."
    start = alive.start
    plan = Plan(
        plan_id="",
        run_uid=start.run_uid,
        for_attempt=start.attempt + 1,
        action="probe",
        target=chosen.target,
        fallback_targets=chosen.fallbacks,
        reset_optimizer=reset,
        rewarmup_steps=ramp,
        exclude_hosts=list(hosts),
        reasons=reasons,
        checks=Checks(
            start_step=chosen.target.step + 1,
            lr=None if ramp else expected_lr(alive, chosen.target.step + 1, 1.0, executed),
            optimizer_step=1 if reset else expected_counter(alive, chosen.target.step),
        ),
        probe=asked,
    )
    going = Going(facts.onset, facts.uncertainty, facts.now, stride, facts.trace.interval())
    return Planned(named(plan), False, tuple(advice(chosen, checkpoints, going)))


def kind_of(facts: Facts) -> tuple[ProbeKind, tuple[str, ...], int | None]:
    """Return what is to be tried, the hosts that are left out, and the step of the evaluation that is."""
    event = behind(facts.events, facts.onset, facts.trace.stride()).get("evaluation")
    if event is not None:
        return "without_evaluation", (), event
    whose = facts.whose
    hosts = facts.failed_hosts or (whose.hosts if whose.kind in ("nonfinite", "loss", "gradient", "failed") else ())
    if hosts and len(hosts) < whose.of_hosts:
        return "other_host", tuple(hosts), None
    return "replay", (), None


def would_tell(probe: Probe, onset: int, hosts: Sequence[str] = ()) -> str:
    """Return in words what is tried and what either answer would mean."""
    steps = f"steps {probe.first_step} to {probe.end - 1}"
    if probe.kind == "without_evaluation":
        return (
            f"Make {steps} again without any evaluation: if they pass, the evaluation breaks what follows it; if step {onset} goes wrong "
            "again, it does not."
        )
    if probe.kind == "other_host":
        return (
            f"Make {steps} again with the same samples elsewhere than on {listed(list(hosts))}: if they pass, it is the hardware there; if "
            f"step {onset} goes wrong again, it goes with the samples."
        )
    return (
        f"Make {steps} again with the same samples: if step {onset} goes wrong again it is the data, or a kernel that fails on them; if they "
        "pass, it was the optimizer's state or the hardware."
    )


# What is answered.


def begun(trace: Trace | None, onset: int) -> Ranges:
    """Return the whole of the shards that the onset's step had begun to read: dirt that begins with a shard is the shard's.

    For samples that a probe found dirty; of others nobody knows.
    """
    if trace is None or (row := trace.row(onset)) >= len(trace):
        return []
    samples = trace.samples(row)
    read = sum(end - first for first, end in samples)
    found = []
    for span in trace.shards(row) if read else ():
        position = min((max(first, span.first) for first, end in samples if end > span.first), default=span.end)
        if span.end - span.first > 2 * read and position - span.first <= FROM_THE_START * read:
            found.append((span.first, span.end))
    return merge_ranges(found)


def happened(alive: Alive, event: Event) -> None:
    """Take an evaluation of an attempt that is to run without."""
    evaluates = event.kind == "evaluation" or (event.kind == "phase" and event.fields.get("phase") == "evaluation")
    if evaluates and alive.evaluated is None and alive.probe is not None:
        step = event.fields.get("step", event.step)
        alive.evaluated = step if isinstance(step, int) and not isinstance(step, bool) else event.step


def answer(
    incident: Incident, verification: Verification, alive: Alive, parent: Trace | None, alarm: str | None
) -> Answered | None:
    """Return what the attempt answers by its newest record, None while it is too early to say.

    ``alarm`` says which alert of these steps fires. It has come again where records are abnormal as those of the parent were, several of
    them or one with an alert; it has passed once all steps were made without. Both count only where the same samples were read under what the probe asks for.
    """
    probe = verification.plan.probe
    trace = alive.trace
    if probe is None or not len(trace):
        return None
    now, stride = int(trace.steps[-1]), trace.stride()
    if now < probe.first_step:
        return None
    over = now >= probe.end - 1
    high = _abnormal(trace, incident, probe)
    first = None if parent is None else _abnormal(parent, incident, probe)
    alike = high.records > 0 and (first is None or high.most >= ALIKE * min(first.most, FAR))
    again = alike and (alarm is not None or high.records >= max(1, ENOUGH // stride))
    if not (over or again):
        return None
    wrong = _not_as_asked(verification.plan, probe, alive, now)
    if wrong is None and trace.row(probe.first_step) >= len(trace):
        wrong = "its records do not hold the steps"
    if wrong is None and int(trace.steps[0]) - int(trace.stride_column[0]) >= incident.onset:
        wrong = f"its records begin at step {int(trace.steps[0])}, behind the onset"
    if wrong is None and first is not None and not first.records:
        wrong = "the records of the attempt before are not abnormal there either"
    if wrong is None and parent is not None:
        wrong = _other_data(trace, parent, incident, now)
    name = f"Attempt {alive.start.attempt}"
    if wrong is not None:
        return Answered("unclear", f"{name} does not tell: {wrong}.", {})
    if again:
        near = max(NEAR * stride, incident.uncertainty)
        at = high.step if high.step is not None else now
        if at > incident.onset + near and (first is None or first.step is None or at > first.step + near):
            says = f"{name} broke at step {at} with the same samples, and not at step {incident.onset}: it is not these samples alone."
            return Answered("unclear", says, {"data": -0.4})
        return _again(name, incident, verification.plan, probe, alive, alarm)
    return _passed(name, incident, verification.plan, probe)


@dataclass(frozen=True, slots=True)
class _High:
    """What is abnormal in a probe's steps: how many records, by how many standard deviations at most, and the first step."""

    records: int
    most: float
    step: int | None


def _abnormal(trace: Trace, incident: Incident, probe: Probe) -> _High:
    rows = trace.rows(probe.first_step, probe.end)
    excess, loss_high, nonfinite = high_loss(trace, rows, incident.trend)
    odd = loss_high | high_gradient(trace, rows, incident.usual)
    if not odd.any():
        return _High(0, 0.0, None)
    known = excess[np.isfinite(excess) & (excess > LOSS_SDS)]
    most = math.inf if nonfinite.any() else float(known.max()) if len(known) else 0.0
    return _High(int(np.count_nonzero(odd)), most, int(trace.steps[rows][np.argmax(odd)]))


def _not_as_asked(plan: Plan, probe: Probe, alive: Alive, now: int) -> str | None:
    """Say in what the attempt does otherwise than its probe asks, or None."""
    if probe.kind == "without_evaluation" and alive.evaluated is not None and alive.evaluated <= now:
        return f"it evaluated behind step {alive.evaluated} all the same"
    there = sorted({host for host in alive.machines.hosts.values() if host in plan.exclude_hosts})
    if probe.kind == "other_host" and there:
        return f"it runs on {listed(there)} all the same"
    if probe.kind == "other_host" and not alive.machines.hosts:
        return "no rank says on which host it runs"
    return None


def _other_data(trace: Trace, parent: Trace, incident: Incident, now: int) -> str | None:
    """Say that the attempt read other samples than its parent, or None; where no record tells, the losses before the onset do."""
    samples = same_samples(trace, parent, incident.onset - COMPARED, min(now, incident.onset + BEHIND))
    if samples is False:
        return "it read other samples than the attempt before"
    if samples is None and same_losses(trace, parent, incident.onset) is False:
        return "its losses before the onset are not those of the same batches"
    return None


def _again(name: str, incident: Incident, plan: Plan, probe: Probe, alive: Alive, alarm: str | None) -> Answered:
    seen = "" if alarm is None else f" ({alarm})"
    says = f"{name} broke at step {incident.onset} again{seen}, with the same samples"
    narrow_numbers = narrow(alive.machines.versions)
    data, numeric = (0.35, 0.5) if narrow_numbers else (0.75, 0.25)
    weights = {"data": data, "numeric": numeric, "hardware": -0.8, "optimizer_state": -0.7}
    if probe.kind == "other_host":
        says += " on other hosts: it goes with the samples"
    elif probe.kind == "without_evaluation":
        says += " and without an evaluation: it is not the evaluation"
        weights["hardware"] = -0.5
    elif plan.reset_optimizer:
        says += " and a reset optimizer: it goes with the samples"
    else:
        says += " and a state from before: it goes with the samples"
    return Answered("again", f"{says}{', or with a kernel that fails on them' if narrow_numbers else ''}.", weights)


def _passed(name: str, incident: Incident, plan: Plan, probe: Probe) -> Answered:
    says = f"{name} made steps {probe.first_step} to {probe.end - 1} again with the same samples and they passed"
    weights = {"data": -0.9, "learning_rate": -0.8, "model": -0.6, "numeric": -0.5}
    if probe.kind == "without_evaluation":
        says += ", without the evaluation: it is a side effect of the evaluation, which leaves the state otherwise than it found it"
        weights |= {"optimizer_state": 0.85, "hardware": -0.5}
    elif probe.kind == "other_host":
        says += f", elsewhere than on {listed(plan.exclude_hosts)}: it is the hardware there"
        weights |= {"hardware": 0.85, "optimizer_state": -0.4}
    elif plan.reset_optimizer:
        says += ", with a reset optimizer: it was the optimizer's state, or a passing fault of the hardware"
        weights |= {"optimizer_state": 0.7, "hardware": 0.3}
    elif incident.scores.get("optimizer_state", 0.0) >= STATE_SPOKE:
        says += ", with a state from before: it was the optimizer's state, or a passing fault of the hardware that damaged it"
        weights |= {"optimizer_state": 0.6, "hardware": 0.3}
    else:
        says += ": not the data, nor anything deterministic, but a passing fault of the hardware, or of a state that it damaged"
        weights |= {"hardware": 0.65}
    return Answered("passed", f"{says}.", weights)
