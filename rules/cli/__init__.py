"""The command line. One file a command, imported when it is asked for; nothing heavy is imported before it is needed.

Exit codes: 0 fine, 1 failed or invalid, 2 wrong usage (``supervise`` passes its command's own code on, ``exec`` becomes its command).
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

#: Commands in the order of the help page; each is the file of that name.
COMMANDS = (
    "run",
    "replay",
    "check",
    "test",
    "tune",
    "incidents",
    "data",
    "receiver",
    "supervise",
    "exec",
    "demo",
    "doctor",
    "version",
)


class _Lazy(TyperGroup):
    """Finds a command by importing its file."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(importlib.import_module(f"trainwarden.rules.cli.{cmd_name}").app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Lazy,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def trainwarden() -> None:
    """Watch training runs step by step, say what a loss spike is and what caused it, and have it rolled back."""


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="trainwarden")
