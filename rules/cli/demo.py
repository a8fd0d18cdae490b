"""``trainwarden demo``: a real training run breaks and is rolled back, on this machine, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer()


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Of the weights, the order of the data and the poison.")] = 2,
    dir: Annotated[Path, typer.Option(help="Folder for everything that it writes.")] = Path(".demo"),
) -> None:
    """Run the demo: a real training run breaks, is rolled back and recovers. It needs the extra "torch"."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        fail("the demo trains a real model and needs torch: pip install '.[torch]' in a clone of trainwarden")
    from trainwarden.demo.main import main

    raise typer.Exit(main(["--seed", str(seed), "--dir", str(dir)]))
