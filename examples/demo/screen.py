"""The terminal: lines of the story, progress of the runs, the closing table. Good on a screen and in a log file.

On a terminal the progress bars stay below the story; elsewhere a run says so every hundred steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

_EVERY = 100
#: Who speaks, and in which colour.
VOICES = {
    "demo": "white",
    "clean": "green",
    "untreated": "red",
    "trainer": "cyan",
    "daemon": "yellow",
    "receiver": "magenta",
    "supervisor": "blue",
}


class Screen:
    """Use as a context: the bars are drawn inside of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, int] = {}
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:7.3f}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the start."""
        return time.monotonic() - self._started

    def title(self, text: str) -> None:
        """Print a heading."""
        self._console.rule(f"[bold]{escape(text)}", align="left", style="dim")

    def plain(self, text: str) -> None:
        """Print a line without time or voice."""
        self._console.print(escape(text), highlight=False)

    def say(self, voice: str, text: str, *, loud: bool = False) -> None:
        """Print one line of the story: when, who, what."""
        minutes, seconds = divmod(int(self.seconds), 60)
        colour = VOICES.get(voice, "white")
        body = f"[bold]{escape(text)}[/]" if loud else escape(text)
        row = Table.grid(padding=(0, 1))  # so that a long line is folded under its own text
        row.add_row(f"[dim]{minutes:02}:{seconds:02}[/]", f"[{colour}]{voice:>10}[/]", body)
        self._console.print(row, highlight=False)

    def progress(self, name: str, step: int, total: int, loss: float) -> None:
        """Show how far a run is; also backwards, after a rollback."""
        if self._console.is_terminal:
            if name not in self._tasks:
                colour = VOICES.get(name, "white")
                self._tasks[name] = self._progress.add_task(f"[{colour}]{name}[/]", total=total, loss=loss)
            self._progress.update(self._tasks[name], completed=step, loss=loss)
            return
        passed = step // _EVERY
        if passed != self._said.get(name, 0):
            if passed > self._said.get(name, 0):
                self.say(name, f"step {step} of {total}, loss {loss:.3f}")
            self._said[name] = passed

    def done(self, name: str) -> None:
        """Take a run's bar away."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)

    def table(self, title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
        """Print a table; the first column is left-aligned, the others right."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self._console.print(table)
