"""``trainwarden demo``: a real training run breaks and is rolled back, on this machine, in a few minutes."""

from __future__ import annotations

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer()


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def demo(context: typer.Context) -> None:
    """Run the demo; `trainwarden demo --help` lists its options. It needs the extra "torch"."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        fail("the demo trains a real model and needs torch: pip install '.[torch]' in a clone of trainwarden")
    from trainwarden.demo.main import main

    raise typer.Exit(main(context.args))
