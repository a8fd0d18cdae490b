"""What is suspicious is found where it stands, what is meant is left alone, and a comment switches a check off."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwarden.rules.lint.checks import NAMES
from trainwarden.rules.lint.lint import lint
from trainwarden.rules.rulefiles import check_packs, shipped, text_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checks.md"
SAID = "labels: {severity: info, verdict: other}\n        annotations: {summary: x}"


def found(*expressions: str, hold: str = "0 steps", longest_run: int = 50_000, before: str = "") -> list[str]:
    """Return check and offending text of each finding in rules of these expressions."""
    text = f"signals: [temp]\ngroups:\n  - name: g\n    rules:\n{before}"
    for number, expression in enumerate(expressions):
        text += f"      - alert: a{number}\n        expr: {expression}\n        for: {hold}\n        {SAID}\n"
    check_packs([(text, "r.yml")])
    return [f"{one.check} {one.problem.text[one.problem.column - 1 :]}" for one in lint([(text, "r.yml")], longest_run)]


@pytest.mark.parametrize(
    "expression",
    [
        "abs(loss) < 0",
        "grad_norm < 0",
        "grad_zero_ratio > 1",
        "count((loss > 5)[100]) > 100",
        "streak(loss > 5) < 0",
        "stddev(loss[50]) < 0",
        "period(loss > 5, window=500) > 500",
        "period(grad_norm < 0) > 0",
        "mean(grad_norm[50]) < 0",
        "ema(batch_unique_token_ratio) > 1.5",
        "loss > loss",
        "loss != loss",
        "isnan(mean(loss[50]))",
        "isinf(ema(loss))",
        "log2(batch_unique_token_ratio) > 0",
        "-grad_norm > 0",
        "grad_norm + 1 < 1",
        "2 * grad_norm < 0",
        "grad_norm / mean(grad_norm[50]) < 0",
        "temp > 3 and temp < 3",
        "temp >= 5 and loss > 1 and 4 > temp",
        "temp == 5 and temp > 5",
        "count((loss > 1)[10]) > 3 and count((loss > 1)[10]) < 2",
        "max_over(grad_norm by group) < 0",
        "argmax(loss by rank) < 0",
    ],
)  # fmt: skip
def test_what_never_holds_is_found(expression: str) -> None:
    assert found(expression)[0].startswith("expr/never")


@pytest.mark.parametrize(
    "expression", ["grad_norm >= 0", "abs(loss) >= 0", "loss == loss", "not grad_norm < 0", "streak(loss > 5) > -1"]
)
def test_what_always_holds_is_found(expression: str) -> None:
    assert any(one.startswith(("expr/always", "expr/never")) for one in found(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "loss < 0",
        "temp < 0",
        "grad_norm <= 0",
        "grad_zero_ratio >= 1",
        "count((loss > 5)[100]) >= 100",
        "isnan(loss)",
        "isinf(loss / temp)",
        "temp >= 3 and temp <= 3",
        "temp > 3 and temp < 3.1",
        "temp < 3 or temp > 5",
        "loss - grad_norm < 0",
        "zscore(loss) < -3",
        "slope(loss[50]) < 0",
        "log2(loss_scale) < 0",
        "count((clip_ratio > 1)[100]) / count((clip_ratio >= 0)[100]) > 0.9",
        "loss / ema(loss) > 1.5 unless loss > 100",
        "stddev(loss[2]) > 1 and zscore(loss[3]) > 1 and slope_t(loss[3]) > 0",
    ],
)
def test_what_may_hold_is_left_alone(expression: str) -> None:
    assert found(expression) == []


def test_a_recorded_expression_is_looked_through() -> None:
    before = "      - record: size\n        expr: abs(loss)\n      - record: big\n        expr: size > -1\n"
    assert found("size < 0", "big and loss > 1", before=before) == ["expr/always size > -1", "expr/never size < 0"]


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("slope_t(loss[2]) > 3", "expr/unknown slope_t(loss[2]) > 3"),
        ("stddev(loss[1]) > 3", "expr/unknown stddev(loss[1]) > 3"),
        ("loss > 1 and zscore(loss[2] offset 5) > 3", "expr/unknown zscore(loss[2] offset 5) > 3"),
        ("update_norm > 3 or update_norm < 1", "expr/unrecorded update_norm > 3 or update_norm < 1"),
    ],
)
def test_what_is_unknown_at_every_step_is_found(expression: str, says: str) -> None:
    assert found(expression) == [says]


def test_windows_and_holds_longer_than_any_run_are_found() -> None:
    assert found("mean(loss[5000]) > 1", longest_run=2000) == ["expr/window loss[5000]) > 1"]
    assert found("mean(loss[5000]) > 1", longest_run=900) == ["expr/window mean(loss[5000]) > 1"]
    assert found("mean(mean(loss[500])[5000]) > 1", longest_run=1090) == ["expr/window mean(mean(loss[500])[5000]) > 1"]
    assert found("mean(loss[5000]) > 1 or loss > 9", longest_run=5000) == []
    assert found("zscore(loss, window=10000) > 3", longest_run=1900) == ["expr/window zscore(loss, window=10000) > 3"]
    assert found("loss > 1", hold="3000 steps", longest_run=2000) == ["alert/for for: 3000 steps"]
    assert found("loss > 1", hold="10h", longest_run=2000) == []


def test_what_an_alert_does_not_say_is_found() -> None:
    text = "groups: [{name: g, rules: [{alert: a, expr: loss > 1}, {record: r, expr: loss * 2}]}]"
    assert [one.check for one in lint([(text, "f")])] == [
        "alert/summary",
        "alert/severity",
        "alert/verdict",
        "rule/unused",
    ]


def test_equal_names_and_equal_expressions_are_found_over_files() -> None:
    def file(name: str, expression: str) -> str:
        return f"groups: [{{name: g, rules: [{{alert: {name}, expr: {expression}, {SAID.replace(chr(10), ',')}}}]}}]"

    texts = [(file("a", "loss > 1"), "1.yml"), (file("a", "loss > 2"), "2.yml"), (file("b", "loss  >  1.0"), "3.yml")]
    assert [(one.check, one.problem.source) for one in lint(texts)] == [
        ("rule/duplicate", "2.yml"),
        ("rule/same", "3.yml"),
    ]
    assert "1.yml:1 too" in lint(texts)[0].problem.message


@pytest.mark.parametrize(
    ("above", "within", "expected"),
    [
        ("", "", ["expr/never", "expr/never"]),
        ("      # trainwarden disable expr/never\n", "", ["expr/never"]),
        ("", "        # trainwarden disable expr/always expr/never\n", ["expr/never"]),
        ("", "  # trainwarden disable alert/for\n", ["expr/never", "expr/never"]),
        ("# trainwarden file/disable expr/never\n", "", []),
    ],
)
def test_a_comment_switches_a_check_off_for_its_rule_or_its_file(above: str, within: str, expected: list[str]) -> None:
    rule = "      - alert: {name}\n{within}        expr: grad_norm < {bound}\n        {said}\n"
    text = "groups:\n  - name: g\n    rules:\n"
    text += above + rule.format(name="a", within=within, bound=0, said=SAID)
    text += rule.format(name="b", within="", bound=-1, said=SAID)
    assert [one.check for one in lint([(text, "f")])] == expected


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_pack_has_no_finding(name: str) -> None:
    assert [str(one) for one in lint([text_of(name)])] == []


def test_every_check_is_explained_on_its_page() -> None:
    page = PAGE.read_text()
    assert [name for name in NAMES if f"### `{name}`" not in page] == []
    assert page.count("### `") == len(NAMES)
