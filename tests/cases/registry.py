"""Says which published case a test stands for.

``@case("A01")`` above a test, anywhere under ``tests/``: it builds that case's input and requires its answer. ``marked`` reads the
marks without importing anything; ``test_registry.py`` holds them against the ids that are published and against docs/cases.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

#: The published cases. a: spikes with a cause, b: false alarms, c: the loss scale, d: monitoring, e: recovery, f: what people ask for.
IDS = tuple(
    re.findall(
        r"\w+",
        """
        A01 A03 A04 A05 A06 A07 A09 A10 A11 A13 A15 A17 A18 A21 A22 A24 A25 A26 A27 A29 A30 A32 A33 A35 A36 A38 A39 A41 A43
        B01 B03 B05 B06 B08 B09 B11 B13
        C01 C03 C04 C06
        D01 D03 D05 D06 D07 D09 D10 D11 D12 D14 D15
        E02 E03 E05 E07 E08 E10 E12
        F01 F03 F04 F06
        """,
    )
)


def case(*ids: str) -> Callable[[Test], Test]:
    """Mark a test as one that builds the input of each of ``ids`` and requires its answer; ValueError where an id is not published."""
    unknown = [one for one in ids if one not in IDS]
    if unknown or not ids:
        raise ValueError(
            f"@case: {', '.join(unknown) or 'no id'} is none of the published cases; see IDS in {__name__}"
        )

    def mark(test: Test) -> Test:
        return pytest.mark.case(*ids)(test)

    return mark


def marked(tests: Path) -> dict[str, set[Path]]:
    """Return the files under ``tests`` that hold a marked test of each case, by id."""
    found: dict[str, set[Path]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "@case(" not in text:
            continue
        for node in ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for ids in (_ids(mark) for mark in node.decorator_list):
                    for one in ids:
                        found.setdefault(one, set()).add(path)
    return found


def _ids(mark: ast.expr) -> list[str]:
    """Return the ids of a decorator ``@case(…)``, and none of any other."""
    if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "case":
        return [str(ast.literal_eval(each)) for each in mark.args]
    return []
