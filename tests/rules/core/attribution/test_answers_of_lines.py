"""Each line ends as found, ruled out or not possible, the sum is told in words, and docs/causes.md has a section for each."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core import attribution
from trainwarden.rules.core.attribution import LINES, answer, attribute, weigh
from trainwarden.rules.core.facts import Finding
from trainwarden.rules.core.triage import STAGES

FILES = [path.stem for path in Path(attribution.__file__).parent.glob("*.py") if path.stem != "__init__"]
PAGE = Path(__file__).resolve().parents[4] / "docs" / "causes.md"


def name(line: object) -> str:
    return str(line.__name__).rpartition(".")[2]  # type: ignore[attr-defined]


def test_every_line_ends_in_one_of_three_ways_and_says_so() -> None:
    answers = {one.line: one for one in attribute(facts(at(range(301, 321), loss=lambda old: old + 1.0))).answers}
    assert list(answers) == [name(line) for line in LINES]
    assert {one.outcome for one in answers.values()} <= {"found", "ruled_out", "not_possible"}
    assert all(re.fullmatch(r"\S.*\.", one.says, re.DOTALL) for one in answers.values())
    assert answers["gradient_lead"].outcome == "found"
    assert answers["batch_fingerprint"].outcome == "ruled_out"
    assert answers["hardware"].outcome == "not_possible"
    assert answers["hardware"].says == "One rank only."


def test_what_was_looked_for_and_is_not_there_is_no_finding() -> None:
    line = next(one for one in LINES if name(one) == "learning_rate")
    absent = Finding(kind="k", says="It stood still.", cause="data", weight=-0.3, absent=True)
    there = Finding(kind="k", says="It speaks against it.", cause="data", weight=-0.2)
    assert answer(line, [absent]).outcome == "ruled_out"
    assert answer(line, [absent, there]) == answer(line, [there])
    assert answer(line, []).says == line.CLEAR


def test_the_sum_is_told_in_words() -> None:
    found = [
        Finding(kind="batch_fingerprint", says="s", cause="data", weight=0.9),
        Finding(kind="resume_mix", says="s", cause="data", weight=0.2),
        Finding(kind="recurring", says="s", cause="data", weight=-0.5),
        Finding(kind="loss_scale", says="s", cause="numeric", weight=0.2),
    ]
    cause = weigh(found, 10)
    assert cause.explained == (
        "For data batch fingerprint (0.90), resume mix (0.20); against it recurring (0.50): 0.46. Half of the 0.20 of the runner-up, "
        "numeric, is subtracted: 0.36. That is below 0.5, from which a cause is named."
    )
    assert weigh(found[:1], 10).explained == "For data batch fingerprint (0.90); nothing against it: 0.90."
    assert weigh([], 10).explained == "Nothing speaks for any cause."
    assert weigh([], 10).cheapest_test


def test_every_line_belongs_to_one_stage_of_the_triage() -> None:
    placed = [line for lines in STAGES.values() for line in lines]
    assert sorted(placed) == sorted(FILES)
    assert {name(line) for line in LINES} <= set(FILES)


def test_the_page_of_causes_has_a_section_for_each_line_and_places_it_as_the_triage_does() -> None:
    page = PAGE.read_text()
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == sorted(FILES)
    table = {
        found[0]: re.findall(r"\[(\w+)\]", found[1])
        for found in re.findall(r"^\| ([\w -]+) \|[^|]+\|(.+)\|$", page, re.MULTILINE)
    }
    assert {stage: tuple(table[stage]) for stage in STAGES} == dict(STAGES)


def test_the_page_names_the_weight_of_each_line_that_has_one() -> None:
    page = PAGE.read_text()
    for line in LINES:
        weight = getattr(line, "WEIGHT", None)
        if isinstance(weight, float):
            section = page.partition(f"### {name(line)}\n")[2].partition("\n### ")[0]
            assert f"{weight:g}" in section, name(line)
