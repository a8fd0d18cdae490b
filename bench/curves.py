"""Labelled training curves: a folder with ``csv/``, ``LABELS.csv``, ``MANIFEST.csv`` and the ``score.py`` that scores incidents on them.

* ``csv/NAME.csv`` holds one run: ``step,loss`` and whichever of ``grad_norm,lr,loss_scale,skipped`` its log has.
* ``MANIFEST.csv`` says where each run is from, ``LABELS.csv`` which steps of it hold which kind of event.
* ``score.py`` has ``load(folder)`` and ``score(runs, found)``, where ``found`` is what ``trainwarden replay --output json`` writes.

No such curves are part of this repository: the folder is an argument of each benchmark that needs one.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwarden.record import Step
from trainwarden.rules.core.language import Pack
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import Recording, find_recordings, merged
from trainwarden.rules.replay.report import report

#: A run that was read: the recording and its lines.
Read = tuple[Recording, list[Any]]


class Curves:
    """The runs of a folder, read once, and its scorer."""

    def __init__(self, folder: Path) -> None:
        for name in ("csv", "LABELS.csv", "MANIFEST.csv", "score.py"):
            if not (folder / name).exists():
                sys.exit(f"{folder}: no {name} in it; bench/curves.py says what a folder of labelled curves holds")
        spec = importlib.util.spec_from_file_location("score_of_curves", folder / "score.py")
        assert spec is not None
        assert spec.loader is not None
        self._scorer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._scorer)
        self._labelled = self._scorer.load(folder)
        files = [str(path) for path in sorted((folder / "csv").glob("*.csv"))]
        with tempfile.TemporaryDirectory() as spool:
            found = find_recordings(files, sys.stdin.buffer, Path(spool))
            self.runs: list[Read] = [(recording, list(merged(recording))) for recording in found]

    def replay(self, pack: Pack, places: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return what the rules find on all runs, or those at ``places``, as ``trainwarden replay --output json`` writes it."""
        runs = self.runs if places is None else [self.runs[place] for place in places]
        return [report(recording, Replay(Settings(), pack).run(lines), pack) for recording, lines in runs]

    def score(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the scorer's figures."""
        figures: dict[str, Any] = self._scorer.score(self._labelled, found)[0]
        return figures


def records(lines: list[Any]) -> list[Step]:
    """Return the step records among the lines of a run."""
    return [item for _, _, item in lines if isinstance(item, Step)]
