"""Published rules beside the default pack on the same labelled curves: one table.

Each rule of ``peers_rules.py`` sees a run's loss and gradient norm as it would in training. Its alarms become incidents so that all are
scored alike: alarms at most 50 records apart are one incident, which opens at the first. A peer has no word for how grave it is, so an
incident is a page where the rule ends the run, or where it alarms at 20 records of one incident; else it is a warning.

    python bench/peers.py --curves FOLDER --output .bench/peers.json
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

from curves import Curves, records
from peers_rules import RULES, Rule

from trainwarden.rules.rulefiles import read_packs

#: Records without an alarm after which the next one is another incident, and alarms of one incident that make it a page.
APART, PERSISTS = 50, 20
OURS = "trainwarden, default pack"
COLUMNS = ("must_page", "must_page_reported", "must_report", "false_incidents_per_100k", "false_pages_per_100k")
HEADINGS = ("rule", "must page", "(reported)", "must report", "false incidents per 100k", "false pages per 100k")


def incidents_of(rule: Rule, steps: list[int], losses: list[float], norms: list[float] | None) -> list[dict[str, Any]]:
    """Return a rule's alarms on one run as incidents."""
    found: list[dict[str, Any]] = []
    last = -math.inf
    for row, alarm in enumerate(rule.judge(losses, norms)):
        if not alarm:
            continue
        if row - last > APART:
            found.append({"onset_step": steps[row], "opened_step": steps[row], "severity": "warning", "alarms": 0})
        last = row
        incident = found[-1]
        incident["alarms"] += 1
        if incident["severity"] == "warning" and (rule.stops or incident["alarms"] >= PERSISTS):
            incident |= {"severity": "critical", "confirmed_step": steps[row]}
    return found


def judge(curves: Curves, rule: Rule) -> list[dict[str, Any]]:
    """Return what a peer's rule finds on all runs, in the form of a replay."""
    found = []
    for recording, lines in curves.runs:
        measured = [record for record in records(lines) if record.value("loss") is not None]
        losses = [record.value("loss") or 0.0 for record in measured]
        norms = [record.value("grad_norm", "all") for record in measured]
        given = None if any(norm is None for norm in norms) else [norm or 0.0 for norm in norms]
        steps = [record.step for record in measured]
        found.append({"source": recording.source, "incidents": incidents_of(rule, steps, losses, given)})
    return found


class _Worker:
    """One process's curves, read once."""

    curves: Curves

    @classmethod
    def begin(cls, folder: str) -> None:
        cls.curves = Curves(Path(folder))

    @classmethod
    def figures(cls, place: int | None) -> dict[str, Any]:
        if place is None:
            return cls.curves.score(cls.curves.replay(read_packs(["default"])))
        return cls.curves.score(judge(cls.curves, RULES[place]))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += [f"| {name} | " + " | ".join(str(one[column]) for column in COLUMNS) + " |" for name, one in found.items()]
    return "\n".join(lines)


def main() -> None:
    """Judge with every rule, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--curves", type=Path, required=True, help="a folder as bench/curves.py describes it")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = [OURS, *(rule.name for rule in RULES)]
    with multiprocessing.get_context("spawn").Pool(options.processes, _Worker.begin, (str(options.curves),)) as pool:
        figures = pool.map(_Worker.figures, [None, *range(len(RULES))], chunksize=1)
    found = dict(zip(names, figures, strict=True))
    print(table(found))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
