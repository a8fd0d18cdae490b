"""How commands speak: results to standard output, errors to standard error, and the exit code with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import typer


def fail(says: str, code: int = 1) -> NoReturn:
    """Say an error and end with ``code``."""
    typer.echo(says, err=True)
    raise typer.Exit(code)


def write(data: bytes, path: Path | None) -> None:
    """Write a result to a file, or to standard output."""
    if path is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")


def console(path: Path | None = None) -> Any:
    """Return a rich console on standard output, or on a file without colours."""
    from rich.console import Console

    if path is None:
        return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)
    try:
        return Console(file=path.open("w", encoding="utf-8"), highlight=False, soft_wrap=True, no_color=True, width=200)
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")
