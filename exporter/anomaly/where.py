"""Where in whose code something happened: the frames that are neither torch's nor the exporter's."""

from __future__ import annotations

import linecache
import os
import re
import sys
from pathlib import Path
from types import FrameType

import torch

#: A place in the code: file, line, function.
Frame = tuple[str, int, str]
#: Places, the outermost first.
Site = tuple[Frame, ...]

#: Frames that are kept, the innermost ones.
KEPT = 8
#: Frames of a stack that are looked at.
DEEPEST = 200
#: Characters of a line of code that are shown.
SHOWN = 160

_HOME = Path(__file__).parent.parent
#: Where frames lie that nobody asks for.
_APART = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, _HOME, _HOME.resolve()))
_FRAME = re.compile(r'\s*File "(.+?)", line (\d+), in (\S+)')


class Sites:
    """Makes sites, each of them once: thousands of operations of a loop over blocks come from a handful."""

    def __init__(self) -> None:
        self._known: dict[Site, Site] = {}
        self._lines: dict[str, Frame | None] = {}
        self._foreign: dict[str, bool] = {}

    def here(self) -> Site:
        """Return where the caller's code is."""
        frames: list[Frame] = []
        frame: FrameType | None = sys._getframe(1)
        for _ in range(DEEPEST):
            if frame is None or len(frames) == KEPT:
                break
            code = frame.f_code
            if self._counts(code.co_filename):
                frames.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return self._one(tuple(reversed(frames)))

    def told(self, traceback: list[str]) -> Site:
        """Return the site that lines of :func:`traceback.format_stack` tell of, as torch's anomaly mode keeps them."""
        frames: list[Frame] = []
        for text in traceback:
            if text not in self._lines:
                found = _FRAME.match(text)
                frame = None if found is None else (found[1], int(found[2]), found[3])
                self._lines[text] = frame if frame is not None and self._counts(frame[0]) else None
            known = self._lines[text]
            if known is not None:
                frames.append(known)
        return self._one(tuple(frames[-KEPT:]))

    def _counts(self, file: str) -> bool:
        known = self._foreign.get(file)
        if known is None:
            known = not file.startswith((*_APART, "<frozen"))
            self._foreign[file] = known
        return known

    def _one(self, site: Site) -> Site:
        return self._known.setdefault(site, site)


def place(site: Site) -> str:
    """Return the innermost frame as ``file:line``, the file relative to the working directory where it lies below it."""
    return f"{_relative(site[-1][0])}:{site[-1][1]}" if site else ""


def told(site: Site) -> list[str]:
    """Return each frame as ``file:line in function: code``, the outermost first. Reads the files: not for the training thread."""
    found = []
    for file, line, function in site:
        code = linecache.getline(file, line).strip()[:SHOWN]
        found.append(f"{_relative(file)}:{line} in {function}" + (f": {code}" if code else ""))
    return found


def _relative(file: str) -> str:
    try:
        return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
    except (OSError, ValueError):
        return file
