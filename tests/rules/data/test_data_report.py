"""What a step ate, put together and printed: what is not known says why, and no control character reaches a terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest_httpserver import HTTPServer
from rich.console import Console
from typer.testing import CliRunner

from trainwarden.record import Header, Step, encode_line
from trainwarden.rules.cli import app
from trainwarden.rules.data.dataset import Sample
from trainwarden.rules.data.records import DataError, Found, Record
from trainwarden.rules.data.report import Asked, assemble
from trainwarden.rules.data.terminal import to_text, visible
from trainwarden.runfolder import RunFolder


class Row(msgspec.Struct):
    position: int
    row: int
    shard: str | None = None
    row_in_shard: int | None = None
    instead_of: int | None = None


class Texts:
    """A data set of given texts."""

    shards = None

    def __init__(self, *texts: Any) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, row: int) -> Sample:
        text = self.texts[row]
        if text is None:
            raise DataError(f"row {row} is gone")
        return Sample(text) if isinstance(text, str) else Sample(tokens=text)


def told(*texts: Any, start: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    step = Step(seq=1, step=1, time=1.0, signals={"epoch": 0.0}, samples=[(0, len(texts))])
    record = Record(0, "start", 0, step, {"dataset_size": len(texts)} if start is None else start)

    def rebuild(start: Any) -> Any:
        return lambda epoch, samples: [Row(at, at) for first, end in samples for at in range(first, end)]

    return assemble("r", None, Found({1: [record]}), Asked(rebuild, Texts(*texts), **asked))


def printed(report: dict[str, Any]) -> str:
    out = io.StringIO()
    to_text(report, Console(file=out, width=100, highlight=False))
    return out.getvalue()


def test_every_character_of_a_text_can_be_seen_and_none_commands_the_terminal() -> None:
    hostile = "a\x1b[2J\r\nb\tc\u202e\x00\x9bü日"
    assert visible(hostile) == "a\\x1b[2J␍⏎b⇥c\\u202e\\x00\\x9bü日"
    page = printed(told(hostile, "[red]no markup[/red]"))
    assert all(character.isprintable() or character == "\n" for character in page)
    assert "[red]no markup[/red]" in page


def test_bytes_that_are_no_text_are_shown_as_their_numbers_and_can_be_written_as_json() -> None:
    report = told("ok\udccb\ud800")
    assert report["steps"][0]["ranks"][0]["rows"][0]["text"] == "ok\\xcb\\ud800"
    assert msgspec.json.decode(msgspec.json.encode(report)) == report
    assert "ok\\xcb\\ud800" in printed(report)


def test_long_samples_are_cut_and_their_length_is_said() -> None:
    report = told("x" * 1000, list(range(50)), characters=5)
    rows = report["steps"][0]["ranks"][0]["rows"]
    assert [(row["text"], row["tokens"], row["length"], row["cut"]) for row in rows] == [
        ("xxxxx", None, 1000, True),
        (None, [0, 1, 2, 3, 4], 50, True),
    ]
    page = printed(report)
    assert "xxxxx … 1,000 characters" in page
    assert "0 1 2 3 4 … 50 tokens" in page
    assert not any(row["cut"] for row in told("abcde", characters=5)["steps"][0]["ranks"][0]["rows"])


def test_only_so_many_samples_are_listed_and_the_rest_is_counted() -> None:
    report = told(*"abcdef", limit=2)
    (rank,) = report["steps"][0]["ranks"]
    assert (len(rank["rows"]), rank["more"]) == (2, 4)
    assert "and 4 more samples (--limit 0 lists all)" in printed(report)
    assert told(*"abcdef", limit=0)["steps"][0]["ranks"][0]["more"] == 0


def test_what_can_no_longer_be_read_is_said_once_and_the_rest_is_shown() -> None:
    report = told("a", None, "c", None)
    assert report["unread"] == "row 1 is gone"
    assert [row.get("text") for row in report["steps"][0]["ranks"][0]["rows"]] == ["a", None, None, None]


def test_a_data_set_of_another_size_is_remarked_on() -> None:
    (notice,) = told("a", "b", start={"dataset_size": 7})["notices"]
    assert notice.startswith("the data set that is named has 2 rows, and the one that was trained on had 7")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--step", "x"], 2, "give a number, or a range"),
        (["--step", "-3"], 2, "give a number, or a range"),
        (["--step", "3-"], 2, "give a number, or a range"),
        (["--step", "5-4"], 2, "ends before it begins"),
        (["--step", "1-100000"], 2, "at most 1000"),
        (["--step", "1", "--dtype", "float16"], 2, "it is one of uint8"),
        (["--step", "1", "--limit", "-1"], 2, "limit"),
        (["--step", "1"], 1, "no such folder of runs"),
        ([], 2, "give --step, or an --incident"),
        (["--incident", "inc_1", "--url", "http://127.0.0.1:1"], 1, "no answer"),
    ],
)
def test_wrong_usage_is_told_from_what_is_not_there(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    ran = CliRunner().invoke(app, ["data", "show", "--run", "r", "--dir", str(tmp_path / "none"), *arguments])
    said = re.sub(r"\x1b\[[0-9;]*m|[│\n]", " ", ran.output)
    assert ran.exit_code == code, said
    assert says in re.sub(r" +", " ", said)


def test_an_incident_says_run_attempt_and_step(tmp_path: Path, httpserver: HTTPServer) -> None:
    row = {"run": "gpt-7b", "attempt": 1, "onset_step": 341}
    httpserver.expect_request("/api/v1/incidents/inc_1").respond_with_json({"status": "success", "data": row})
    for attempt in (0, 1, 2):
        path = RunFolder("gpt-7b", tmp_path).journal(attempt, f"start-{attempt}", 0) / "00001.ndjson"
        path.parent.mkdir(parents=True)
        header = Header(run_uid="u", run="gpt-7b", attempt=attempt, start_id=f"start-{attempt}")
        steps = [Step(seq=at, step=at, time=1.0, signals={"loss": float(attempt)}) for at in (340, 341, 342)]
        path.write_bytes(b"".join(encode_line(line) + b"\n" for line in (header, *steps)))
    given = ["--incident", "inc_1", "--url", httpserver.url_for("/"), "--dir", str(tmp_path), "--output", "json"]

    def shown(*more: str) -> list[tuple[int, int]]:
        ran = CliRunner().invoke(app, ["data", "show", *given, *more])
        assert ran.exit_code == 0, ran.output
        return [(step["attempt"], step["step"]) for step in msgspec.json.decode(ran.stdout)["steps"]]

    assert shown() == [(1, 341)]
    assert shown("--step", "340-342") == [(1, 340), (1, 341), (1, 342)]
    assert shown("--attempt", "0") == [(0, 341)]


def test_torch_stays_unimported_until_rows_are_asked_for(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom trainwarden.rules.cli import app\n"
        "CliRunner().invoke(app, ['data', 'show', '--run', 'r', '--step', '1', '--dir', sys.argv[1]])\n"
        "import trainwarden.rules.data.dataset, trainwarden.rules.data.terminal\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_damaged_values_are_left_out_and_a_damaged_order_says_so() -> None:
    nested = {"a": {"b": 1.0}}
    signals: dict[str, Any] = {"loss": {"all": 1.0}, "source_share": nested, "loss_expected": 2.0}
    step = Step(seq=1, step=1, time=1.0, signals=signals, samples=[(0, 2)])
    record = Record(0, "start", 0, step, {"loader": {"order": "\x1b[31m", "seed": []}})

    def rebuild(start: Any) -> Any:
        raise KeyError("reserve")

    found = assemble("r", None, Found({1: [record]}), Asked(rebuild))
    rank = found["steps"][0]["ranks"][0]
    assert {"loss", "source_share", "loss_expected"} & set(rank) == {"loss_expected"}
    assert rank["unknown"] == "the order cannot be rebuilt: KeyError: 'reserve'"
    written = io.StringIO()
    to_text(found, Console(file=written, width=200))
    assert "\x1b" not in written.getvalue()
