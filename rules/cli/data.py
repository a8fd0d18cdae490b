"""``trainwarden data show``: which samples, shards, files and text a step ate, from the journals of a run's folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwarden.rules.cli.output import console, fail, write

if TYPE_CHECKING:
    from trainwarden.rules.data.dataset import DataSet
    from trainwarden.rules.data.report import Rebuild

app = typer.Typer(no_args_is_help=True, help="Look at the data that a run was trained on.")

#: Steps of one call; for more, a script reads the journals.
MOST_STEPS = 1000
HERE = "http://127.0.0.1:17080"


class Output(StrEnum):
    """How the result is written."""

    text = "text"
    json = "json"


@app.callback()
def data() -> None:
    """Look at the data that a run was trained on."""


@app.command("show")
def show(
    run: Annotated[str | None, typer.Option(envvar="TRAINWARDEN_RUN", help="Name of the run.")] = None,
    step: Annotated[str | None, typer.Option(help="The step, or a range such as 340-344.")] = None,
    incident: Annotated[
        str | None,
        typer.Option(help="An incident's id: the daemon says its run, its attempt and the step of its onset."),
    ] = None,
    url: Annotated[str, typer.Option("--url", envvar="TRAINWARDEN_URL", help="Address of the daemon's API.")] = HERE,
    attempt: Annotated[int | None, typer.Option(min=0, help="Default: the newest attempt that made the step.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Default: all ranks.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of runs; default $TRAINWARDEN_DIR or ./.trainwarden.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Where the text is: a .bin, .npy, .jsonl or .txt file, a folder of them, or module:function[:argument]."
        ),
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample, in files without rows.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of the tokens in a .bin file.")] = "uint16",
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, tiktoken:NAME, or a name or path that transformers loads.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="module:function (seed, epoch) -> rows, where the run's order was a function.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Samples of a step and rank that are listed; 0 for all.")] = 32,
    chars: Annotated[
        int | None,
        typer.Option(min=0, help="Characters (or tokens) of each sample; 0 for all. Default: 160, all in JSON."),
    ] = None,
    output: Annotated[Output, typer.Option(help="text or json.")] = Output.text,
) -> None:
    """Show what a step ate: samples, shards, rows, files, and their text where the data set can be read."""
    import msgspec

    from trainwarden.rules.data.dataset import DTYPES, load, open_dataset
    from trainwarden.rules.data.records import DataError, find, open_run
    from trainwarden.rules.data.report import Asked, assemble
    from trainwarden.rules.data.terminal import to_text
    from trainwarden.rules.data.tokenizer import of_bytes, open_tokenizer
    from trainwarden.runfolder import RunFolderError

    if incident is not None:
        row = _incident(url, incident)
        run, step = run or row["run"], step or str(row["onset_step"])
        attempt = row["attempt"] if attempt is None else attempt
    if not run or not step:
        raise typer.BadParameter(f"give {'--run' if not run else '--step'}, or an --incident that says it")
    wanted = _steps(step)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype}: it is one of {', '.join(DTYPES)}")
    try:
        where = open_run(run, folder)
        found = find(where, wanted, attempt, rank)
        identity = where.identity()
        decode = open_tokenizer(tokenizer) if tokenizer else of_bytes if dtype == "uint8" else None
        opened = None if dataset is None else open_dataset(dataset, context=context, dtype=dtype, decode=decode)
        rebuild = _rebuild(None if order is None else load(order), opened)
        most = chars if chars is not None else 160 if output is Output.text else 0
        told = assemble(run, identity.run_uid if identity else None, found, Asked(rebuild, opened, limit, most))
    except (DataError, RunFolderError, OSError) as error:
        fail(str(error))
    if output is Output.json:
        write(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n", None)
    else:
        to_text(told, console())
    if told["unread"]:
        fail(f"the texts cannot be read: {told['unread']}")


def _incident(url: str, identity: str) -> Any:
    from urllib.parse import quote

    from trainwarden.rules.cli.client import ApiError, ask

    try:
        return ask(url, f"/api/v1/incidents/{quote(identity, safe='')}")
    except ApiError as error:
        fail(str(error))


def _steps(said: str) -> range:
    first, dash, last = said.partition("-")
    if not (first.isascii() and first.isdigit() and (last.isascii() and last.isdigit() if dash else True)):
        raise typer.BadParameter(f"--step {said}: give a number, or a range such as 340-344")
    steps = range(int(first), int(last if dash else first) + 1)
    if not steps:
        raise typer.BadParameter(f"--step {said}: ends before it begins")
    if len(steps) > MOST_STEPS:
        raise typer.BadParameter(f"--step {said}: {len(steps)} steps; at most {MOST_STEPS} are shown at once")
    return steps


def _rebuild(order: Any, dataset: DataSet | None) -> Rebuild:
    """Return what asks the exporter's loader for the rows. It is imported only once a record is there to be asked about."""

    def rebuild(start: Any) -> Any:
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            raise ValueError(
                "the loader's order is computed by the exporter, which needs torch: pip install '.[torch]'"
            )
        from trainwarden.exporter.loader.rebuilt import Rebuilt

        return Rebuilt(start, order, None if dataset is None else dataset.shards).rows

    return rebuild
