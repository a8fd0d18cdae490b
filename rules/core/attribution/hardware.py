"""One rank alone, and the same host again while the data differ: its data or its hardware (design §4.7 and §4.11).

Only what is confined to one place over restarts and does not follow the data is the machine's (case A24). A coincidence is likely
where there are few places, so the weight grows with their number. Failures that ranks reported order the hosts within the bound of
their clocks (case A33); they are never the data's or the learning rate's doing.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Earlier, Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.machines import listed
from trainwarden.rules.core.replays import same_data

#: What is said where this line looked and found nothing.
CLEAR = "No rank stood out alone."

#: Weight of a repetition among very many places.
REPEATED = 0.9
#: What it weighs that a rank's batch is unlike the others', and that its parameters are like theirs.
UNLIKE, EQUAL = 0.75, 0.2
#: What tells a rank's data from its hardware (case A24).
SWAP = (
    "Run step {step} again with the suspect host's samples on another host (swap them): if it goes with the samples it is the data, if it "
    "stays with the host it is the hardware."
)
#: Causes that all ranks would share.
OF_ALL = ("optimizer_state", "learning_rate", "model")


def find(facts: Facts) -> Evidence:
    """Return findings about the place: one rank alone, a failure's first host, the same place as in an earlier attempt."""
    whose = facts.whose
    if whose.of_ranks < 2 and whose.kind is None:
        return NotPossible("one rank only")
    if whose.kind not in ("nonfinite", "loss", "gradient", "failed") or not whose.ranks:
        return []
    found = _failure(facts) if whose.kind == "failed" else _alone(facts)
    for earlier in reversed(facts.earlier):
        again = _again(facts, earlier)
        if again:
            return found + again
    return found


def _alone(facts: Facts) -> list[Finding]:
    whose = facts.whose
    ranks = ("Rank " if len(whose.ranks) == 1 else "Ranks ") + listed([str(rank) for rank in whose.ranks])
    where = f" on {listed(whose.hosts)}" if whose.hosts else ""
    what = "was not finite" if whose.kind == "nonfinite" else "was far above the others"
    of = " in its own gradient" if whose.kind == "gradient" else ""
    says = f"{ranks}{where} alone {what}{of} first, at step {whose.step}; what all ranks share was usual on the others."
    against = [Finding(kind="one_rank", step=whose.step, cause=cause, weight=-0.6, says=says) for cause in OF_ALL]
    if whose.batch:
        batch = f"Its batch was unlike those of the other ranks: {whose.batch}."
        against.append(Finding(kind="one_rank", step=whose.step, cause="data", weight=UNLIKE, says=batch))
    if whose.step is not None and whose.equal_at is not None and whose.equal_at >= whose.step:
        equal = f"Its parameters were still those of the others at step {whose.equal_at}."
        against.append(Finding(kind="one_rank", step=whose.equal_at, cause="data", weight=EQUAL, says=equal))
    test = "" if whose.batch else SWAP.format(step=whose.step)
    return [
        Finding(kind="one_rank", step=whose.step, cause="hardware", weight=0.3, says=says, test=test),
        Finding(kind="one_rank", step=whose.step, cause="data", weight=0.25, says=says),
        Finding(kind="one_rank", step=whose.step, cause="numeric", weight=-0.3, says=says),
        *against,
    ]


def _failure(facts: Facts) -> list[Finding]:
    says = facts.whose.says
    against = [Finding(kind="failure", cause=cause, weight=-0.9, says=says) for cause in ("data", "numeric", *OF_ALL)]
    return [Finding(kind="failure", cause="hardware", weight=0.35, says=says), *against]


def _again(facts: Facts, earlier: Earlier) -> list[Finding]:
    whose = facts.whose
    hosts = [host for host in facts.repeated_hosts if host in earlier.hosts]
    domains = [domain for domain in whose.domains if domain in earlier.domains]
    ranks = [str(rank) for rank in whose.ranks if rank in earlier.ranks]
    places = []
    if hosts:
        chance = _chance(whose.of_hosts, len(whose.hosts), len(earlier.hosts))
        places.append((REPEATED * (1 - chance), f"host {listed(hosts)}"))
    if domains:
        chance = _chance(whose.of_domains, len(whose.domains), len(earlier.domains))
        places.append((REPEATED * (1 - chance), f"domain {listed(domains)}"))
    if ranks and whose.of_hosts == 1 and not domains:
        chance = _chance(whose.of_ranks, len(whose.ranks), len(earlier.ranks))
        places.append((REPEATED * (1 - chance), f"rank {listed(ranks)}"))
    weight, what = max(places, default=(0.0, ""))
    if not weight:
        return []
    if whose.kind == "failed":
        says = f"Attempt {earlier.attempt} failed first in the same place: {what}."
        return [Finding(kind="same_place", cause="hardware", weight=weight, says=says)]
    if same_data(facts, earlier) is not False:
        says = f"Attempt {earlier.attempt} broke in the same place, {what}, and at the same step: the machine or the samples."
        return [Finding(kind="same_place", step=facts.onset, cause="hardware", weight=0.5 * weight, says=says)]
    says = f"Attempt {earlier.attempt} broke in the same place, {what}, with other data: it follows the machine, not the samples."
    return [
        Finding(kind="same_place", step=facts.onset, cause="hardware", weight=weight, says=says),
        Finding(kind="same_place", step=facts.onset, cause="data", weight=-0.6, says=says),
        Finding(kind="same_place", step=facts.onset, cause="numeric", weight=-0.4, says=says),
    ]


def _chance(places: int, now: int, before: int) -> float:
    """Return how likely it is that so many places out of all, then and now, have one in common by chance."""
    return min(1.0, now * before / places)
