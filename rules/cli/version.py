"""``trainwarden version``."""

from __future__ import annotations

import typer

app = typer.Typer()


@app.command()
def version() -> None:
    """Print the version."""
    import trainwarden

    typer.echo(f"trainwarden {trainwarden.__version__}")
