"""How much hangs on the exact numbers of the default pack: each one 30 % up and down, scored on labelled curves.

Every number that an expression compares with or multiplies by is varied by itself, and so is each rule's ``for``; lengths of windows
and the settings of functions are not thresholds. Reported for each variation are the labelled events that were paged and the false
pages. A curve is replayed where it has the signals without which the varied rule never holds; elsewhere the pack as it is stands for the
variation. What was done already is taken from the output file, as long as the pack is the same.

    python bench/sensitivity.py --curves FOLDER --output .bench/sensitivity.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from curves import Curves

from trainwarden.rules.core.language import load_pack
from trainwarden.rules.core.language.operators import FUNCTIONS
from trainwarden.rules.core.language.parser import Parser
from trainwarden.rules.core.language.syntax import (
    Binary,
    By,
    Call,
    Negative,
    Not,
    Number,
    Option,
    Selector,
    Tree,
    Window,
)
from trainwarden.rules.rulefiles import text_of

FACTORS = (0.7, 1.3)
#: Functions that hold in a start that resumed from another alone.
OF_RESUMES = ("resumed", "since_resume")
#: Figures of the scorer that are kept.
KEPT = ("must_page", "must_page_late", "must_report", "bad_batch", "false_pages", "false_incidents_per_100k")


def thresholds(tree: Tree | Option) -> Iterator[Number]:
    """Yield the numbers of an expression that are no setting of a function."""
    if isinstance(tree, Number):
        yield tree
    elif isinstance(tree, Window):
        yield from thresholds(tree.source)
    elif isinstance(tree, Call):
        for argument in tree.arguments:
            if not isinstance(argument, Option):
                yield from thresholds(argument)
    elif isinstance(tree, Negative | Not):
        yield from thresholds(tree.operand)
    elif isinstance(tree, Binary):
        yield from thresholds(tree.left)
        yield from thresholds(tree.right)
    else:
        assert isinstance(tree, Selector | By | Option)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a curve has: its signals, and whether one of its starts resumed from another."""

    signals: frozenset[str]
    resumed: bool


@dataclass(frozen=True, slots=True)
class Needs:
    """The varied rule's expression and the recorded ones by name. What a recorded one changes shows where its name stands."""

    tree: Tree
    records: dict[str, Tree]

    def met(self, seen: Seen) -> bool:
        """Say whether the varied rule could come to anything in a curve."""
        return may_hold(self.tree, self.records, seen)


def may_hold(tree: Tree | Option, records: Mapping[str, Tree], seen: Seen) -> bool:
    """Say whether an expression can be known, or true, where only these signals are: unknown is never true."""
    if isinstance(tree, Selector):
        recorded = records.get(tree.name)
        return tree.name in seen.signals if recorded is None else may_hold(recorded, records, seen)
    if isinstance(tree, By):
        return may_hold(tree.selector, records, seen)
    if isinstance(tree, Window):
        return may_hold(tree.source, records, seen)
    if isinstance(tree, Negative | Not):
        return isinstance(tree, Not) or may_hold(tree.operand, records, seen)
    if isinstance(tree, Call):
        function = FUNCTIONS[tree.name]
        if tree.name == "absent":
            return True
        if (function.of_parent or tree.name in OF_RESUMES) and not seen.resumed:
            return False
        return all(may_hold(one, records, seen) for one in tree.arguments)
    if isinstance(tree, Binary):
        left, right = may_hold(tree.left, records, seen), may_hold(tree.right, records, seen)
        return left or right if tree.operator == "or" else left if tree.operator == "unless" else left and right
    return True


class Variation(NamedTuple):
    """A pack to try, and what its variation needs."""

    text: str
    needs: Needs


def variations(text: str) -> dict[str, Variation]:
    """Return the packs to try, by what is varied in them: ``rule: expression@offset value -> value``."""
    document = yaml.safe_load(text)
    parser = Parser()
    found: dict[str, Variation] = {}
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    records = {rule["record"]: parser.parse(str(rule["expr"])) for rule in rules if "record" in rule}
    for at_group, group in enumerate(document["groups"]):
        for at_rule, rule in enumerate(group["rules"]):
            name, expression = rule.get("alert") or rule["record"], str(rule["expr"])
            needs = Needs(parser.parse(expression), records)

            def vary(
                what: str, key: str, value: str, at: tuple[int, int] = (at_group, at_rule), needs: Needs = needs
            ) -> None:
                changed = deepcopy(document)
                changed["groups"][at[0]]["rules"][at[1]][key] = value
                found[what] = Variation(yaml.safe_dump(changed, sort_keys=False), needs)

            for number in thresholds(parser.parse(expression)):
                if number.value == 0:
                    continue
                first, end = number.at.first, number.at.end
                for factor in FACTORS:
                    value = f"{number.value * factor:.12g}"
                    what = f"{name}: {expression[:first]}[{number.value:g} -> {value}]{expression[end:]}"
                    vary(what, "expr", expression[:first] + value + expression[end:])
            hold = str(rule.get("for", "")).split()
            if len(hold) == 2:
                for factor in FACTORS:
                    amount = max(1, round(int(hold[0]) * factor))
                    if amount != int(hold[0]):
                        vary(f"{name}: for: {hold[0]} -> {amount} {hold[1]}", "for", f"{amount} {hold[1]}")
    return found


class _Worker:
    """One process's curves, read once, and what the pack as it is finds on them."""

    curves: Curves
    usual: list[dict[str, Any]]
    seen: list[Seen]

    @classmethod
    def begin(cls, folder: str, text: str) -> None:
        cls.curves = Curves(Path(folder))
        cls.usual = cls.curves.replay(load_pack(text, "default.yml"))
        cls.seen = [
            Seen(frozenset(found["signals"]), len({start.start_id for start, _, _ in lines}) > 1)
            for found, (_, lines) in zip(cls.usual, cls.curves.runs, strict=True)
        ]

    @classmethod
    def score(cls, job: tuple[str, Variation | None]) -> tuple[str, dict[str, Any]]:
        what, variation = job
        places: list[int] = []
        found = list(cls.usual)
        if variation is not None:
            places = [place for place, seen in enumerate(cls.seen) if variation.needs.met(seen)]
            for place, one in zip(
                places, cls.curves.replay(load_pack(variation.text, "varied.yml"), places), strict=True
            ):
                found[place] = one
        figures = cls.curves.score(found)
        return what, {**{name: figures[name] for name in KEPT}, "curves_replayed": len(places)}


def main() -> None:
    """Score the pack as it is and each variation; write after each one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--curves", type=Path, required=True, help="a folder as bench/curves.py describes it")
    parser.add_argument("--output", type=Path, default=Path(".bench/sensitivity.json"))
    parser.add_argument("--pack", default="default", help="a shipped pack or a rule file")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="variations whose name holds this text")
    options = parser.parse_args()
    text, _ = text_of(options.pack)
    key = hashlib.sha256(text.encode()).hexdigest()
    jobs: dict[str, Variation | None] = {"as it is": None, **variations(text)}
    found: dict[str, Any] = {"pack": key, "variations": {}}
    if options.output.exists():
        before = json.loads(options.output.read_text())
        if before.get("pack") == key:
            found["variations"] = before["variations"]
    done = found["variations"]
    waiting = [job for job in jobs.items() if job[0] not in done and (options.only in job[0] or job[0] == "as it is")]
    print(f"{len(jobs)} packs, {len(waiting)} to try")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(
        options.processes, _Worker.begin, (str(options.curves), text)
    ) as pool:
        for count, (what, figures) in enumerate(pool.imap_unordered(_Worker.score, waiting), start=1):
            done[what] = figures
            print(f"{count}/{len(waiting)} {time.monotonic() - began:.0f} s  {what}\n    {figures}", flush=True)
            options.output.write_text(json.dumps({**found, "summary": summary(done)}, indent=2) + "\n")
    print(json.dumps(summary(done), indent=2))


def summary(done: dict[str, Any]) -> dict[str, Any]:
    """Return the extremes over all variations, and which ones change what is paged."""
    base = done.get("as it is", {})
    return {
        "tried": len(done) - ("as it is" in done),
        "of_which_concern_no_curve": sum(not one["curves_replayed"] for one in done.values()) - ("as it is" in done),
        "must_page": base.get("must_page"),
        "must_page_lowest": min((one["must_page"] for one in done.values()), key=lambda text: int(text.split("/")[0])),
        "must_page_changed_by": [what for what, one in done.items() if base and one["must_page"] != base["must_page"]],
        "false_pages": base.get("false_pages"),
        "false_pages_highest": max(one["false_pages"] for one in done.values()),
        "false_pages_above_1": [what for what, one in done.items() if one["false_pages"] > 1],
    }


if __name__ == "__main__":
    main()
