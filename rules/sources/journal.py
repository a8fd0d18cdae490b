"""The rest of a run's journal, read from the disk once its exporter is gone.

Where the daemon shares the run's folder, the last lines of a run that ended between two polls are not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from trainwarden.rules.core.inputs import Start
from trainwarden.rules.sources.lines import Counts, Read, decode_lines
from trainwarden.rules.sources.positions import Positions

_LARGEST = 256 * 1024 * 1024
_PAGE = 4 * 1024 * 1024


class JournalRest:
    """Reads what lies behind the cursor in ``run_folder``."""

    def __init__(self, run_folder: Path, positions: Positions, put: Callable[[Read], bool], counts: Counts) -> None:
        self._run_folder = run_folder
        self._positions = positions
        self._put = put
        self._counts = counts

    def read(self, start: Start, rank: int) -> int:
        """Put on what was not read of a stream yet, and return how many lines that were."""
        folder = self._run_folder / f"attempt-{start.attempt}" / start.start_id / f"rank-{rank}"
        total = 0
        for path in sorted(folder.glob("*.ndjson")):
            try:
                if path.stat().st_size > _LARGEST:
                    continue
                with path.open("rb") as file:
                    while piece := file.read(_PAGE) + file.readline():
                        after = self._positions.seq(start.start_id, rank)
                        page = decode_lines(start, rank, piece, after)
                        if page.upto > after:
                            self._put(Read(start, rank, after, page.upto, page.inputs))
                            self._positions.advance(start, rank, after, page.upto)
                            total += page.upto - after
            except OSError:
                continue
        if total:
            structlog.get_logger("source").info(
                "the end of the run was read from its journal", run=start.run, rank=rank, lines=total
            )
        return total
