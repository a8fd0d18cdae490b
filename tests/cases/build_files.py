"""Writes the inputs of the public cases as the files that people have, and replays these by the public command.

``table`` and ``lines`` are logs of one attempt, with whatever words their writer has for a signal; ``journal`` is a run's folder, with
attempts, ranks and events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.cases.build import Row, Verdicts
from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.cli import app
from trainwarden.rules.core.inputs import Start


def table(path: Path, rows: Sequence[tuple[int, Row]]) -> Path:
    """Write a CSV with a column for each name that any row has; a value that a row lacks, or that is None, is a blank cell."""
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    made = [",".join(["step", *names])]
    made += [",".join([str(step), *(_cell(row.get(name)) for name in names)]) for step, row in rows]
    path.write_text("\n".join(made) + "\n")
    return path


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.9g}"


def lines(path: Path, rows: Sequence[tuple[int, Row]]) -> Path:
    """Write a JSON object a line, a value that is not finite as Python's json does it."""
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in rows))
    return path


def journal(folder: Path, placed: Sequence[tuple[Start, int, Step | Event]]) -> Path:
    """Write lines as exporters write them: a file a start and rank, with its header, in the folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    run = placed[0][0]
    (folder / "run.json").write_text(json.dumps({"run_uid": run.run_uid, "run": run.run}))
    opened: dict[tuple[str, int], Any] = {}
    for start, rank, line in placed:
        key = (start.start_id, rank)
        if key not in opened:
            path = folder / f"attempt-{start.attempt}" / start.start_id / f"rank-{rank}" / "00001.ndjson"
            path.parent.mkdir(parents=True, exist_ok=True)
            opened[key] = path.open("wb")
            header = Header(
                run_uid=start.run_uid, run=start.run, attempt=start.attempt, start_id=start.start_id, rank=rank
            )
            opened[key].write(encode_line(header) + b"\n")
        opened[key].write(encode_line(line) + b"\n")
    for file in opened.values():
        file.close()
    return folder


def replayed(*paths: Path, options: Sequence[str] = ()) -> Verdicts:
    """Return what ``trainwarden replay … --output json`` says of the one run that the files hold."""
    ran = CliRunner().invoke(app, ["replay", *map(str, paths), "--output", "json", *options])
    assert ran.exit_code == 0, ran.output + "".join(map(str, ran.exc_info or ()))
    (one,) = json.loads(ran.stdout)
    return verdicts(one)


def verdicts(report: Mapping[str, Any]) -> Verdicts:
    """Return the incidents of one file's report in the order of their opening, and its notices."""
    incidents = sorted(report["incidents"], key=lambda one: (one["attempt"], one["opened_step"]))
    return Verdicts(incidents, report["notices"])
