"""Annotations are templates that are checked with the rules and filled in without reach into the process."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.rules.properties.journals import lines_of, write
from trainwarden.rules.annotations import AnnotationError, annotated, check, render
from trainwarden.rules.core.effects import Deliver, Save
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.rulefiles import RuleFileError, check_packs, read_packs


def test_an_annotation_is_filled_in_with_value_since_step_and_labels() -> None:
    template = {"summary": "{{ value | round(2) }} since {{ since }}, now {{ step }}: {{ labels.severity }}"}
    found = render(template, value=1.2345, since=7, step=9, labels={"severity": "info"})
    assert found == {"summary": "1.23 since 7, now 9: info"}


def test_a_value_that_is_none_or_not_finite_is_filled_in_too() -> None:
    for value, said in ((None, "nan"), (float("inf"), "inf"), (float("nan"), "nan")):
        assert render({"s": "{{ value | round }}"}, value=value, since=1, step=1, labels={}) == {"s": said}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ valeu }}", "unknown variable 'valeu'; did you mean value?"),
        ("{{ run }}", "unknown variable 'run'; there are labels, since, step, value"),
        ("{{ value | rond }}", "No filter named 'rond'"),
        ("{{ value ", "no template: "),
        ("{{ labels.team }}", "no attribute 'team'"),
        ("{{ value.__class__.__mro__ }}", "unsafe"),
        ("{{ since / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_known_before(template: str, says: str) -> None:
    fault = check(template, {"severity": "info"})
    assert fault is not None
    assert says in fault.says


def test_what_goes_wrong_later_names_the_annotation() -> None:
    with pytest.raises(AnnotationError, match="annotation summary: ZeroDivisionError"):
        render({"summary": "{{ 1 // (since - 3) }}"}, value=1.0, since=3, step=3, labels={})


RULES = """groups:
  - name: g
    rules:
      - alert: A
        expr: loss > 1
        annotations:
          summary: The loss is {{ valeu }} too high.
      - alert: B
        expr: lss > 1
"""


def test_a_bad_template_is_an_error_of_the_file_with_its_place_among_the_others() -> None:
    with pytest.raises(RuleFileError) as caught:
        check_packs([(RULES, "r.yml")])
    said = str(caught.value).splitlines()
    assert said[0] == "r.yml:7:35: annotation summary: unknown variable 'valeu'; did you mean value?"
    assert said[2].index("^") == said[1].index("valeu")
    assert said[3].startswith("r.yml:9:15: unknown signal 'lss'")


def test_the_shipped_templates_can_be_filled_in() -> None:
    for rule in read_packs(["default"]).rules.values():
        assert render(rule.annotations, value=1.0, since=1, step=2, labels=rule.labels)["summary"]


INCIDENT = {
    "id": "inc_1",
    "rules": [
        {"alert": "A", "since": 7, "step": 9, "value": "NaN"},
        {"alert": "B", "since": 7, "step": 9, "value": None},
        {"alert": "Unknown", "since": 7, "step": 9, "value": 1.0},
    ],
}
SHOWN = RULES.replace("valeu", "value").replace(
    "lss > 1", "loss > 2\n        annotations: {summary: '{{ 1 // (since - 7) }}'}"
)


def test_an_incident_leaves_the_core_with_its_rules_texts_and_none_is_lost_by_a_bad_one() -> None:
    pack = check_packs([(SHOWN, "r.yml")])
    texts = [{"summary": "The loss is nan too high."}, {"summary": "(summary cannot be filled in: ZeroDivisionError: integer division or modulo by zero)"}, {}]  # fmt: skip
    saved = annotated(Save("incident", "inc_1", INCIDENT), pack)
    assert isinstance(saved, Save)
    assert [one["annotations"] for one in saved.row["rules"]] == texts
    body = {"event": "opened", "incident": INCIDENT}
    sent = annotated(Deliver("notify", "n", "r", "u", "inc_1", body, 1.0), pack)
    assert isinstance(sent, Deliver)
    assert [one["annotations"] for one in sent.body["incident"]["rules"]] == texts
    request = annotated(Deliver("webhook", "w", "r", "u", "inc_1", {"data": {"alerts": INCIDENT["rules"]}}, 1.0), pack)
    assert isinstance(request, Deliver)
    assert [one["annotations"] for one in request.body["data"]["alerts"]] == texts
    assert "annotations" not in INCIDENT["rules"][0]


def test_other_effects_and_other_packs_are_left_alone() -> None:
    for effect in (Save("notice", "k", {"says": "x"}), Deliver("webhook", "w", "r", "u", "i", {"data": {}}, 1.0)):
        assert annotated(effect, check_packs([(SHOWN, "r.yml")])) is effect
    saved = Save("incident", "k", {})
    assert annotated(saved, None) is saved


def test_a_replayed_incident_says_what_its_rules_say(tmp_path: Path) -> None:
    write(tmp_path, 1, [lines_of(1, 300)])
    (recording,) = find_recordings([str(tmp_path)], io.BytesIO(), tmp_path)
    rules = "groups: [{name: g, rules: [{alert: Spike, expr: loss / ema(loss) > 1.3, annotations: {summary: 'up to {{ value | round(1) }} since {{ since }}'}}]}]"  # fmt: skip
    incidents = Replay(Settings(), check_packs([(rules, "r.yml")])).run(merged(recording)).incidents
    said = [one for row in incidents.values() for one in row["rules"]]
    assert said
    for one in said:
        assert one["annotations"]["summary"] == f"up to {one['value']:.1f} since {one['since']}"
