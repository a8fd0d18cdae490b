"""docs/language.md names every function with its settings and their defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwarden.rules.core.language.operator import Type
from trainwarden.rules.core.language.operators import FUNCTIONS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "language.md").read_text()
ARGUMENT = {Type.NUMBER: "x", Type.BOOLEAN: "b", Type.WINDOW: "x[N]", Type.TRUTHS: "b[N]", Type.VECTOR: "v"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_shows_each_call(name: str) -> None:
    function = FUNCTIONS[name]
    if not function.takes:
        assert f"`{name}()`" in PAGE
        return
    argument = ARGUMENT[function.takes[0]]
    if function.with_result_of:
        assert f"`{name}({argument}, …)`" in PAGE
        assert f"`{name}({ARGUMENT[function.takes[1]]})`" in PAGE
        return
    shown = []
    for one in function.settings:
        default = one.same_as or (f"{one.default:g}" if one.default is not None else "0.99")
        shown.append(f"{one.name}={default}")
    assert f"`{name}({', '.join([argument, *shown])})`" in PAGE
