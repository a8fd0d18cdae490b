from __future__ import annotations

import math

import pytest

from trainwarden.rules import yamltext
from trainwarden.rules.yamltext import YamlError


def value(text: str) -> object:
    return yamltext.load(text, "t.yml").value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 1e-3),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("+7", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("2026-11-29", "2026-11-29"),
        ("5m", "5m"),
        ("3 steps", "3 steps"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("-.inf", -math.inf),
        ("[1, two, null]", [1, "two", None]),
        ("a: {b: 1}", {"a": {"b": 1}}),
        ("<<: 1", {"<<": 1}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_nan_is_read() -> None:
    found = value(".NaN")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_all_duplicate_keys_are_reported_with_their_places() -> None:
    with pytest.raises(YamlError) as caught:
        yamltext.load("a: 1\nb: 2\na: 3\nc:\n  d: 1\n  d: 2\n", "rules.yml")
    assert [(problem.line, problem.column) for problem in caught.value.problems] == [(3, 1), (6, 3)]
    assert "rules.yml:3:1: duplicate key 'a', first given in line 1\n    a: 3\n    ^" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1,\nb: 2", "t.yml:1:4: while parsing a flow sequence"),
        ("a: !!python/object:os.system {}", "not supported"),
        ("a: !secret x", "not supported"),
        ("--- 1\n--- 2", "t.yml:2:1"),
        ("? [a]\n: 1", "key must be"),
        ("a: \x07", "t.yml:1:4: character"),
        ("a: &x [*x]", "contains itself"),
        ("!!int x", "is no int"),
        ("a: " + "9" * 5000, "too large"),
        ("\t- a", "t.yml:1:1"),
    ],
)
def test_what_is_no_plain_yaml_is_one_clear_error(text: str, says: str) -> None:
    with pytest.raises(YamlError) as caught:
        yamltext.load(text, "t.yml")
    assert says in str(caught.value)


def test_a_bomb_of_aliases_is_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(YamlError, match="more than"):
        yamltext.load("\n".join(lines), "t.yml")


def test_positions_of_values_and_keys() -> None:
    document = yamltext.load("groups:\n  - name: x\n    rules: [1, 2]\n", "t.yml")
    assert document.position(("groups", 0, "name")) == (2, 11)
    assert document.key_position(("groups", 0, "name")) == (2, 5)
    assert document.position(("groups", 0, "rules", 1)) == (3, 16)
    assert document.position(("groups", 0, "absent", "deeper")) == (2, 5)


@pytest.mark.parametrize(
    "text",
    [
        "expr: loss + x > 1\n",
        "expr: 'loss + x > 1'\n",
        'expr: "loss \\u002b x > 1"\n',
        "expr: |\n  loss +\n\n   x\n  > 1\n",
        "expr: >-\n    loss +\n    x > 1\n",
        "expr: loss +\n  x\n  > 1\n",
        "expr: | # loss x\n  loss + x > 1\n",
    ],
)
def test_a_character_of_a_text_is_located_however_it_is_quoted(text: str) -> None:
    document = yamltext.load(text, "t.yml")
    offset = document.value["expr"].index("x")
    line, column = document.locate(("expr",), offset)
    assert document.lines[line - 1][column - 1] == "x"
    line, column = document.locate(("expr",), len(document.value["expr"].rstrip()))
    assert document.lines[line - 1][column - 2] == "1"


def test_the_caret_stands_under_the_place_also_behind_tabs() -> None:
    problem = yamltext.Problem("f", 1, 3, "bad", "\tab")
    assert str(problem) == "f:1:3: bad\n    \tab\n    \t ^"
