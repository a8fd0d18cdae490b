"""The laws of the house hold, and each law would notice if it were broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import laws
from tests.source_tree import ROOMS, project_files, read_sources

ROOT = Path(__file__).resolve().parent.parent
Law = Callable[[Path], list[str]]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps(law: Law) -> None:
    broken = law(ROOT)
    assert not broken, f"{law.__doc__}\n" + "\n".join(broken)


# One planted violation a case: the law, the files, and the beginning of the sentence it must bring.
E, R, C, D, X = "exporter", "rules", "rules/core", "deploy/receiver", "examples/demo"
PLANTED: list[tuple[Law, dict[str, str], str]] = [
    (laws.shared_files_stand_alone, {"src/trainwarden/plan.py": "\nimport numpy\n"}, "src/trainwarden/plan.py:2:"),
    (
        laws.shared_files_stand_alone,
        {"src/trainwarden/webhook.py": "from standardwebhooks import Webhook\n"},
        "src/trainwarden/webhook.py:1:",
    ),
    (
        laws.shared_files_stand_alone,
        {"src/trainwarden/plan.py": "def f():\n    from .exporter import x\n", f"{E}/x.py": ""},
        "src/trainwarden/plan.py:2:",
    ),
    (laws.shared_files_stand_alone, {"src/trainwarden/utils.py": ""}, "src/trainwarden/utils.py:1:"),
    (laws.rooms_keep_apart, {f"{R}/a.py": "from trainwarden.exporter import b\n", f"{E}/b.py": ""}, f"{R}/a.py:1:"),
    (laws.rooms_keep_apart, {f"{E}/a.py": "def f():\n    import trainwarden.rules.b\n"}, f"{E}/a.py:2:"),
    (laws.rooms_keep_apart, {f"{D}/a.py": "import importlib\nimportlib.import_module('trainwarden.rules')\n"}, f"{D}/a.py:2:"),
    (laws.rooms_keep_apart, {f"{R}/cli/demo.py": "from trainwarden.demo import run\n"}, f"{R}/cli/demo.py:1:"),
    (laws.rooms_keep_apart, {f"{R}/cli/run.py": "def run():\n    from trainwarden.demo import x\n"}, f"{R}/cli/run.py:2:"),
    (laws.torch_stays_in_the_training_process, {f"{R}/a.py": "def f():\n    import torch.nn\n"}, f"{R}/a.py:2:"),
    (laws.core_is_pure, {f"{C}/a.py": "import time\n"}, f"{C}/a.py:1:"),
    (laws.core_is_pure, {f"{C}/a.py": "def f():\n    from os import path\n"}, f"{C}/a.py:2:"),
    (laws.core_is_pure, {f"{C}/a.py": "import datetime\nx = datetime.datetime.now()\n"}, f"{C}/a.py:2:"),
    (laws.core_is_pure, {f"{C}/a.py": "def f():\n    return open('x')\n"}, f"{C}/a.py:2:"),
    (laws.core_is_pure, {f"{C}/a.py": "def f():\n    global x\n    x = 1\n"}, f"{C}/a.py:2:"),
    (laws.core_is_pure, {f"{C}/a.py": "import numpy as np\ndef f():\n    return np.random.rand()\n"}, f"{C}/a.py:3:"),
    (laws.core_is_pure, {f"{C}/a.py": "import pandas\n"}, f"{C}/a.py:1:"),
    (laws.core_is_pure, {f"{C}/a.py": "from ..b import f\n", f"{R}/b.py": "import socket\n"}, f"{R}/b.py:1:"),
    (laws.core_is_pure, {f"{C}/a.py": "from trainwarden.runfolder import x\n", "src/trainwarden/runfolder.py": "import os\n"}, "src/"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "x = []\n"}, f"{C}/a.py:1:"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "x: dict[str, int] = {}\n"}, f"{C}/a.py:1:"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "x = ([1],)\n"}, f"{C}/a.py:1:"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "if True:\n    x = dict(a=1)\n"}, f"{C}/a.py:2:"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "class A:\n    x = set()\n"}, f"{C}/a.py:2:"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "x = MappingProxyType({'a': [1]})\n"}, f"{C}/a.py:1:"),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "x = [i for i in range(3)]\n"}, f"{C}/a.py:1:"),
    (
        laws.feed_has_two_drivers,
        {f"{C}/feed.py": "", **{f"{R}/{n}.py": "from .core.feed import feed\n" for n in "abc"}},
        f"{R}/a.py:1:",
    ),
    (
        laws.feed_has_two_drivers,
        {f"{C}/feed.py": "", f"{R}/a.py": "from .core import feed as core\n\ncore.feed(1, 2)\n"},
        f"{R}/a.py:3:",
    ),
    (laws.feed_has_two_drivers, {f"{C}/feed.py": ""}, f"{R}/core/feed.py:1:"),
    (laws.outside_is_reached_in_few_places, {f"{R}/a.py": "import requests\n"}, f"{R}/a.py:1:"),
    (laws.outside_is_reached_in_few_places, {f"{R}/store_keeper.py": "import sqlite3\n"}, f"{R}/store_keeper.py:1:"),
    (laws.outside_is_reached_in_few_places, {f"{X}/a.py": "def f():\n    import sqlite3\n"}, f"{X}/a.py:2:"),
    (laws.leaves_know_no_sibling, {f"{E}/probes/a.py": "from .b import x\n", f"{E}/probes/b.py": ""}, f"{E}/probes/a.py:1:"),
    (laws.leaves_know_no_sibling, {f"{C}/operators/a.py": "def f():\n    from . import b\n", f"{C}/operators/b.py": ""}, f"{C}/operators/a.py:2:"),
    (laws.leaves_are_tested_and_documented, {f"{E}/probes/lonely.py": ""}, f"{E}/probes/lonely.py:1: no test"),
    (
        laws.leaves_are_tested_and_documented,
        {f"{C}/operators/waves.py": "FUNCTIONS = (Function('sine', 1),)", "tests/test_waves.py": "sine(loss)"},
        f"{C}/operators/waves.py:1: no page of docs/ names sine",
    ),
    (
        laws.leaves_are_tested_and_documented,
        {f"{R}/notifiers/pigeon.py": "", "tests/rules/test_pigeon.py": ""},
        f"{R}/notifiers/pigeon.py:1: no page",
    ),
    (laws.one_place_copies_off_the_device, {f"{E}/a.py": "def f(t):\n    return t.item()\n"}, f"{E}/a.py:2:"),
    (laws.one_place_copies_off_the_device, {f"{E}/a.py": "def f(t):\n    return t.to('x', non_blocking=True)\n"}, f"{E}/a.py:2:"),
    (laws.one_place_copies_off_the_device, {f"{E}/a.py": "def f(t):\n    return map(torch.Tensor.tolist, t)\n"}, f"{E}/a.py:2:"),
    (laws.one_place_copies_off_the_device, {f"{E}/a.py": "def f(param):\n    param.mul_(2)\n"}, f"{E}/a.py:2:"),
    (laws.one_place_copies_off_the_device, {f"{E}/a.py": "def f(p):\n    p.grad = None\n"}, f"{E}/a.py:2:"),
    (laws.no_import_cycle, {f"{R}/a.py": "from . import b\n", f"{R}/b.py": "from .a import x\n"}, f"{R}/b.py:1: import cycle"),
    (
        laws.no_import_cycle,
        {f"{R}/a.py": "from .b import x\n", f"{R}/b.py": "from .c import x\n", f"{R}/c.py": "def f():\n    from .a import x\n"},
        f"{R}/c.py:2: import cycle",
    ),
    (laws.files_are_short, {f"{R}/a.py": "x = 1\n" * 501}, f"{R}/a.py:501:"),
    (laws.texts_speak_of_the_product, {"docs/a.md": "fine\nsee ../sha" "red/design\n"}, "docs/a.md:2:"),
    (laws.texts_speak_of_the_product, {f"{R}/a.py": "# as issue " "2 asks\n"}, f"{R}/a.py:1:"),
    (laws.texts_speak_of_the_product, {f"{R}/a.py": "x = '/wo" "rk/main/x'\n"}, f"{R}/a.py:1:"),
    (laws.rooms_are_links, {}, "src/trainwarden/exporter:1:"),
]  # fmt: skip

# What the laws must let pass: a law that forbids too much is soon switched off.
ALLOWED: list[tuple[Law, dict[str, str]]] = [
    (laws.shared_files_stand_alone, {"src/trainwarden/webhook.py": "import hmac\nfrom .plan import x\ndef sign():\n    from standardwebhooks import Webhook\n", "src/trainwarden/plan.py": "import msgspec\n"}),
    (laws.rooms_keep_apart, {f"{R}/cli/demo.py": "def demo():\n    from trainwarden.demo import run\n", f"{E}/a.py": "from trainwarden.plan import Plan\nfrom .b import x\n"}),
    (laws.core_is_pure, {f"{C}/a.py": "import math\nimport numpy as np\nfrom datetime import UTC, datetime\nx = datetime.fromtimestamp(0, UTC)\n"}),
    (laws.core_has_no_state_of_its_own, {f"{C}/a.py": "__all__ = ['x']\nx = MappingProxyType({'a': (1,)})\ny = frozenset({1})\nz = tuple(i for i in (1, 2))\ndef f():\n    a = []\n    return a\n"}),
    (laws.feed_has_two_drivers, {f"{C}/feed.py": "", f"{R}/a.py": "from .core.feed import feed\n", f"{R}/b.py": "from .core.feed import feed\n", f"{R}/c.py": "evaluator.feed(1)\n"}),
    (laws.outside_is_reached_in_few_places, {f"{R}/sources/http.py": "import requests\n", f"{R}/store.py": "import sqlite3\n"}),
    (laws.leaves_know_no_sibling, {f"{E}/probes/a.py": "from .probe import Probe\nfrom ..staging import x\n", f"{E}/probes/probe.py": "", f"{E}/probes/__init__.py": "from . import a\n"}),
    (laws.leaves_are_tested_and_documented, {f"{R}/notifiers/pigeon_post.py": "", "tests/rules/test_pigeon_post.py": "", "docs/notifiers.md": "`pigeon-post` sends a pigeon\n"}),
    (laws.one_place_copies_off_the_device, {f"{E}/staging.py": "def f(t):\n    t.item()\n", f"{E}/guard/undo.py": "def f(param):\n    param.copy_(1)\n", f"{E}/a.py": "def f(total):\n    total.add_(1)\n"}),
    (laws.no_import_cycle, {f"{R}/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x\n", f"{R}/b.py": "from .a import y\n"}),
    (laws.texts_speak_of_the_product, {"docs/a.md": "A torch.distributed session; the node agent; homework/x; an issue.\n"}),
]  # fmt: skip


def plant(root: Path, files: dict[str, str]) -> None:
    (root / "src/trainwarden").mkdir(parents=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(("law", "files", "says"), PLANTED)
def test_a_planted_violation_is_named_with_file_and_line(
    law: Law, files: dict[str, str], says: str, tmp_path: Path
) -> None:
    plant(tmp_path, files)
    broken = law(tmp_path)
    assert any(sentence.startswith(says) for sentence in broken), broken


@pytest.mark.parametrize(("law", "files"), ALLOWED)
def test_what_the_law_allows_is_let_pass(law: Law, files: dict[str, str], tmp_path: Path) -> None:
    plant(tmp_path, files)
    assert law(tmp_path) == []


def test_every_law_has_a_planted_violation() -> None:
    assert {law for law, _, _ in PLANTED} == set(laws.LAWS)


def loaded_after(code: str) -> list[str]:
    """Run ``code`` in a fresh interpreter and return the names of all modules that it loaded."""
    program = f"import sys\n{code}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "PYTEST"))}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=clean, check=False
    )
    assert ran.returncode == 0, ran.stderr
    names: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return names


def modules_of(package: str) -> list[str]:
    found = [name for name in read_sources(ROOT) if name == package or name.startswith(package + ".")]
    return [name for name in found if not name.endswith("__main__")]


FRESH = {
    "the command line": (modules_of("trainwarden.rules"), ("torch",)),
    "the receiver": (modules_of("trainwarden.receiver"), ("torch",)),
    "the exporter": (
        # An adapter loads the library that it is for, and that what it likes; nobody else loads an adapter.
        [name for name in modules_of("trainwarden.exporter") if ".adapters." not in name],
        (
            "lark",
            "starlette",
            "uvicorn",
            "apscheduler",
            "sqlite3",
            "requests",
            "jinja2",
            "typer",
            "transformers",
            "lightning",
        ),
    ),
}


@pytest.mark.parametrize("room", FRESH)
def test_in_a_fresh_process_all_of_a_room_leaves_unimported(room: str) -> None:
    names, unwanted = FRESH[room]
    loaded = loaded_after("".join(f"import {name}\n" for name in names))
    assert [name for name in unwanted if name in loaded] == []


def test_in_a_fresh_process_the_shared_files_load_msgspec_and_nothing_else_from_outside() -> None:
    loaded = loaded_after("".join(f"import trainwarden.{name}\n" for name in laws.SHARED))
    outside = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    before = {name.partition(".")[0] for name in loaded_after("")}
    outside -= {"typing_extensions"}  # msgspec takes it where it is installed
    assert {name for name in outside - before if not name.startswith("_")} == {"trainwarden", "msgspec"}


@pytest.mark.parametrize("arguments", [["version"], ["--help"]])
def test_a_command_that_needs_no_torch_leaves_it_unimported(arguments: list[str]) -> None:
    code = f"sys.argv = {['trainwarden', *arguments]!r}\nfrom trainwarden.rules.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    assert "torch" not in loaded_after(code)


@pytest.mark.parametrize("folder", ROOMS.values())
def test_a_room_cannot_be_imported_a_second_time_by_its_folder(folder: str) -> None:
    name = folder.replace("/", ".")
    ran = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert f"trainwarden.{name.rpartition('.')[2]}" in ran.stderr


def test_git_stores_the_rooms_as_links() -> None:
    links = [f"src/trainwarden/{room.removeprefix('trainwarden.')}" for room in ROOMS]
    ran = subprocess.run(["git", "ls-files", "--stage", *links], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip("not a git checkout")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["120000"] * len(ROOMS)


def test_installing_trainwarden_pulls_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(need.startswith("torch") for need in project["dependencies"])
    assert [need for need in project["optional-dependencies"]["torch"] if need.startswith("torch")]


def test_torch_is_pinned_in_one_place() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.13.0"]
    assert all("==" in pin and "+" not in pin for pin in pins if pin and not pin.startswith("#"))
    elsewhere = [path for path in project_files(ROOT) if path.suffix in ("", ".toml", ".txt", ".yml", ".md")]
    named = [path.name for path in elsewhere if "torch==" in path.read_text(errors="replace")]
    assert named == ["constraints.txt"]
