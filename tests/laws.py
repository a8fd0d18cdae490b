"""The laws of the house, each a function from a source tree to the list of its violations.

A violation is one sentence that begins with ``file:line:`` and says what to do. ``tests/test_house.py`` holds the project
to them, and each law to a planted violation.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import (
    PACKAGE,
    ROOMS,
    Import,
    Source,
    called,
    closure,
    imports,
    is_in,
    project_files,
    read_sources,
)

EXPORTER, RULES, RECEIVER, DEMO = ROOMS
CORE = f"{RULES}.core"
SHARED = ("signals", "record", "plan", "webhook", "runfolder")
#: Commands that run another room's code, each inside its command function.
COMMANDS_OF_OTHER_ROOMS = ("receiver", "supervise", "exec", "data", "demo")


def each_import(modules: dict[str, Source], room: str) -> Iterator[tuple[Source, Import]]:
    """Yield the imports of a room's files."""
    for source in modules.values():
        if is_in(source.module, room):
            for found in imports(source, modules):
                yield source, found


def shared_files_stand_alone(root: Path) -> list[str]:
    """Shared files import the standard library, msgspec and each other; webhook also standardwebhooks, in two functions."""
    modules = read_sources(root)
    wrong = []
    for source in modules.values():
        if source.room is not None:
            continue
        for found in imports(source, modules):
            top = found.target.partition(".")[0]
            if top in sys.stdlib_module_names or top == "msgspec":
                continue
            if found.target == "trainwarden" or found.target.removeprefix("trainwarden.") in SHARED:
                continue
            if source.module.endswith(".webhook") and top == "standardwebhooks" and found.within in ("sign", "verify"):
                continue
            wrong.append(
                f"{source.path}:{found.line}: a shared file imports {found.target}: keep it to the standard library and "
                "msgspec, or move the code into the room that needs it"
            )
        name = source.module.removeprefix("trainwarden.")
        if name not in (*SHARED, "trainwarden"):
            wrong.append(f"{source.path}:1: not one of the shared files {', '.join(SHARED)}: put it into a room")
    return wrong


def rooms_keep_apart(root: Path) -> list[str]:
    """Exporter, rules and receiver never import each other or the demo, but for a few commands inside their function."""
    modules = read_sources(root)
    wrong = []
    for room in (EXPORTER, RULES, RECEIVER):
        for source, found in each_import(modules, room):
            other = next((name for name in ROOMS if is_in(found.target, name)), None)
            if other in (None, room):
                continue
            allowed = [f"rules/cli/{name}.py" for name in COMMANDS_OF_OTHER_ROOMS]
            if source.path in allowed and found.within is not None:
                continue
            wrong.append(
                f"{source.path}:{found.line}: imports {found.target}, another room: move what both need into a shared file"
                + (", or import it inside the command function" if source.path in allowed else "")
            )
    return wrong


def torch_stays_in_the_training_process(root: Path) -> list[str]:
    """Only the exporter and the demo's training import torch."""
    modules = read_sources(root)
    return [
        f"{source.path}:{found.line}: imports {found.target}: torch lives in the exporter and the demo's training alone"
        for room in (RULES, RECEIVER)
        for source, found in each_import(modules, room)
        if is_in(found.target, "torch")
    ]


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


#: Which files may import a module that talks to the outside; a name covers the file and the folder of that name.
ONLY_IN = {
    "requests": ("rules/sources", "rules/notifiers", "rules/queries", "rules/cli/client", "deploy/receiver/schedulers"),
    "sqlite3": ("rules/store", "rules/outbox", "deploy/receiver/ledger"),
}


def outside_is_reached_in_few_places(root: Path) -> list[str]:
    """``requests`` and ``sqlite3`` are imported in the places that exist for it."""
    modules = read_sources(root)
    return [
        f"{source.path}:{found.line}: imports {found.target}: only {', '.join(places)} do; call one of them"
        for room in ROOMS
        for source, found in each_import(modules, room)
        for name, places in ONLY_IN.items()
        if is_in(found.target, name)
        and not any(source.path == f"{place}.py" or source.path.startswith(f"{place}/") for place in places)
    ]


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


def leaves_are_tested_and_documented(root: Path) -> list[str]:
    """Each leaf is named in a test and, where a user meets it, in a page of docs/."""
    tests = "\n".join(
        f"{path.stem}\n{path.read_text()}"
        for path in sorted((root / "tests").rglob("test_*.py"))
        if path.name != "test_house.py"
    )
    pages = "\n".join(f"{path.stem}\n{path.read_text()}" for path in sorted((root / "docs").rglob("*.md")))
    wrong = []
    for source, folder in leaves(read_sources(root)):
        kind, name = folder.rpartition(".")[2], source.module.rpartition(".")[2]
        word = re.compile(rf"(?:\b|_){re.escape(name)}(?:\b|_)".replace("_", "[_-]"))
        if not word.search(tests):
            wrong.append(f"{source.path}:1: no test names {name}: write tests/…/test_{name}.py")
        if LEAVES[kind] and not word.search(pages):
            wrong.append(f"{source.path}:1: no page of docs/ names {name}: say there what it does for a user")
    return wrong


_COPIES = frozenset({"item", "cpu", "tolist"})
#: ``staging.py`` owns the one copy off the device; loader and resume touch tensors of their own that never were on one.
_MAY_COPY = ("exporter/staging.py", "exporter/loader/", "exporter/resume")
_MAY_WRITE = ("exporter/guard.py", "exporter/resume")
_TENSOR_OF_THE_RUN = re.compile(r"\.grad\b|\.data\b|\bparam(eter)?\b|\.state\[")


def one_place_copies_off_the_device(root: Path) -> list[str]:
    """Within exporter/, what would wait for the device occurs in staging.py; the run's tensors are written in two files."""
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
                        "exporter/guard.py and exporter/resume.py do"
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


def no_import_cycle(root: Path) -> list[str]:
    """No module imports itself through others, lazily or not."""
    modules = read_sources(root)
    edges = {
        name: [found for found in imports(source, modules) if not found.typing_only and found.target in modules]
        for name, source in modules.items()
    }
    wrong = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        for found in edges[name]:
            if found.target in path:
                circle = [*path[path.index(found.target) :], found.target]
                wrong.append(
                    f"{modules[name].path}:{found.line}: import cycle: {' -> '.join(circle)}: move the common part out"
                )
            elif found.target not in done:
                visit(found.target, [*path, found.target])
        done.add(name)

    for name in modules:
        if name not in done:
            visit(name, [name])
    return wrong


MAX_LINES = 500


def files_are_short(root: Path) -> list[str]:
    """No Python file is longer than 500 lines."""
    wrong = []
    for path in project_files(root):
        lines = path.read_bytes().count(b"\n") if path.suffix == ".py" else 0
        if lines > MAX_LINES:
            name = path.relative_to(root).as_posix()
            wrong.append(
                f"{name}:{MAX_LINES + 1}: {lines} lines, more than {MAX_LINES}: there are two things in it; part them"
            )
    return wrong


# Spelled in pieces, or this file would be the first to break its own law.
_FOREIGN_WORDS = re.compile(
    "|".join(
        (
            r"(?<![\w.~-])/wo" r"rk/",
            r"\.\./sha" r"red\b",
            r"\b[Ss]ub" r"agents?\b",
            r"\b(?:[Dd]evelopers?|[Cc]oding|[Aa]gent)'?s? sess" r"ions?\b",
            r"\b(?:AI|[Cc]oding) age" r"nts?\b",
            r"\b[Ii]ssue #?\d",
            r"\b(?:pypi|npmjs)\.org\b|files\.python" r"hosted\.org|deb\.debian\.org",
            r"\bTO" r"DO\b|\bFIX" r"ME\b",
        )
    )
)
_TEXT = frozenset({".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".cfg", ".service", ".json", ".svg", ""})


def texts_speak_of_the_product(root: Path) -> list[str]:
    """No committed text speaks of how or where the project was made, or says that it is unfinished."""
    wrong = []
    for path in project_files(root):
        if path.suffix not in _TEXT:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            found = _FOREIGN_WORDS.search(line)
            if found:
                name = path.relative_to(root).as_posix()
                wrong.append(
                    f"{name}:{number}: {found.group()!r}: write about the product, for its reader; finish or leave out"
                )
    return wrong


def rooms_are_links(root: Path) -> list[str]:
    """The rooms appear in the import package as committed relative links."""
    wrong = []
    for room, folder in ROOMS.items():
        link = root / PACKAGE / room.removeprefix("trainwarden.")
        want = f"../../{folder}"
        if not link.is_symlink():
            wrong.append(
                f"{link.relative_to(root).as_posix()}:1: is no link: ln -s {want} there, and check core.symlinks"
            )
        elif link.readlink().as_posix() != want:
            wrong.append(f"{link.relative_to(root).as_posix()}:1: points to {link.readlink()}, not to {want}")
    return wrong


LAWS = (
    shared_files_stand_alone,
    rooms_keep_apart,
    torch_stays_in_the_training_process,
    core_is_pure,
    core_has_no_state_of_its_own,
    feed_has_two_drivers,
    outside_is_reached_in_few_places,
    leaves_know_no_sibling,
    leaves_are_tested_and_documented,
    one_place_copies_off_the_device,
    no_import_cycle,
    files_are_short,
    texts_speak_of_the_product,
    rooms_are_links,
)
