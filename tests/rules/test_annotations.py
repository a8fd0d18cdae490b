"""Annotations are templates that are checked with the rules and filled in without reach into the process."""

from __future__ import annotations

import pytest

from trainwarden.rules.annotations import AnnotationError, check, render
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
