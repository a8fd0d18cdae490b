"""Laws about the pure core: no clock, no chance, no I/O, no state of its own, two drivers."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.source_tree import called, closure, imports, is_in, read_sources

CORE = "trainwarden.rules.core"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules that read a clock, the machine or chance, or do I/O.
IMPURE_MODULES = _words(
    """asyncio concurrent ctypes fcntl glob http importlib io logging mmap multiprocessing os pathlib platform queue random
    requests sched secrets select selectors shutil signal socket sqlite3 ssl structlog subprocess sys tempfile threading
    time urllib uuid"""
)
#: Third-party modules that compute and nothing else.
PURE_PARTIES = frozenset({"lark", "msgspec", "numpy", "standardwebhooks", "yaml"})
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "breakpoint", "globals", "__import__"})
IMPURE_METHODS = _words(
    """now utcnow today open open_from_package read_text read_bytes write_text write_bytes default_rng"""
)


def core_is_pure(root: Path) -> list[str]:
    """Nothing that rules/core imports, directly or not, reads a clock, chance or the machine, or does I/O."""
    modules = read_sources(root)
    wrong = []
    inside = {name for name in modules if is_in(name, CORE)}
    for name in sorted(closure(inside, modules)):
        source = modules[name]
        where = "the core" if name in inside else f"{name}, which the core imports,"
        for found in imports(source, modules):
            top = found.target.partition(".")[0]
            impure = top in IMPURE_MODULES or found.target.startswith("numpy.random")
            if top not in sys.stdlib_module_names and top not in PURE_PARTIES and top != "trainwarden":
                impure = True
            if impure:
                wrong.append(
                    f"{source.path}:{found.line}: {where} imports {found.target}: let the driver read it and hand it in as "
                    "an input"
                )
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                wrong.append(f"{source.path}:{node.lineno}: `global`: keep it in the state that feed is given")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"):
                wrong.append(f"{source.path}:{node.lineno}: {where} uses chance ({ast.unparse(node)})")
            if not isinstance(node, ast.Call):
                continue
            named = isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
            method = isinstance(node.func, ast.Attribute) and node.func.attr in IMPURE_METHODS
            if named or method:
                wrong.append(
                    f"{source.path}:{node.lineno}: {where} calls {ast.unparse(node.func)}(): let the driver do it and "
                    "hand in what came of it"
                )
    return wrong


_MUTABLE = _words(
    """list dict set bytearray deque defaultdict OrderedDict Counter ChainMap WeakKeyDictionary WeakValueDictionary WeakSet
    array zeros ones empty full arange linspace"""
)
_FREEZING = frozenset({"MappingProxyType", "frozenset", "tuple"})


def _mutable(node: ast.expr | None) -> bool:
    """Say whether an expression makes a container that could be changed later, at any depth that can be read off."""
    if isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(node, ast.Tuple):
        return any(map(_mutable, node.elts))
    if isinstance(node, ast.BinOp):
        return _mutable(node.left) or _mutable(node.right)
    if isinstance(node, ast.IfExp):
        return _mutable(node.body) or _mutable(node.orelse)
    if isinstance(node, ast.NamedExpr):
        return _mutable(node.value)
    if isinstance(node, ast.Call):
        name = called(node)
        if name in _FREEZING:
            return any(_mutable(item) for argument in node.args for item in _items(argument))
        return name in _MUTABLE
    return False


def _items(node: ast.expr) -> list[ast.expr]:
    """Return what a display holds; the display itself is copied or hidden by the call around it."""
    if isinstance(node, ast.List | ast.Set | ast.Tuple):
        return node.elts
    if isinstance(node, ast.Dict):
        return node.values
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return [node.elt]
    return [node.value] if isinstance(node, ast.DictComp) else []


def core_has_no_state_of_its_own(root: Path) -> list[str]:
    """No name of a core module, nor of a class in one, is bound to a container that could be changed."""
    wrong = []
    for source in read_sources(root).values():
        if not is_in(source.module, CORE):
            continue
        stack: list[ast.AST] = list(source.tree.body)
        while stack:
            node = stack.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [ast.unparse(target) for target in targets]
                if names != ["__all__"] and _mutable(node.value):
                    wrong.append(
                        f"{source.path}:{node.lineno}: {', '.join(names)} is a mutable container: use a tuple, a frozenset "
                        "or MappingProxyType({…}), or keep it in the state"
                    )
            stack.extend(ast.iter_child_nodes(node))
    return wrong


def feed_has_two_drivers(root: Path) -> list[str]:
    """``core.feed`` is used by two modules: the live driver and the replay driver."""
    modules = read_sources(root)
    users = {}
    for source in modules.values():
        if is_in(source.module, CORE):
            continue
        aliases: set[str] = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (node.module or "").endswith("core.feed") and alias.name == "feed":
                        users.setdefault(source.path, node.lineno)
                    if (node.module or "").endswith("core") and alias.name == "feed":
                        aliases.add(alias.asname or alias.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "feed":
                base = ast.unparse(node.func.value)
                if base in aliases or base.endswith("core.feed"):
                    users.setdefault(source.path, node.lineno)
    if len(users) == 2 or f"{CORE}.feed" not in modules:
        return []
    return [
        f"{path}:{line}: one of {len(users)} modules that use core.feed; there are two drivers, live and replay: go through "
        "one of them"
        for path, line in sorted(users.items())
    ] or ["rules/core/feed.py:1: nothing calls feed: a live and a replay driver do"]
