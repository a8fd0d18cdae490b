"""Laws about the training thread: nothing in the exporter waits for the device or writes the run's tensors by the way."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.source_tree import read_sources

EXPORTER = "trainwarden.exporter"

_COPIES = frozenset({"item", "cpu", "tolist"})
#: ``staging.py`` owns the one copy off the device; loader and resume touch tensors of their own that never were on one.
_MAY_COPY = ("exporter/staging.py", "exporter/loader/", "exporter/resume")
_MAY_WRITE = ("exporter/guard", "exporter/resume")
_TENSOR_OF_THE_RUN = re.compile(r"\.grad\b|\.data\b|\bparam(eter)?\b|\.state\[")


def one_place_copies_off_the_device(root: Path) -> list[str]:
    """Within exporter/, what would wait for the device occurs in staging.py; the run's tensors are written in guard and resume."""
    wrong = []
    for source in read_sources(root).values():
        if source.room != EXPORTER:
            continue
        for node in ast.walk(source.tree):
            if not source.path.startswith(_MAY_COPY):
                copy = isinstance(node, ast.Attribute) and node.attr in _COPIES
                if copy or (isinstance(node, ast.keyword) and node.arg == "non_blocking"):
                    what = f".{node.attr}" if isinstance(node, ast.Attribute) else "non_blocking"
                    wrong.append(
                        f"{source.path}:{node.lineno}: {what} outside exporter/staging.py: it may wait for the device; stage "
                        "the tensor instead"
                    )
            if not source.path.startswith(_MAY_WRITE):
                written = _written_tensor(node)
                if written:
                    wrong.append(
                        f"{source.path}:{getattr(node, 'lineno', 1)}: writes {written}, a tensor of the run: only "
                        "exporter/guard/ and exporter/resume.py do"
                    )
    return wrong


def _written_tensor(node: ast.AST) -> str | None:
    """Return the source of a tensor of the run that this node writes in place, as far as it can be read off the text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":
            base = ast.unparse(node.func.value)
            return base if _TENSOR_OF_THE_RUN.search(base) else None
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and target.attr in ("grad", "data"):
                return ast.unparse(target)
    return None
