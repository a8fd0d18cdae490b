"""A pack over healthy logs: how often each of its rules fires, and with which threshold it would fire as often as wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from trainwarden.rules.core.block import Block
from trainwarden.rules.core.language import Evaluator, Pack
from trainwarden.rules.evaluate import Compiler

from .search import ROWS, Search
from .threshold import RuleText, Threshold, thresholds

PER = 100_000


#: What is said of a rule that is counted alone.
UNMOVED = "only counted: no one number in it decides alone when it fires"


class Found(msgspec.Struct, frozen=True):
    """One rule: how often it fires, its threshold now, and the one for the wanted rate with how often it fires then.

    ``moves`` is the comparison whose number it is, where the rule has several; ``why`` says why there is none.
    """

    rule: str
    severity: str
    fired: int
    per_100k: float
    threshold: float | None = None
    tuned: float | None = None
    tuned_fired: int | None = None
    moves: str | None = None
    why: str | None = None


class Tuned(msgspec.Struct, frozen=True):
    """All rules on all logs. ``allowed`` is how often a rule may fire in so many records at the wanted rate."""

    records: int
    starts: int
    rate: float
    allowed: int
    rules: list[Found]


def tune(pack: Pack, files: Sequence[RuleText], blocks: Iterable[Block], rate: float) -> Tuned:
    """Return what comes of a pack on healthy starts; ``files`` are its texts, ``rate`` is firings per 100,000 records."""
    starts = list(blocks)
    records = sum(map(len, starts))
    allowed = int(min(rate * records / PER, records))  # no rule fires more often
    fired = _fired(pack, starts)
    movable = {name: (file, one) for file in files for name, one in thresholds(file).items()}
    compilers = {file.source: Compiler([(file.text, file.source)]) for file in files}
    measured = {key if isinstance(key, str) else key[0] for start in starts for key in start.columns}
    found = []
    for name, rule in pack.rules.items():
        lacking = sorted(pack.reads(name) - measured)
        never = f"never measured: needs {', '.join(lacking)}" if lacking else "never measured in these logs"
        base = Found(name, rule.labels.get("severity", "warning"), fired[name], fired[name] * PER / max(records, 1))
        if name not in movable:
            why = never if lacking and not pack.reads(name) & measured else UNMOVED
            found.append(msgspec.structs.replace(base, why=why))
            continue
        file, threshold = movable[name]
        search = _search(pack, threshold, compilers[file.source], starts)
        tuned = None if search is None else search.threshold_for(allowed)
        moves = threshold.compares if threshold.of > 1 else None
        base = msgspec.structs.replace(base, threshold=threshold.value, moves=moves)
        if search is None:
            base = msgspec.structs.replace(base, why="what it compares cannot be taken apart from the threshold")
        elif tuned is None:
            seen = len(search.values()) > 0
            why = "no threshold above the middle of its values fires more often" if seen else never
            base = msgspec.structs.replace(base, why=why)
        else:
            base = msgspec.structs.replace(base, tuned=tuned, tuned_fired=search.fires(tuned))
        found.append(base)
    return Tuned(records, len(starts), rate, allowed, found)


def _fired(pack: Pack, starts: Sequence[Block]) -> dict[str, int]:
    fired = dict.fromkeys(pack.rules, 0)
    for block in starts:
        evaluator = Evaluator(pack)
        for first in range(0, len(block), ROWS):
            for change in evaluator.feed(block.rows(first, first + ROWS)):
                fired[change.rule] += change.state == "firing"
    return fired


def _search(pack: Pack, threshold: Threshold, compiler: Compiler, starts: Sequence[Block]) -> Search | None:
    try:
        return Search(threshold, pack.rules[threshold.rule].alert, compiler, starts)
    except ValueError:
        return None
