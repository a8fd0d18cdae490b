"""All that the core knows, as plain data that can be stored after any input and read back.

Nothing here decides anything. What is remembered is bounded for each run: a trace for the live start and for those that a
verification still compares with, the open incidents and a few closed ones, the checkpoints of the newest attempts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, field, structs

from trainwarden.plan import Lowering, Plan, Probe, Target
from trainwarden.record import Ranges

from .baseline import Baseline
from .block import Parent
from .broken import Broken
from .damaged import Damaged
from .devices import Told
from .events import Events
from .facts import Finding
from .groups import GroupNorms
from .inputs import SourceSeen, Start
from .instrument import Watch
from .instrument_rescale import Scale
from .looked import Looked
from .lowered import Lowered
from .machines import Machines
from .makeup import Makeup
from .onset_numbers import Numbers
from .ordering import Orders
from .planned import Announced
from .probed import Probed
from .progress import Progress
from .ranks import Mark, RankWatch
from .reasoning import Reasoned
from .resumed import Planned
from .seeing import AlertEngine, AlertSource
from .settings import Settings
from .sightings import Recalled, Sighting
from .stream import Held, Line
from .trace import Trace
from .trend import Shift, Trend

IncidentState = Literal[
    "watching",
    "confirmed",
    "awaiting_approval",
    "acting",
    "verifying",
    "recovered",
    "not_recovered",
    "inconclusive",
    "escalated",
    "dismissed",
]

#: States in which an incident still gathers alerts and may be acted upon.
OPEN_STATES = ("watching", "confirmed", "awaiting_approval", "acting")
#: States from which nothing more happens.
ENDED_STATES = ("recovered", "not_recovered", "inconclusive", "escalated", "dismissed")
#: The version of the stored form; another one is refused.
STORED = 2


class StateError(ValueError):
    """A stored state that this version cannot read. The message says what to do."""


class Checkpoint(Struct):
    """A checkpoint as its events tell it. ``complete`` and ``finite`` as reported; None where nobody said."""

    attempt: int
    step: int
    path: str
    complete: bool | None = None
    finite: bool | None = None
    deleted: bool = False
    pinned: bool = False
    abandoned: bool = False
    quarantined: bool = False
    emergency: bool = False


class Executed(Struct, frozen=True):
    """A plan that some attempt really started with, as the ledger rule needs it. ``probe``: of a probe that has not passed."""

    plan_id: str
    for_attempt: int
    target_step: int
    probe: bool = False


class RuleSeen(Struct):
    """One rule within an incident: the first step its expression held, when it fired, what it says and what it compared.

    ``withheld``: a planned change excuses it.
    """

    since: int
    fired_step: int
    severity: str = "warning"
    verdict: str = ""
    firing: bool = True
    over: bool = False
    value: float | None = None
    cause: str = ""
    withheld: bool = False


class Entry(Struct, frozen=True):
    """One line of an incident's timeline."""

    time: float
    step: int | None
    state: str
    says: str


class GateAnswer(Struct, frozen=True):
    """What one gate says to a wanted action (:mod:`.gates`), as it is stored, shown and sent.

    ``until``: Unix seconds at which a gate that holds opens by itself; None where a person or a record opens it, or nobody knows.
    """

    gate: str
    answer: Literal["allow", "hold", "deny"]
    until: float | None = None
    why: str = ""


class Asked(Struct):
    """A request that left the attempt running: of which incident and attempt, at which step it was made, and how far it went.

    ``until_step`` is the last step that it changes, None where nobody knows; ``done`` is the receiver's word, and then that of the records:
    see :mod:`.soft`. ``lowered`` and ``returned`` are what the records show, None as long as they show nothing; ``alike``: the ranks
    had one rate before; ``refusing`` are the ranks that say that they did not take part.
    """

    action: str
    incident: str
    attempt: int
    plan_id: str
    key: str
    step: int
    until_step: int | None = None
    done: str = "requested"
    start_id: str = ""
    lowering: Lowering | None = None
    lowered: bool | None = None
    returned: bool | None = None
    alike: bool = True
    refusing: list[int] = field(default_factory=list)


class Requested(Struct, frozen=True):
    """A request that ends an attempt and left for the receiver: what limits the number of a day."""

    time: float
    run_uid: str
    key: str


class Check(Struct):
    """One thing that the new attempt's records must show. ``ok`` is None until it was seen."""

    says: str
    ok: bool | None = None


class Verification(Struct):
    """How the attempt that runs under the plan is judged. Steps are global; see :mod:`.recovery`. ``answer``: of its probe."""

    attempt: int
    start_id: str
    parent_attempt: int
    plan: Plan
    first_step: int
    onset_step: int
    skip_end: int
    after_from: int
    optimizer_expected: int | None = None
    lr_expected: float | None = None
    resumed: int = 0
    skipped_since: int = 0
    checks: dict[str, Check] = field(default_factory=dict)
    compared: int = 0
    differing_samples: int = 0
    first_difference: int | None = None
    differences: list[float] = field(default_factory=list)
    first_window: str | None = None
    second_window: str | None = None
    after_steps: list[int] = field(default_factory=list)
    after_losses: list[float] = field(default_factory=list)
    result: Shift | None = None
    answer: str | None = None
    nonfinite: int = 0


class Incident(Struct):
    """The alerts of one attempt that belong together, and all that was concluded from them.

    ``gates`` are the answers of all gates to the newest decision, in their order; ``held_by`` is the first of them that is shut.
    ``advice`` is what a closer spacing of checkpoints would have saved, or made possible.
    ``decided_time`` is when the plan that waits was made.
    ``stood`` is the time of the last sign of progress, where the incident is a stall and nothing else.
    """

    id: str
    run_uid: str
    run: str
    attempt: int
    start_id: str
    onset: int
    opened_step: int
    opened_time: float
    state: IncidentState = "watching"
    severity: str = "warning"
    verdict: str = "other"
    action: str = "none"
    uncertainty: int = 1
    confirmed_step: int | None = None
    closed_step: int | None = None
    last_active_step: int = 0
    since_start: int | None = None
    records: int = 0
    rules: dict[str, RuleSeen] = field(default_factory=dict)
    trend: Trend | None = None
    usual: dict[str, Baseline] = field(default_factory=dict)
    cause: str = "undetermined"
    confidence: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cheapest_test: str = ""
    summary: str = ""
    suspect_samples: Ranges = field(default_factory=list)
    suspect_epoch: int = 0
    suspect_shards: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    onset_samples: Ranges = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    worst_excess: float = 0.0
    plan: Plan | None = None
    advice: list[str] = field(default_factory=list)
    needs_approval: bool = False
    approved_plan: str | None = None
    approved_by: str | None = None
    acknowledged_by: str | None = None
    held_by: str | None = None
    done: str | None = None
    webhook_id: str | None = None
    expires_at: float | None = None
    follows: str | None = None
    further_than: int | None = None
    replayed_in: str | None = None
    stood: float | None = None
    verification: Verification | None = None
    timeline: list[Entry] = field(default_factory=list)
    kept: bool = False
    pinned: list[str] = field(default_factory=list)
    evidence_id: str | None = None
    evidence_until: float | None = None
    announced: str = ""
    told: int = 0
    numbers: Numbers = Numbers()
    reasoned: Reasoned = Reasoned()
    drawn: str = ""
    last_good: Target | None = None
    gates: list[GateAnswer] = field(default_factory=list)
    decided_time: float | None = None

    @property
    def excused(self) -> bool:
        """Whether a planned change explains all of its rules."""
        return bool(self.rules) and all(seen.withheld for seen in self.rules.values())

    @property
    def open(self) -> bool:
        """Whether it still gathers alerts and may be acted upon."""
        return self.state in OPEN_STATES

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in ENDED_STATES


class Rules:
    """The rules' evaluator of one start, which stores itself in a form of its own.

    ``parent`` is the line that it compares with, as a block; it is made anew of what is stored.
    """

    __slots__ = ("engine", "parent")

    def __init__(self, engine: AlertEngine) -> None:
        self.engine = engine
        self.parent: Parent | None = None


class Alive(Struct):
    """One start as it is evaluated: its order, its rules, its memory.

    ``inherited`` and ``beyond`` are the parent's records up to the resume and behind it. ``compared``: they may still be asked for.
    ``ranks_before``: how many ranks the parent had. ``repeated``: what was made twice has been compared. ``mismatch`` is the severity
    of a rule that found the resume wrong, ``environment`` what it runs with that its parent did not, ``below`` says that the loss was better from there on than the parent's line leads to.
    ``rules`` is a :class:`Rules`; Any, because its stored form is known to the engine alone.
    """

    start: Start
    line: Line
    trace: Trace
    rules: Any = None
    inherited: Trace | None = None
    resumed_from: int | None = None
    resumed_attempt: int | None = None
    ranks_before: int | None = None
    beyond: Trace | None = None
    compared: bool = True
    repeated: bool = False
    planned: Planned = Planned()
    makeup: Makeup = field(default_factory=Makeup)
    mismatch: str = ""
    below: bool = False
    described: bool = False
    environment: str | None = None
    exit_code: int | None = None
    rerun: int | None = None  #: the last recorded step when the framework began to make one again
    can_skip: list[str] = field(default_factory=list)
    dataset: str | None = None
    beta2: float | None = None
    ramp_steps: int = 0
    first_step: int | None = None
    plan_id: str | None = None
    probe: Probe | None = None  #: what this attempt is to find out
    evaluated: int | None = None  #: the first step behind which it evaluated
    ended: str | None = None
    gone: float | None = None  #: the first tick that found it ended or unseen, Unix seconds
    firing: dict[str, RuleSeen] = field(default_factory=dict)
    watches: dict[str, Watch] = field(default_factory=dict)
    scales: dict[str, Scale] = field(default_factory=dict)
    unit_doubted: bool = False
    noticed: list[str] = field(default_factory=list)
    groups: GroupNorms = field(default_factory=GroupNorms)
    sources: dict[int, SourceSeen] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    incidents: int = 0
    ranks: RankWatch = field(default_factory=RankWatch)
    machines: Machines = field(default_factory=Machines)
    broken: list[Broken] = field(default_factory=list)
    looked: list[Looked] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    devices: list[Told] = field(default_factory=list)
    changes: list[Announced] = field(default_factory=list)
    next_change: int | None = None  #: the step behind which a planned change begins or its burn-in ends
    lowered: list[Lowered] = field(default_factory=list)  #: what lowered the rate of this line, by the records
    recalled: Recalled = field(default_factory=Recalled)


class Run(Struct):
    """One run: its newest start, what its older attempts left, its incidents."""

    run_uid: str
    run: str
    alive: Alive | None = None
    past_starts: list[str] = field(default_factory=list)
    traces: dict[int, Trace] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)  #: how many ranks the attempts of the traces had
    changes: dict[int, list[Announced]] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    executed: list[Executed] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  #: plain fields of the newest start's first event
    incidents: dict[str, Incident] = field(default_factory=dict)
    probed: list[Probed] = field(default_factory=list)
    events: Events = field(default_factory=Events)
    stale_lines: int = 0
    asked: list[Asked] = field(default_factory=list)  #: what was asked of the newest attempt while it ran


class Silence(Struct, frozen=True):
    """While it lasts, nothing that matches is notified or acted upon."""

    matchers: dict[str, str]
    until: float | None
    author: str
    comment: str = ""


class Window(Struct, frozen=True):
    """A maintenance window that is open: nothing is done to runs of the name or pattern ``run`` until then, Unix seconds."""

    run: str
    until: float
    note: str = ""


class Memory(Struct):
    """What is stored of the whole core. ``now`` is the newest time that a tick, a poll or a person told, Unix seconds.

    ``requested``: what ended an attempt within the last day, of all runs. ``maintenance``: the windows that are open.
    ``suspects`` is what runs remember of their data: they write it and are told of it by inputs; ``told`` came before its start.
    """

    now: float = -math.inf
    runs: dict[str, Run] = field(default_factory=dict)
    silences: list[Silence] = field(default_factory=list)
    version: int = STORED
    requested: list[Requested] = field(default_factory=list)
    maintenance: list[Window] = field(default_factory=list)
    suspects: dict[str, Sighting] = field(default_factory=dict)
    told: dict[str, list[Sighting]] = field(default_factory=dict)


class State:
    """The core's memory with the settings and the rules that it works with."""

    def __init__(self, settings: Settings, pack: Any, engines: AlertSource, memory: Memory) -> None:
        self.settings = settings
        self.pack = pack
        self.engines = engines
        self.memory = memory
        self.orders = Orders()

    def fresh_rules(self) -> Rules:
        """Return the rules without any history, for a new start."""
        return Rules(self.engines.fresh(self.pack))


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, Held):
        return value.line()
    if isinstance(value, Rules):
        return value.engine.dump()
    raise NotImplementedError(f"{type(value).__name__} cannot be stored")


def _decode(kind: Any, value: Any) -> Any:
    if kind is Held:
        return Held.of_line(value)
    return np.frombuffer(value[1], dtype=value[0]).copy()


#: The part of the stored form that is about no single run.
HEAD = ""


def dump_memory(memory: Memory, runs: Iterable[str] | None = None) -> dict[str, bytes]:
    """Encode the memory by parts: the head, and each of these runs (all of them by default) under its ``run_uid``."""
    head = structs.replace(memory, runs={})
    parts = {HEAD: msgspec.msgpack.encode(head, enc_hook=_encode)}
    for run_uid in memory.runs if runs is None else runs:
        run = memory.runs.get(run_uid)
        if run is not None:
            if run.alive is not None:
                run.alive.trace.compact()
            parts[run_uid] = msgspec.msgpack.encode(run, enc_hook=_encode)
    return parts


def load_memory(parts: Mapping[str, bytes], pack: Any, engines: AlertSource) -> Memory:
    """Decode the memory and revive the evaluators with ``pack``.

    Raises:
        StateError: it was written by another version or is damaged.
    """
    try:
        memory = msgspec.msgpack.decode(parts[HEAD], type=Memory, dec_hook=_decode)
        if memory.version != STORED:
            raise StateError(f"stored state: version {memory.version} is not {STORED}; delete it to begin anew")
        for run_uid, part in parts.items():
            if run_uid != HEAD:
                memory.runs[run_uid] = msgspec.msgpack.decode(part, type=Run, dec_hook=_decode)
    except (KeyError, msgspec.DecodeError) as error:
        raise StateError(f"stored state: {error}; delete it to begin with the exporters' journals again") from None
    for run in memory.runs.values():
        if run.alive is not None:
            run.alive.rules = Rules(engines.revive(pack, run.alive.rules))
    return memory
