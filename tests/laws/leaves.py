"""Laws about leaves, the many small files of one kind: each stands alone, is tested, and is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import Source, called, imports, read_sources

#: Folders of leaves: many small files of one kind. True where a user meets them by name.
LEAVES = {
    "operators": True,
    "attribution": False,
    "readers": True,
    "notifiers": True,
    "probes": False,
    "schedulers": True,
    "adapters": True,
}


def leaves(modules: dict[str, Source]) -> Iterator[tuple[Source, str]]:
    """Yield each leaf with the module of its folder. The module named like one leaf (probes/probe.py) defines what one is."""
    for source in modules.values():
        folder = source.module.rpartition(".")[0]
        kind = folder.rpartition(".")[2]
        if kind in LEAVES and not source.is_package and source.module.rpartition(".")[2] != kind.removesuffix("s"):
            yield source, folder


def leaves_know_no_sibling(root: Path) -> list[str]:
    """A leaf can be read, tested and removed alone."""
    modules = read_sources(root)
    names = {source.module for source, _ in leaves(modules)}
    return [
        f"{source.path}:{found.line}: a leaf imports its sibling {found.target}: move what both need one level up"
        for source, folder in leaves(modules)
        for found in imports(source, modules)
        if found.target in names and found.target.rpartition(".")[0] == folder and found.target != source.module
    ]


def functions_of(source: Source) -> list[str]:
    """Return the functions of the rule language that an operator file brings: ``Function("ema", …)``."""
    return [
        node.args[0].value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and called(node) == "Function"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]


def leaves_are_tested_and_documented(root: Path) -> list[str]:
    """Each leaf is named in a test and, where a user meets it, in a page of docs/; an operator by each of its functions."""
    tests = "\n".join(
        f"{path.stem}\n{path.read_text()}"
        for path in sorted((root / "tests").rglob("test_*.py"))
        if path.name != "test_house.py"
    )
    pages = "\n".join(f"{path.stem}\n{path.read_text()}" for path in sorted((root / "docs").rglob("*.md")))
    wrong = []
    for source, folder in leaves(read_sources(root)):
        kind, stem = folder.rpartition(".")[2], source.module.rpartition(".")[2]
        functions = functions_of(source)
        for name in functions or [stem]:
            word = re.compile(rf"(?:\b|_){re.escape(name)}(?:\b|_)".replace("_", "[_-]"))
            in_tests, in_pages = word.search(tests), word.search(pages)
            if functions:
                in_tests, in_pages = re.search(rf"\b{name}\(", tests), re.search(rf"\b{name}\(|`{name}`", pages)
            if not in_tests:
                wrong.append(f"{source.path}:1: no test names {name}: write tests/…/test_{stem}.py")
            if LEAVES[kind] and (functions or kind != "operators") and not in_pages:
                wrong.append(f"{source.path}:1: no page of docs/ names {name}: say there what it does for a user")
    return wrong
