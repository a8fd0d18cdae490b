"""A progress bar on standard error for work that takes a while; none where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Less than this many bytes are read before a bar would be seen.
SMALL = 4 * 1024 * 1024


@contextmanager
def reading(paths: Iterable[Path], watched: bool | None = None) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """Show how far ``paths`` have been read: gives a function that takes a run's name and gives one that takes bytes read.

    ``watched`` says whether somebody looks at standard error; found out where it is not given.
    """
    total = sum(_size(path) for path in paths)
    if not (sys.stderr.isatty() if watched is None else watched) or total < SMALL:
        yield lambda run: _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("", total=total)
        yield lambda run: lambda read: progress.update(task, advance=read, description=run)


def _ignore(read: int) -> None:
    """Nobody watches."""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
