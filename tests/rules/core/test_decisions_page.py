"""docs/decisions.md tells of everything that policy and gates can say; that its tables are those of the code is tested with all pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from trainwarden.rules.core.attribution import CAUSES
from trainwarden.rules.core.gates import DECIDING, GATES
from trainwarden.rules.core.policy import ACTIONS, OTHERWISE, POLICY, Wanted
from trainwarden.rules.report.words import CLAUSES

PAGE = (Path(__file__).parents[3] / "docs/decisions.md").read_text()


def rows_of(name: str) -> list[list[str]]:
    part = re.search(rf"<!-- made: {name} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert part is not None
    return [line.strip("| ").split(" | ") for line in part[1].splitlines()[2:]]


def test_the_policys_lines_stand_in_their_order_each_with_its_action() -> None:
    shown = [(row[0].split()[1].strip("`"), row[2].strip("`")) for row in rows_of("policy")]
    assert shown == [(line.name, line.action) for line in (*POLICY, OTHERWISE)]
    assert set(get_args(Wanted)) == set(ACTIONS)


def test_the_gates_stand_in_their_order_each_with_its_question_and_its_way_to_open() -> None:
    shown = [(row[0].split()[1].strip("`"), row[1], row[3]) for row in rows_of("gates")]
    assert shown == [(gate.name, gate.question, gate.opens) for gate in GATES]
    assert all(f"`{name}`" in PAGE.partition("<!-- made: gates -->")[0] for name in DECIDING)


def test_each_number_has_words_of_its_own() -> None:
    rows = rows_of("limits")
    assert len({row[2] for row in rows}) == len(rows)
    assert {row[0]: row[1] for row in rows}["`max_rollbacks`"] == "2"


def test_the_page_says_what_is_done_for_every_verdict_and_every_cause() -> None:
    heads = re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", " ".join(heads)))
    assert set(CLAUSES) <= told
    assert set(CAUSES) | {"undetermined"} <= told
