"""``trainwarden test rules``: unit tests of rules, as promtool has them, in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer(no_args_is_help=True, help="Run unit tests of rules.")


@app.callback()
def test() -> None:
    """Run unit tests of rules."""


@app.command("rules")
def run_rule_tests(
    files: Annotated[list[Path], typer.Argument(help="Files of tests.")],
    run: Annotated[str | None, typer.Option(help="Only the tests whose name matches this regular expression.")] = None,
) -> None:
    """Run files of tests: made-up series in steps, and the alerts that must fire."""
    import re

    from trainwarden.rules.core.counted import counted
    from trainwarden.rules.ruletests.run import run_tests
    from trainwarden.rules.ruletests.testfile import RuleTestError, load_tests

    try:
        only = None if run is None else re.compile(run)
    except re.error as error:
        raise typer.BadParameter(f"--run: {error}") from None
    said: list[str] = []
    tests = 0
    for file in files:
        try:
            report = run_tests(load_tests(file), only)
        except RuleTestError as error:
            said += error.errors
            continue
        tests += report.tests
        said += map(str, report.failures)
        if report.failures:
            typer.echo(f"{file}: {len(report.failures)} of {counted(report.checks, 'expectation')} failed")
        elif report.tests:
            typer.echo(f"{file}: passed ({counted(report.tests, 'test')}, {counted(report.checks, 'expectation')})")
    if said:
        fail("\n".join(said))
    if not tests:
        fail("no test ran" + (f": none is named {run}" if run else ""))
