"""Unit tests of rules: what passes, what fails and how it is said, and what is no test at all."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from trainwarden.rules.ruletests.run import Report, run_tests
from trainwarden.rules.ruletests.testfile import RuleTestError, load_tests

RULES = """
signals: {load: [expert]}
groups:
  - name: g
    rules:
      - record: ratio
        expr: loss / ema(loss)
      - alert: Spike
        expr: ratio > 1.5
        for: 3 steps
        labels: {severity: warning}
        annotations: {summary: "{{ value | round(2) }} since {{ since }} ({{ labels.severity }}, {{ step }})"}
      - alert: Ranks
        expr: spread(loss by rank) > 1
      - alert: Expert
        expr: max_over(load by expert) > 5 or moment_rms{moment="exp_avg", group="mlp"} > 5
      - alert: Slow
        expr: loss > 3
        for: 5m
"""


def ran(folder: Path, text: str, only: str | None = None) -> Report:
    (folder / "r.yml").write_text(RULES)
    (folder / "r.test.yml").write_text(f"rule_files: [r.yml]\ntests:\n{text}")
    return run_tests(load_tests(folder / "r.test.yml"), None if only is None else re.compile(only))


def errors(folder: Path, text: str) -> str:
    with pytest.raises(RuleTestError) as caught:
        ran(folder, text)
    return str(caught.value).replace(str(folder) + "/", "")


SPIKE = '  - name: spike\n    input_series: [{series: loss, values: "2x19 5x3 2x10"}]\n'


def test_what_is_expected_and_comes_passes(tmp_path: Path) -> None:
    report = ran(
        tmp_path,
        SPIKE
        + """    alert_rule_test:
      - {eval_step: 22, alertname: Spike}
      - eval_step: 23
        alertname: Spike
        exp_alerts:
          - exp_labels: {severity: warning}
            exp_annotations: {summary: "2.02 since 21 (warning, 23)"}
            exp_since: 21
            exp_value: 2.0204459
      - {eval_step: 35, alertname: Spike}
    expr_test:
      - {expr: ratio, eval_step: 5, exp_value: 1}
      - {expr: ratio > 1.5, eval_step: 22, exp_value: true}
      - {expr: grad_norm, eval_step: 22, exp_value: unknown}
      - {expr: loss / 0, eval_step: 22, exp_value: Inf}
""",
    )
    assert [str(one) for one in report.failures] == []
    assert (report.tests, report.checks) == (1, 7)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ("[]", 'got:      firing since step 21, labels {severity="warning"}'),
        ("[{exp_since: 20}]", "got:      firing since step 21"),
        ("[{exp_value: 1}]", "got:      firing, value 2.02"),
        ("[{exp_labels: {}}]", 'got:      firing, labels {severity="warning"}'),
        ("[{exp_annotations: {}}]", 'got:      firing, annotations {summary="2.02 since 21 (warning, 23)"}'),
    ],
)
def test_what_comes_otherwise_is_said_on_both_sides(expected: str, got: str, tmp_path: Path) -> None:
    text = f"{SPIKE}    alert_rule_test:\n      - {{eval_step: 24, alertname: Spike, exp_alerts: {expected}}}\n"
    (failure,) = ran(tmp_path, text).failures
    said = str(failure).splitlines()
    assert said[0] == f"{tmp_path}/r.test.yml:6:9: spike: Spike at step 24"
    assert said[1].startswith("    expected: not firing" if expected == "[]" else "    expected: firing")
    assert got in said[2]
    assert said[3] == "    its life: pending at step 21, firing at step 23, resolved at step 25"


def test_an_alert_that_is_only_pending_does_not_fire(tmp_path: Path) -> None:
    text = SPIKE + "    alert_rule_test: [{eval_step: 22, alertname: Spike, exp_alerts: [{}]}]\n"
    (failure,) = ran(tmp_path, text).failures
    assert failure.got == "not firing (pending since step 21)"


def test_a_value_of_another_kind_than_expected_fails(tmp_path: Path) -> None:
    text = SPIKE + (
        "    expr_test:\n      - {expr: loss, eval_step: 1, exp_value: true}\n"
        "      - {expr: loss > 1, eval_step: 1, exp_value: 1}\n      - {expr: loss, eval_step: 1, exp_value: NaN}\n"
    )
    said = [(one.expected, one.got) for one in ran(tmp_path, text).failures]
    assert said == [("true", "2"), ("1", "true"), ("nan", "2")]


def test_ranks_labels_and_signals_of_ones_own_can_be_given(tmp_path: Path) -> None:
    text = """  - input_series:
      - {series: loss, values: 1x9}
      - {series: 'loss{rank="0"}', values: 1x9}
      - {series: 'rank_loss{rank="1"}', values: 1x4 3x4}
      - {series: 'load{expert="7"}', values: 1 9 1x7}
      - {series: 'moment_rms{moment="exp_avg", group="mlp"}', values: 1x6 9 9 9}
    alert_rule_test:
      - {eval_step: 5, alertname: Ranks}
      - {eval_step: 6, alertname: Ranks, exp_alerts: [{exp_value: 2}]}
      - {eval_step: 1, alertname: Expert}
      - {eval_step: 2, alertname: Expert, exp_alerts: [{}]}
      - {eval_step: 3, alertname: Expert}
      - {eval_step: 9, alertname: Expert, exp_alerts: [{}]}
"""
    assert [str(one) for one in ran(tmp_path, text).failures] == []


def test_strides_first_steps_and_the_clock_can_be_given(tmp_path: Path) -> None:
    text = """  - stride: 10
    first_step: 1000
    interval: 1m
    input_series: [{series: loss, values: 4x9}]
    alert_rule_test:
      - {eval_step: 1049, alertname: Slow}
      - {eval_step: 1050, alertname: Slow, exp_alerts: [{exp_since: 1000}]}
"""
    assert [str(one) for one in ran(tmp_path, text).failures] == []


def test_tests_are_chosen_by_name_and_each_is_a_start_of_its_own(tmp_path: Path) -> None:
    second = (
        SPIKE.replace("name: spike", "name: other") + "    expr_test: [{expr: ratio, eval_step: 1, exp_value: 1}]\n"
    )
    text = SPIKE + "    alert_rule_test: [{eval_step: 30, alertname: Spike, exp_alerts: [{}]}]\n" + second
    assert len(ran(tmp_path, text).failures) == 1
    report = ran(tmp_path, text, only="^oth")
    assert (report.tests, report.failures) == (1, ())


BROKEN = [
    ("    alert_rule_test: [{eval_step: 3}]\n", "r.test.yml:5:23: tests[0].alert_rule_test[0]: alertname is missing"),
    ("    alert_rule_test: [{eval_step: 3, alertname: Spiek}]\n", "no rule has the alert 'Spiek'; did you mean Spike?"),
    ("    alert_rule_test: [{eval_step: 99, alertname: Spike}]\n", "no record at step 99: the series cover steps 1 to 35"),
    ("    alert_rule_test: [{alertname: Spike}]\n", "field eval_step is missing"),
    ("    alert_rule_tests: []\n", "r.test.yml:5:5: tests[0].alert_rule_tests: unknown field; did you mean alert_rule_test?"),
    ("    alert_rule_test: [{eval_step: 3, alertname: Spike, exp_alerts: [{}, {}]}]\n", "one instance in a run"),
    ("    alert_rule_test: [{eval_step: 3, alertname: Spike, exp_alerts: [{exp_value: x}]}]\n", "'x' is no number"),
    ("    expr_test: [{expr: lss > 1, eval_step: 3, exp_value: true}]\n", "r.test.yml:5:24: unknown signal 'lss'"),
    ("    expr_test: [{expr: loss, eval_step: 3, exp_value: maybe}]\n", "'maybe' is no number, true, false, unknown"),
    ("    stride: 0\n", "a record covers at least one step"),
    ("", "the test expects nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), BROKEN)
def test_what_is_no_test_is_an_error_with_its_place(text: str, says: str, tmp_path: Path) -> None:
    assert says in errors(tmp_path, SPIKE + text)


@pytest.mark.parametrize(
    ("series", "says"),
    [
        ("{series: los, values: 1}", "r.test.yml:3:29: unknown signal 'los'; did you mean loss?"),
        ("{series: ratio, values: 1}", "ratio is recorded by a rule"),
        ("{series: 'grad_norm{group=\"mpl\"}', values: 1}", "no group 'mpl'; did you mean mlp?"),
        ("{series: 'loss{rank=\"first\"}', values: 1}", "a rank is a number"),
        ("{series: 'loss{x=\"1\"}', values: 1}", "loss has no label 'x'"),
        ("{series: loss > 1, values: 1}", "a series is one signal"),
        ("{series: loss, values: 1 two}", "r.test.yml:3:45: 'two' is no value"),
        ("{series: loss, values: 1}, {series: loss, values: 1}", "loss is given twice"),
        ("", "a test needs at least one series"),
    ],
)
def test_what_is_no_series_is_an_error_with_its_place(series: str, says: str, tmp_path: Path) -> None:
    test = f"  - input_series: [{series}]\n    alert_rule_test: [{{eval_step: 1, alertname: Spike}}]\n"
    assert says in errors(tmp_path, test)


def test_all_errors_of_a_file_come_at_once_in_its_order(tmp_path: Path) -> None:
    text = "  - input_series: [{series: los, values: x}]\n    alert_rule_test: [{eval_step: 1}, {eval_step: 1, alertname: a}]\n"
    lines = re.findall(r"^r\.test\.yml:(\d+):(\d+)", errors(tmp_path, text), re.MULTILINE)
    assert len(lines) == 3
    assert lines == sorted(lines, key=lambda place: (int(place[0]), int(place[1])))


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("rule_files: [absent.yml]", "absent.yml: cannot be read"),
        ("rule_files: ['*.nothing']", "*.nothing: no such file"),
        ("rule_files: [nopack]", "no such pack; shipped are default"),
        ("rule_files: []", "name at least one"),
        ("rule_files: [bad.yml]", "bad.yml:1:"),
        ("rules: []", "unknown field"),
        ("a: [", "r.test.yml:"),
    ],
)
def test_rule_files_that_cannot_be_used_are_said(head: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yml").write_text("groups: [{name: g, rules: [{alert: a, expr: lss > 1}]}]")
    (tmp_path / "r.test.yml").write_text(f"{head}\ntests: []\n")
    with pytest.raises(RuleTestError, match=re.escape(says)):
        load_tests(tmp_path / "r.test.yml")


def test_rule_files_may_be_globs_and_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/r.yml").write_text(RULES)
    (tmp_path / "t.yml").write_text(f"rule_files: ['rules/*.yml']\ntests:\n{SPIKE}    expr_test: [{{expr: loss, eval_step: 1, exp_value: 2}}]\n")  # fmt: skip
    assert run_tests(load_tests(tmp_path / "t.yml")).failures == ()


def test_a_file_without_tests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r.test.yml").write_text("rule_files: [default]\ntests: []\n")
    with pytest.raises(RuleTestError, match="there is no test"):
        load_tests(tmp_path / "r.test.yml")


def test_the_shipped_pack_passes_its_own_tests() -> None:
    with_files = files("trainwarden.rules.packs") / "default.test.yml"
    report = run_tests(load_tests(Path(str(with_files))))
    assert [str(one) for one in report.failures] == []
    assert report.tests >= 5


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/rule-tests.md").read_text()
    rules, example = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my-rules.yml").write_text(rules)
    (tmp_path / "my.test.yml").write_text(example)
    assert [str(one) for one in run_tests(load_tests(tmp_path / "my.test.yml")).failures] == []


def test_a_signal_that_stands_still_is_unknown_to_the_rules_as_in_replay(tmp_path: Path) -> None:
    still = '  - name: still\n    input_series: [{series: loss, values: "2 3 4x300"}]\n'
    passes = ran(
        tmp_path,
        still
        + """    alert_rule_test: [{eval_step: 299, alertname: Slow}]
    expr_test: [{expr: loss, eval_step: 40, exp_value: 4}, {expr: loss, eval_step: 299, exp_value: unknown}]
""",
    )
    assert passes.failures == ()
    fails = ran(tmp_path, still + "    expr_test: [{expr: loss, eval_step: 299, exp_value: 4}]\n")
    (failure,) = fails.failures
    assert "loss is unknown to the rules from step 52 on: the same value 50 times in a row is no measurement" in str(
        failure
    )
