"""The wheel and the source archive: complete, and the daemon's side runs from them without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trainwarden
from tests.source_tree import PACKAGE, ROOMS, project_files, read_sources

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive from a copy of the tree, and the wheel from the archive; return their folder."""
    tree = tmp_path_factory.mktemp("tree")
    for path in project_files(ROOT):
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for room, folder in ROOMS.items():
        (tree / PACKAGE / room.removeprefix("trainwarden.")).symlink_to(f"../../{folder}")
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)], cwd=tree)
    return out


def run(command: list[str], cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=clean, check=False)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def expected_files() -> set[str]:
    """Return the package's files as they must lie in a wheel."""
    files = set()
    for folder, inside in [(PACKAGE, "trainwarden"), *((f, room.replace(".", "/")) for room, f in ROOMS.items())]:
        for path in project_files(ROOT):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(f"{folder}/") and path.suffix != ".md":
                files.add(inside + name.removeprefix(folder))
    return files


def test_the_wheel_holds_every_file_of_the_package_and_no_other(built: Path) -> None:
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected_files()
    assert "trainwarden/py.typed" in names


def test_the_source_archive_holds_the_rooms_as_real_files(built: Path) -> None:
    with tarfile.open(one(built, "*.tar.gz")) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for name in expected_files():
        assert members[f"src/{name}"].isfile(), name
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(members)


def test_the_wheel_says_who_it_is_and_asks_for_torch_only_by_its_extra(built: Path) -> None:
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(info))
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata["Name"] == "trainwarden"
    assert metadata["Version"] == trainwarden.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    needs = [Requirement(need) for need in metadata.get_all("Requires-Dist", [])]
    torch = [need for need in needs if need.name == "torch"]
    assert torch
    assert all(need.marker and not need.marker.evaluate({"extra": ""}) for need in torch)


def test_nothing_that_trainwarden_needs_pulls_torch() -> None:
    seen: set[str] = set()
    waiting = ["trainwarden"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = map(Requirement, distribution(name).requires or [])
        except PackageNotFoundError:
            continue  # for another platform
        waiting.extend(need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""}))
    assert {"numpy", "starlette", "urllib3"} <= seen
    assert not {"torch", "triton"} & seen
    assert not [name for name in seen if name.startswith("nvidia")]


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into an environment that sees our libraries and no torch; return its folder of programs."""
    scratch = tmp_path_factory.mktemp("scratch")
    run([sys.executable, "-m", "venv", "--without-pip", str(scratch)], cwd=scratch)
    python = scratch / "bin/python"
    wheel = one(built, "*.whl")
    run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        cwd=scratch,
    )
    site = one(scratch, "lib/python*/site-packages")
    # The libraries come from this environment. Its own .pth files, our editable install among them, are not read from there.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return scratch / "bin"


def test_the_installed_program_runs_without_torch(installed: Path, tmp_path: Path) -> None:
    assert trainwarden.__version__ in run([str(installed / "trainwarden"), "version"], tmp_path)
    assert "Usage" in run([str(installed / "trainwarden"), "--help"], tmp_path)


def test_every_module_but_the_training_side_imports_without_torch(installed: Path, tmp_path: Path) -> None:
    modules = [name for name in read_sources(ROOT) if not name.startswith(("trainwarden.exporter", "trainwarden.demo"))]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nimport trainwarden\nprint(trainwarden.__file__)"
    where = run(
        [str(installed / "python"), "-c", code, *(name for name in modules if not name.endswith("__main__"))], tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_shipped_rules_load_from_the_installed_package(installed: Path, tmp_path: Path) -> None:
    run([str(installed / "trainwarden"), "check", "rules", "default"], tmp_path)
