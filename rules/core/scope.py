"""Where an incident is: the ranks that stand out in it, and the hosts and domains of those that were first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from . import broken, devices
from .facts import Facts
from .machines import Machines, first_failed, listed
from .ranks import NEAR, REMEMBERED, Whose, named, whose
from .ranks_apart import Kind, kinds_of
from .state import Alive, Incident

#: The signals by which a rule compares the ranks' own losses.
OWN_LOSS = frozenset({"loss", "rank_loss"})


def attend(incident: Incident, alive: Alive) -> None:
    """Take the marks of the incident's ranks from a little before its onset on: the oldest of them are kept."""
    seen = alive.ranks.marks
    if not seen:
        return
    begin = incident.onset - max(NEAR * alive.trace.stride(), incident.uncertainty)
    kept = incident.marks
    if not kept:
        incident.marks = [mark for mark in seen if mark.step >= begin][:REMEMBERED]
        return
    older = [mark for mark in seen if begin <= mark.step < kept[0].step]
    newer = [mark for mark in seen if mark.step > kept[-1].step] if seen[-1].step > kept[-1].step else []
    if older or newer:
        incident.marks = [*older, *kept, *newer][:REMEMBERED]


def whose_of(incident: Incident, alive: Alive) -> Whose:
    """Return whose it was first: by the records, or by the failures that the ranks reported where no record tells."""
    machines = alive.machines
    size = alive.line.world_size
    near = max(NEAR * alive.trace.stride(), incident.uncertainty)
    kinds, told = _about(incident, alive)
    found = whose(
        incident.marks, incident.onset, near, alive.ranks, machines.hosts, machines.domains, size, kinds, told
    )
    return found if found.ranks or not machines.failures else _failed(found, machines)


def _about(incident: Incident, alive: Alive) -> tuple[list[Kind], int | None]:
    """Return what the incident's rules about ranks are about, told from the signals that they read, and since when losses are."""
    engine = alive.rules.engine
    labels = engine.labels()
    among = [name for name in incident.rules if labels.get(name, {}).get("scope") == "ranks"]
    reads = {name: engine.reads(name) for name in among}
    kinds = list(dict.fromkeys(kind for name in among for kind in kinds_of(reads[name])))
    told = [incident.rules[name].since for name in among if reads[name] & OWN_LOSS and not list(kinds_of(reads[name]))]
    return kinds, min(told, default=None)


def tell(incident: Incident, facts: Facts) -> None:
    """Write the incident's scope: all ranks that stood out, and the hosts of those that did first."""
    where = facts.whose
    if facts.broken:
        incident.groups, incident.modules = broken.scope(facts.broken)
    ranks = _stood_out(incident, where)
    if "mismatch" in facts.offered:
        ranks.update(where.differ)
    for one in where.apart.values():
        ranks.update(one.ranks)
    if where.kind == "failed":
        ranks.update(where.ranks)
    failed = devices.failed(facts.devices, incident.onset, facts.trace.stride()) if incident.cause == "hardware" else ()
    ranks.update(one.rank for one in failed)
    incident.ranks = sorted(ranks)
    repeated = facts.repeated_hosts if incident.cause == "hardware" else ()
    shared_only = where.kind == "shared" and "mismatch" not in facts.offered
    incident.hosts = [] if shared_only else list(repeated or where.hosts)
    incident.hosts += [
        host for host in dict.fromkeys(one.host for one in failed) if host and host not in incident.hosts
    ]
    incident.domains = [] if shared_only else list(where.domains)


def _stood_out(incident: Incident, where: Whose) -> set[int]:
    """Return the ranks that stood out by what is their own: those first, and others that did for at least half as long.

    Where replicas have parted, or batches are shared, a loss that stands out follows from that or from chance.
    """
    own = [mark for mark in incident.marks if mark.kind != "shared"]
    if where.apart.keys() & {"drift", "weights", "duplicate"}:
        own = [mark for mark in own if mark.kind == "nonfinite"]
    counts = Counter(rank for mark in own for rank in mark.ranks)
    most = max((counts[rank] for rank in counts), default=0)
    first = set(where.ranks) if where.kind in ("nonfinite", "loss", "gradient") else set()
    return {rank for rank in counts if rank in first or 2 * counts[rank] >= most}


def in_words(incident: Incident) -> str:
    """Return the scope for a sentence, or an empty text where it is all ranks."""
    if not incident.ranks:
        return ""
    ranks = ("rank " if len(incident.ranks) == 1 else "ranks ") + listed([str(rank) for rank in incident.ranks])
    return f" on {ranks}" + (f" ({listed(incident.hosts)})" if incident.hosts else "")


def _failed(found: Whose, machines: Machines) -> Whose:
    ranks = first_failed(machines.failures)
    first = machines.failures[ranks[0]]
    hosts = named(ranks, machines.hosts)
    where = f"Rank {first.rank}" + (f" on {hosts[0]}" if hosts else "")
    what = f" ({first.says})" if first.says else ""
    others = hosts[1:]
    if others:
        says = (
            f"{where} reported a failure first by its own clock{what}; with clocks off by up to 300 ms, one of "
            f"{listed(others)} may have been before it."
        )
    else:
        says = f"{where} reported a failure first{what}, by more than clocks are off."
    return replace(
        found,
        kind="failed",
        ranks=tuple(ranks),
        hosts=hosts,
        domains=named(ranks, machines.domains),
        ambiguous=bool(others),
        says=says,
    )
