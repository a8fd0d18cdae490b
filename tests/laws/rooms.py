"""Laws about who may import what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.source_tree import ROOMS, Import, Source, imports, is_in, read_sources

EXPORTER, RULES, RECEIVER, DEMO = ROOMS
SHARED = ("signals", "gpu_signals", "names", "record", "plan", "ranges", "orderkey", "webhook", "runfolder")
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
