"""All errors of a rule file at once, each with file, line, column and a caret."""

from __future__ import annotations

import pytest

from trainwarden.rules.core.language import RuleErrors, load_pack, load_packs
from trainwarden.rules.core.language.elsewhere import INSTEAD
from trainwarden.rules.core.language.operators import FUNCTIONS


def errors(text: str) -> RuleErrors:
    with pytest.raises(RuleErrors) as caught:
        load_pack(text, "my.yml")
    return caught.value


def of_expression(expression: str) -> list[tuple[int, str]]:
    """Return offset and message of each error of one expression."""
    text = f"signals: [x]\ngroups:\n- name: g\n  rules:\n  - alert: a\n    expr: {expression}\n"
    return [(problem.column - 11, problem.message) for problem in errors(text).problems]


FILE = """\
groups:
  - name: loss
    rules:
      - alert: A
        expr: grad_nrom > 5
        fro: 3 steps
        labels: {severity: fatal, verdict: transient_spikes}
      - alert: B
        expr: >-
          loss > 5
          and loss[20] > 3
        for: 3
      - alert: A
        expr: loss >
        annotations: {summary: 5}
  - name: loss
    rules: []
    interval: 5s
"""


def test_all_errors_come_at_once_with_their_places() -> None:
    found = errors(FILE)
    assert [(problem.line, problem.column) for problem in found.problems] == [
        (5, 15),
        (6, 9),
        (7, 28),
        (7, 44),
        (11, 15),
        (12, 14),
        (13, 16),
        (14, 21),
        (15, 32),
        (16, 11),
        (18, 5),
    ]
    text = str(found)
    assert text.startswith(
        "my.yml:5:15: unknown signal 'grad_nrom'; did you mean grad_norm?\n"
        "            expr: grad_nrom > 5\n"
        "                  ^\n"
        "my.yml:6:9: unknown key 'fro'; did you mean for?\n"
    )


@pytest.mark.parametrize(
    ("expression", "offset", "says"),
    [
        ("loss", 0, "the expression is a number: compare it, as in loss > 5"),
        ("loss[20]", 0, "the expression is a window: put it into a function, as in mean(loss[200])"),
        ("1 > 0", 0, "the expression reads no signal"),
        ("loss and x > 1", 0, "and takes a boolean, but this is a number: compare it"),
        ("(x > 1) + 1 > 0", 1, "+ takes a number, but this is a boolean"),
        ("0 < loss < 5", 0, "comparisons cannot be chained: write a < b and b < c"),
        ("(0 < loss) < 5", 1, "< takes a number, but this is a boolean"),
        ("mean(loss) > 1", 5, "mean takes a window, but this is a number: write loss[200]"),
        ("ema(loss[5]) > 1", 4, "ema takes a number, but this is a window"),
        ("count(loss[5]) > 1", 6, "count takes a window of booleans, but this is a window"),
        ("streak(loss) > 1", 7, "streak takes a boolean, but this is a number: compare it, as in loss > 5"),
        ("spread(loss) > 1", 7, "spread takes a vector, but this is a number"),
        ("mean(loss by rank) > 1", 5, "mean takes a window, but this is a vector: put it into a function"),
        ("5[3] > 1", 0, "a window of a constant"),
        ("mean(loss[0]) > 1", 5, "a whole number of steps, at least 1, not 0"),
        ("mean(loss[1.5]) > 1", 5, "a whole number of steps, at least 1, not 1.5"),
        ("mean(loss[2] offset 0.5) > 1", 5, "an offset is a whole number"),
        ("mean(loss[90000] offset 20000) > 1", 5, "reach back at most 100000 steps"),
        ("mean(loss[5m]) > 1", 11, "unexpected m: a window counts steps"),
        ("mean((loss[5])[6]) > 1", 6, "a window is of a number or a boolean, but this is a window"),
        ("loss = 5", 5, "unexpected =; write == to compare"),
        ("loss > 5 && x > 1", 9, "unexpected &&; write and"),
        ("loss > 5 || x > 1", 9, "unexpected ||; write or"),
        ("loss > 2 ** 3", 9, "unexpected **; write ^ for a power"),
        ("loss ! 5", 5, "unexpected !; write not"),
        ("loss > $", 7, "unexpected character '$'"),
        ("loss >", 6, "the expression ends too early; expected a signal, a number, a call or ("),
        ("(loss > 5", 9, "the expression ends too early; expected an operator or )"),
        ("loss 5", 5, "unexpected 5; expected an operator or the end"),
        ("loss by rank > 5", 5, "`by` makes a vector of a signal"),
        ("loss > 3 [4]", 7, "a window of a constant"),
        ("medain(loss[5]) > 1", 0, "unknown function 'medain'; did you mean median?"),
        ("sum(loss) > 1", 0, "unknown function 'sum'; here write for example mean(loss[200]) * 200"),
        ("avg_over_time(loss[5]) > 1", 0, "unknown function 'avg_over_time'; here write for example mean(loss[200])"),
        ("smu(loss[5]) > 1", 0, "unknown function 'smu'"),
        ("resumd() and loss > 1", 0, "unknown function 'resumd'; did you mean resumed?"),
        ("loss(5) > 1", 0, "unknown function 'loss'; it is a signal, which has no arguments"),
        ("median > 1", 0, "median is a function: write median(…)"),
        ("loss == nan", 8, "nan is no number here: use isnan(x) or isinf(x)"),
        ("train_loss > 5", 0, "train_loss is the Prometheus series; in rules the signal is called loss"),
        ("my_metric > 5", 0, "must be listed under `signals:`"),
        ("ema(loss, bta=0.9) > 1", 10, "ema has no setting 'bta'; did you mean beta?"),
        ("ema(loss, beta=1.5) > 1", 15, "beta of ema must be between 0 and 0.999999, not 1.5"),
        ("ema(loss, beta=loss) > 1", 15, "beta of ema must be a plain number"),
        ("ema(loss, 0.9, 0.8) > 1", 15, "ema takes no more than 2 arguments"),
        ("ema(loss, 0.9, beta=0.8) > 1", 15, "beta of ema is given twice"),
        ("ema() > 1", 0, "ema needs an argument first, a number"),
        ("ema(beta=0.9) > 1", 0, "ema needs an argument first"),
        ("quantile(loss[9]) > 1", 0, "quantile needs q"),
        ("period(x > 1, window=10.5) > 1", 21, "window of period must be a whole number"),
        ("zscore(loss[9], window=5) > 1", 16, "zscore has no setting 'window'; it has none here"),
        ('grad_norm{grp="mlp"} > 1', 10, "grad_norm has no label 'grp': its labels are group; did you mean group?"),
        ('grad_norm{group="mpl"} > 1', 10, "grad_norm has no group 'mpl'; did you mean mlp?"),
        ('grad_norm{group!="mlp"} > 1', 10, "labels are matched by = alone, not !="),
        ('grad_norm{group=~"m.*"} > 1', 10, "labels are matched by = alone, not =~"),
        ('grad_norm{group="mlp", group="all"} > 1', 23, "group is given twice"),
        ('loss{group="mlp"} > 1', 5, "loss has no label 'group': it has none"),
        ("moment_rms > 1", 0, "moment_rms has no total over moment: write one of"),
        ("max_over(moment_rms by group) > 1", 9, 'moment_rms needs moment: write moment_rms{moment="…"}'),
        ("spread(loss by rnk) > 1", 7, "loss has no label 'rnk': it can be split by rank; did you mean rank?"),
        ('spread(grad_norm{group="mlp"} by group) > 1', 7, "group is fixed in the braces"),
        ("spread(update_ratio by rank) > 1", 7, "update_ratio is not recorded by rank"),
        ('spread(grad_norm{group="mlp"} by rank) > 1', 17, "a signal by rank has no labels"),
    ],
)  # fmt: skip
def test_an_expression_says_what_is_wrong_and_where(expression: str, offset: int, says: str) -> None:
    quoted = "'" + expression + "'"
    found = of_expression(quoted)
    assert [place - 1 for place, _ in found][:1] == [offset], found
    assert says in found[0][1]


def test_all_errors_of_one_expression_are_found_and_nothing_follows_from_them() -> None:
    found = of_expression("los > 5 and men(loss[5]) > ema(grad, beta=2)")
    assert [(place, message.split(";")[0]) for place, message in found] == [
        (0, "unknown signal 'los'"),
        (12, "unknown function 'men'"),
        (31, "unknown signal 'grad'"),
        (42, "beta of ema must be between 0 and 0.999999, not 2"),
    ]


@pytest.mark.parametrize("expression", ["(" * 600 + "loss" + ")" * 600 + " > 1", "x" * 5000])
def test_an_expression_nobody_can_read_is_refused(expression: str) -> None:
    ((_, message),) = of_expression(expression)
    assert "nested too deeply" in message or "characters, more than" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "my.yml:1:1: a rule file is a mapping with the key `groups`"),
        ("[1]", "a rule file is a mapping"),
        ("rules: []", "unknown key 'rules'"),
        ("groups: 5", "my.yml:1:9: `groups` must be a list"),
        ("groups: [5]", "a group is a mapping"),
        ("groups: [{rules: []}]", "a group needs a name"),
        ("groups: [{name: g}]", "`rules` must be a list"),
        ("groups: [{name: g, rules: [x]}]", "a rule is a mapping"),
        ("groups: [{name: g, rules: [{expr: loss > 1}]}]", "a rule needs `alert` or `record`"),
        ("groups: [{name: g, rules: [{alert: a}]}]", "a rule needs `expr`"),
        ("groups: [{name: g, rules: [{alert: a, expr: 5}]}]", "reads no signal"),
        ("groups: [{name: g, rules: [{alert: a b, expr: loss > 1}]}]", "'a b' is no name"),
        ("groups: [{name: g, rules: [{alert: a, record: b, expr: loss > 1}]}]", "unknown key 'record'"),
        ("groups: [{name: g, rules: [{record: loss, expr: loss * 1}]}]", "loss is a signal: record it under another name"),
        ("groups: [{name: g, rules: [{record: a, expr: loss * 1, for: 3 steps}]}]", "unknown key 'for'"),
        ("groups: [{name: g, rules: [{record: a, expr: loss * 1}, {record: a, expr: loss * 2}]}]", "a is recorded already"),
        ("groups: [{name: g, rules: [{alert: a, expr: b > 1}, {record: b, expr: loss * 1}]}]", "b is recorded further down"),
        ("groups: [{name: g, rules: [{alert: a, expr: loss > 1, for: 3 epochs}]}]", "'3 epochs' is no duration"),
        ("groups: [{name: g, rules: [{alert: a, expr: loss > 1, for: }]}]", "`for` is empty"),
        ("groups: [{name: g, rules: [{alert: a, expr: loss > 1, labels: [x]}]}]", "`labels` is a mapping"),
        ("groups: [{name: g, rules: [{alert: a, expr: loss > 1, labels: {a-b: x}}]}]", "'a-b' is no label name"),
        ("groups: [{name: g, rules: [{alert: a, expr: loss > 1, labels: {on: true}}]}]", "`on` must be a text: put it in quotes"),
        ("groups: [{name: g, rules: [{alert: a, expr: loss > 1}, {alert: a, expr: loss > 2}]}]", "exists already, at my.yml:1"),
        ("groups: []\ngroups: []", "my.yml:2:1: duplicate key 'groups'"),
        ("signals: [loss]\ngroups: []", "loss is a signal of trainwarden already"),
        ("signals: [median]\ngroups: []", "median is a function of trainwarden already"),
        ("signals: 5\ngroups: []", "`signals` must be a list of names"),
        ("signals: {a: 5}\ngroups: []", "the labels of a signal are a list"),
        ("signals: [a b]\ngroups: []", "'a b' is no name for a signal"),
        ("groups: [", "my.yml:1:10: "),
    ],
)  # fmt: skip
def test_a_file_says_what_is_wrong_with_its_shape(text: str, says: str) -> None:
    assert says in str(errors(text))


def test_what_a_broken_record_breaks_is_not_reported_again() -> None:
    text = "groups: [{name: g, rules: [{record: r, expr: los * 1}, {alert: a, expr: r > 1}]}]"
    assert len(errors(text).problems) == 1


def test_errors_of_several_files_come_together() -> None:
    good = "groups: [{name: g, rules: [{alert: a, expr: loss > 1}]}]"
    with pytest.raises(RuleErrors) as caught:
        load_packs([(good, "one.yml"), (good, "two.yml"), ("groups: 5", "three.yml")])
    assert [problem.source for problem in caught.value.problems] == ["three.yml", "two.yml"]
    assert "alert a exists already, at one.yml:1" in str(caught.value)


@pytest.mark.parametrize("example", sorted(set(INSTEAD.values())))
def test_what_stands_for_a_function_of_another_language_is_an_expression_of_this_one(example: str) -> None:
    assert not INSTEAD.keys() & FUNCTIONS.keys()
    load_pack(f"groups: [{{name: g, rules: [{{record: r, expr: '{example}'}}]}}]", "my.yml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'groups:\n  - name: "loss\n    rules: []\n',
            "my.yml:2:11: the quote that begins here is not closed\n      - name",
        ),
        ("a: {b: 'x\n", "my.yml:1:8: the quote that begins here is not closed\n    a: {b"),
        ("a: 'x\nb: {c: 'info'}\n", "my.yml:1:4: the quote that begins here ends only in line 2, where"),
        (
            "a: {b: 1\n",
            "my.yml:1:4: while parsing a flow mapping expected ',' or '}', but got '<stream end>'\n    a: {b",
        ),
        ("a: {b: 1\nc: 2\n", "my.yml:2:2: while parsing a flow mapping"),
    ],
)
def test_what_is_not_closed_is_shown_where_it_begins(text: str, says: str) -> None:
    assert str(errors(text)).startswith(says)
