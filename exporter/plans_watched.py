"""The plan folder while a run goes on: its plans are read again where something in it has changed. Never on the training thread."""

from __future__ import annotations

import time

from trainwarden.plan import Plan
from trainwarden.runfolder import RunFolder

from .notices import Notices

#: Nanoseconds after which a folder's time of change tells whether a file was added.
SETTLED_NS = 2 * 10**9


class PlanWatch:
    """For one thread alone."""

    def __init__(self, folder: RunFolder, notices: Notices) -> None:
        self._folder, self._notices = folder, notices
        self._seen: int | None = None
        self._refused: set[str] = set()

    def news(self, quiet: bool = False) -> list[Plan]:
        """Return all plans that can be trusted where the folder has changed since it was last read, else none.

        A file that cannot be trusted is said once; ``quiet``: somebody else says so of those that lie there now.

        Raises:
            OSError, RunFolderError: the folder cannot be read.
        """
        try:
            changed = self._folder.plan_folder.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if changed == self._seen:
            return []
        plans, refused = self._folder.read_plans()
        for sentence in refused:
            if not quiet and sentence not in self._refused:
                self._notices.say(f"plan {sentence}", f"plan refused: {sentence}")
        self._refused.update(refused)
        if time.time_ns() - changed > SETTLED_NS:  # else a file may come yet that leaves the folder's time as it is
            self._seen = changed
        return plans

    def forget(self) -> None:
        """Read the folder again at the next look, whether it changes or not."""
        self._seen = None
