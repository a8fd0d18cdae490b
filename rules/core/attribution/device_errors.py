"""What the GPUs said of themselves: XIDs, a device that is lost, one that heat or its own hardware slows (design §4.6 and §4.7).

An error of a device strikes at once: close to the onset it speaks for the hardware, far from it for a device that is ailing. Which
number speaks for what is told by the event; source: NVIDIA's XID catalogue. Heat makes a step long, never its loss wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainwarden.rules.core import devices
from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.machines import listed

#: What is said where this line looked and found nothing.
CLEAR = "No device told of an error near the onset, and none is slowed."

#: Errors that are told, and what a fault close to the onset speaks against: all of them begin without one.
TOLD, AGAINST = 3, ("data", "numeric", "learning_rate", "optimizer_state", "model")
#: What a slowed device weighs where nothing but time is out of order.
SLOWED = 0.8


def find(facts: Facts) -> Evidence:
    """Return findings about errors near the onset, and about slowed devices where a rule found them."""
    watched = bool(facts.trace.measured("gpu_throttled").any())
    if not facts.devices and not watched and "throttled" not in facts.whose.apart:
        return NotPossible("nothing is recorded of the devices")
    # A rule that saw the same error in the records has spoken already: two witnesses of one event are one.
    spoken = any(cause == "hardware" for _, cause, _, _ in facts.blamed)
    return [*errors(facts.devices, facts.onset, facts.trace.stride(), spoken), *_slowed(facts)]


def errors(told: Sequence[devices.Told], onset: int, stride: int, spoken: bool = False) -> list[Finding]:
    """Return findings about errors, the weightiest of which comes first. ``spoken``: it has been weighed elsewhere."""
    found = []
    for place, one in enumerate(told[:TOLD]):
        weight = 0.0 if spoken or place else devices.weigh(one, onset, stride)
        test = ""
        if one.fault:
            where = f"on {one.host}" if one.host else "there"
            test = (
                f"Run the self-test of the devices {where} (dcgmi diag -r 3) before anything starts on that host again."
            )
        says = devices.sentence(one)
        found.append(Finding(kind="device_error", step=one.step, cause="hardware", weight=weight, says=says, test=test))
    for one in devices.failed(told, onset, stride)[:1]:
        says = devices.sentence(one)
        found += [Finding(kind="device_error", step=one.step, cause=cause, weight=-0.4, says=says) for cause in AGAINST]
    return found


def _slowed(facts: Facts) -> list[Finding]:
    slowed = facts.whose.apart.get("throttled")
    if slowed is None or not slowed.ranks:
        return []
    ranks = listed([str(rank) for rank in slowed.ranks])
    where = f" (on {listed(facts.whose.hosts)})" if facts.whose.hosts else ""
    what = f"The GPU of rank {ranks}{where} is slowed by heat, the power brake or its own hardware"
    says = f"{what}, in {counted(slowed.records, 'record')} since step {slowed.step}."
    weight = 0.0 if facts.loss_high.any() or facts.grad_high.any() else SLOWED
    return [Finding(kind="device_slowed", step=slowed.step, cause="hardware", weight=weight, says=says)]
