"""The project's own sources as syntax trees: which module a file is, and what it imports (lazily too).

Only for the tests that enforce the laws of the house; nothing is executed here.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

#: Where each part of the import package lies in the repository.
ROOMS = {
    "trainwarden.exporter": "exporter",
    "trainwarden.rules": "rules",
    "trainwarden.receiver": "deploy/receiver",
    "trainwarden.demo": "examples/demo",
}
PACKAGE = "src/trainwarden"


@dataclass(frozen=True)
class Import:
    """One imported module. ``within`` is the function that imports it, None at module level."""

    target: str
    line: int
    within: str | None
    typing_only: bool


@dataclass(frozen=True)
class Source:
    """One Python file of the package: ``path`` from the root, its module and its tree."""

    path: str
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def room(self) -> str | None:
        """The room that the file belongs to, None for a shared file."""
        return next((room for room in ROOMS if is_in(self.module, room)), None)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")


def is_in(module: str, package: str) -> bool:
    """Say whether ``module`` is ``package`` or lies in it."""
    return module == package or module.startswith(package + ".")


def read_sources(root: Path) -> dict[str, Source]:
    """Return the package's files under ``root`` by module name."""
    found: dict[str, Source] = {}
    for path in sorted((root / PACKAGE).glob("*.py")):
        name = "trainwarden" if path.stem == "__init__" else f"trainwarden.{path.stem}"
        found[name] = Source(path.relative_to(root).as_posix(), name, path.read_text())
    for room, folder in ROOMS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join((room, *(parts[:-1] if parts[-1] == "__init__" else parts)))
            found[name] = Source(path.relative_to(root).as_posix(), name, path.read_text())
    return found


def imports(source: Source, modules: dict[str, Source]) -> Iterator[Import]:
    """Yield every import of a file, ``importlib.import_module("…")`` included.

    ``from a import b`` is an import of ``a.b`` where that is one of ``modules``, else of ``a``.
    """
    package = source.module if source.is_package else source.module.rpartition(".")[0]
    for node, within, typing_only in _statements(source.tree):
        targets: list[Any] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, node.module] if node.module else parts)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                targets.append(inner if inner in modules else base)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            targets = [first.value for first in node.args[:1] if isinstance(first, ast.Constant)]
        for target in dict.fromkeys(targets):
            yield Import(target, getattr(node, "lineno", 0), within, typing_only)


def called(node: ast.Call) -> str:
    """Return the last word of what a call calls, "" where it has no name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _statements(tree: ast.AST) -> Iterator[tuple[ast.AST, str | None, bool]]:
    stack: list[tuple[ast.AST, str | None, bool]] = [(tree, None, False)]
    while stack:
        node, within, typing_only = stack.pop()
        yield node, within, typing_only
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within = within or node.name
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only = True
        stack.extend((child, within, typing_only) for child in reversed(list(ast.iter_child_nodes(node))))


def closure(start: set[str], modules: dict[str, Source]) -> set[str]:
    """Return ``start`` and every module of the package that it imports, directly or not."""
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in modules:
            continue
        seen.add(name)
        waiting.extend(found.target for found in imports(modules[name], modules) if not found.typing_only)
    return seen


def project_files(root: Path) -> list[Path]:
    """Return the files that are or will be committed: what git tracks or would add; links are not followed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:  # an unpacked source archive
        return [path for path in sorted(root.rglob("*")) if path.is_file() and ".venv" not in path.parts]
    paths = (root / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]
