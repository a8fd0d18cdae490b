"""The terminal: lines of the story, progress of the runs, the closing tables. Good on a screen and in a log file.

What several programs report comes in late and out of turn. A line of the story is therefore held back for a moment and told
in the order of its own time, so that a cause stands above its effect.

On a terminal the progress bars stay below the story; elsewhere a run says so every hundred steps.
"""

from __future__ import annotations

import heapq
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

_EVERY = 100
#: Seconds that a line is held back: longer than the daemon's polling, its tick and a look of the demo's together.
HOLD = 3.0
#: Who speaks, and in which colour. At one and the same time they speak in this order.
VOICES = {
    "demo": "white",
    "clean": "green",
    "untreated": "red",
    "trainer": "cyan",
    "daemon": "yellow",
    "receiver": "magenta",
    "supervisor": "blue",
}
_MARGIN = len("00:00 supervisor ")
_NARROWEST = 30  # columns of text beside the margin, however narrow the terminal is


@dataclass(order=True, slots=True)
class _Line:
    at: float
    place: int
    number: int
    voice: str = field(compare=False)
    text: str = field(compare=False)
    loud: bool = field(compare=False)


class Screen:
    """Use as a context: the bars are drawn inside of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.time()
        self._started = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, int] = {}
        self._held: list[_Line] = []
        self._number = 0
        self._blank = False
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
        self._release(float("inf"))
        self._progress.stop()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the start."""
        return time.monotonic() - self._started

    def title(self, text: str) -> None:
        """Print a heading, with a blank line above it unless it is the first."""
        self._release(float("inf"))
        if self._blank:
            self._console.print()
        self._console.rule(f"[bold]{escape(text)}", align="left", style="dim")
        self._blank = True

    def plain(self, text: str) -> None:
        """Print text without time or voice, folded at blanks; a line keeps its indent."""
        self._release(float("inf"))
        for line in text.splitlines() or [""]:
            indent = line[: len(line) - len(line.lstrip())]
            for part in _folded(line, self._console.width, indent) or [""]:
                self._print(Text(part))

    def paths(self, heading: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a heading and under it what lies where; a path is never broken, so that it can be copied."""
        self._release(float("inf"))
        self._console.print()
        self._print(Text(heading, "bold"))
        width = max(len(what) for what, _ in rows)
        for what, path in rows:
            self._print(Text(f"  {what:<{width}}  {path}"))

    def command(self, heading: str, command: str) -> None:
        """Print a heading and a command on a line of its own, which is never broken."""
        self._release(float("inf"))
        self._console.print()
        self._print(Text(heading, "bold"))
        self._print(Text(f"  {command}"))

    def say(self, voice: str, text: str, *, loud: bool = False, at: float | None = None) -> None:
        """Take one line of the story: when, who, what. ``at`` is Unix seconds (default: now); :meth:`beat` prints it."""
        self._number += 1
        when = time.time() if at is None else at
        heapq.heappush(self._held, _Line(when, list(VOICES).index(voice), self._number, voice, text, loud))

    def beat(self) -> None:
        """Print the lines that were held back for long enough."""
        self._release(time.time() - HOLD)

    def progress(self, name: str, step: int, total: int, loss: float, at: float | None = None) -> None:
        """Show how far a run is; also backwards, after a rollback. ``at`` is the Unix time of the step."""
        if self._console.is_terminal:
            if name not in self._tasks:
                colour = VOICES.get(name, "white")
                self._tasks[name] = self._progress.add_task(f"[{colour}]{name}[/]", total=total, loss=loss)
            self._progress.update(self._tasks[name], completed=step, loss=loss)
            return
        passed = step // _EVERY
        if passed != self._said.get(name, 0):
            if passed > self._said.get(name, 0):
                self.say(name, f"step {step} of {total}, loss {loss:.3f}", at=at)
            self._said[name] = passed

    def done(self, name: str) -> None:
        """Take a run's bar away."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)

    def table(self, title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
        """Print a table, with a blank line above it; the first column is left-aligned, the others right."""
        self._release(float("inf"))
        table = Table()
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self._console.print()
        self._print(Text(title, "bold"))
        self._console.print(table)

    def _release(self, until: float) -> None:
        while self._held and self._held[0].at <= until:
            self._tell(heapq.heappop(self._held))

    def _tell(self, line: _Line) -> None:
        minutes, seconds = divmod(max(0, int(line.at - self._began)), 60)
        head = Text.assemble((f"{minutes:02}:{seconds:02} ", "dim"), (f"{line.voice:>10} ", VOICES[line.voice]))
        # Folded here and not by the console, which fills every line up with blanks.
        for part in _folded(line.text, max(_NARROWEST, self._console.width - _MARGIN)):
            self._print(head.append(part, "bold" if line.loud else ""))
            head = Text(" " * _MARGIN)

    def _print(self, text: Text) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
