"""What lies where in the demo's folder, and how a folder is made ready for a new run of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from trainwarden.runfolder import RunFolder

#: Name of the treated run; the comparison runs are named for their arm.
RUN = "demo"
_MARK = ".trainwarden-demo"


class DemoError(RuntimeError):
    """The demo cannot go on. The message says why and where to look."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below ``root``, absolute. ``ops`` is what daemon and receiver are given, besides the treated run's folder."""

    root: Path

    @property
    def data(self) -> Path:
        """The text: training rows, held-out rows, index."""
        return self.root / "data"

    @property
    def ops(self) -> Path:
        """Configuration, secret, databases and logs of daemon and receiver."""
        return self.root / "ops"

    @property
    def summary(self) -> Path:
        """The result."""
        return self.root / "summary.json"

    @property
    def incidents(self) -> Path:
        """The daemon's incidents, as its API gave them at the end."""
        return self.root / "incidents.json"

    @property
    def answer(self) -> Path:
        """Where the poison was; written when all is over."""
        return self.root / "answer.json"

    def arm(self, name: str) -> Path:
        """Folder of one training run: its log, held-out loss, checkpoints and ``runs``."""
        return self.root / name

    def runs(self, name: str) -> Path:
        """Folder of runs (``TRAINWARDEN_DIR``) of one arm."""
        return self.arm(name) / "runs"

    def run_folder(self, name: str) -> RunFolder:
        """Run folder of one arm: ``clean``, ``untreated`` or ``treated``."""
        return RunFolder(RUN if name == "treated" else name, self.runs(name))


def shown(path: Path) -> str:
    """Return a path as one would type it here: relative where it lies below the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def size(root: Path) -> int:
    """Return how many bytes the files below a folder take up on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*"))


def prepare(root: Path) -> Layout:
    """Empty the demo's folder, or make it.

    Raises:
        DemoError: there is something in it that no demo wrote.
    """
    root = root.absolute()
    if root.is_dir() and any(root.iterdir()):
        if not (root / _MARK).is_file():
            raise DemoError(f"{root}: holds files that no demo wrote; choose another folder with --dir")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / _MARK).write_text("Written by `trainwarden demo`, which empties this folder when it is run again.\n")
    layout = Layout(root)
    for folder in (layout.ops, *(layout.arm(name) for name in ("clean", "untreated", "treated"))):
        folder.mkdir()
    return layout
