"""What is suspect as data to leave out, and what a replay of several runs remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.real import trainwarden
from tests.rules.core.runs import dirty
from tests.rules.core.test_suspects_remembered import data, run
from trainwarden.plan import Exclusion, decode_exclusions
from trainwarden.record import Header, encode_line
from trainwarden.rules.exclusions import exclusions, to_file, to_lines


def row(first: int, end: int, **changed: Any) -> dict[str, Any]:
    entry = {"dataset": "web", "shard": "a", "first": first, "end": end}
    return {
        "id": "sus_1",
        "run": "r",
        "step": 7,
        "dataset": "web",
        "state": "suspect",
        "weak": False,
        "exclude": [entry],
        **changed,
    }


def test_rows_are_named_once_and_only_what_is_suspect() -> None:
    rows = [
        row(0, 10),
        row(5, 20),
        row(40, 50, state="cleared"),
        row(60, 70, weak=True),
        row(80, 90, weak=True, state="confirmed"),
        row(0, 0, exclude=[], dataset=None),
        row(0, 0, exclude=[]),
    ]
    found, notices = exclusions(rows)
    assert [(one.first, one.end) for one in found] == [(0, 20), (80, 90)]
    assert ["no name" in notices[0], "cannot be computed" in notices[1], len(notices)] == [True, True, 2]
    assert [(one.first, one.end) for one in exclusions(rows, weak=True)[0]] == [(0, 20), (60, 70), (80, 90)]


def test_what_is_written_is_what_an_exporter_reads() -> None:
    found = [Exclusion(dataset="web", shard="a b", first=0, end=20), Exclusion(dataset="web", shard="", first=3, end=4)]
    assert decode_exclusions(to_file(found)) == found
    assert to_lines(found) == b"web\ta b\t0\t20\nweb\t\t3\t4\n"
    assert decode_exclusions(to_file([])) == []


def journal(folder: Path, name: str, *changes: Any, **start: Any) -> Path:
    """Write a made-up run as its exporter would have, and return its folder."""
    attempt = run(name, *changes, start=data(**start), checkpoint_every=0)
    where = folder / name / "attempt-0" / attempt.who.start_id / "rank-0"
    where.mkdir(parents=True)
    header = Header(run_uid=attempt.run_uid, run=name, attempt=0, start_id=attempt.who.start_id, rank=0)
    lines = [encode_line(header), *(encode_line(line) for line in attempt.lines())]
    (where / "00001.ndjson").write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
    return folder / name


def test_a_replay_of_several_runs_has_one_memory_in_the_order_of_their_naming(tmp_path: Path) -> None:
    broken, later = journal(tmp_path, "a", dirty(301, 350)), journal(tmp_path, "b", order="blocks", seed=2)
    out = tmp_path / "bad.json"
    told = trainwarden("replay", str(broken), str(later), "--output", "json", "--suspects", str(out))
    assert told.returncode == 0, told.stderr
    first, second = json.loads(told.stdout)
    assert [one["state"] for one in first["suspects"]] == ["suspect"]
    assert second["suspects"] == []
    assert [one["run"] for one in second["notices"] if one["kind"] == "known_suspect"] == ["b"]
    assert decode_exclusions(out.read_bytes()) == []  # run b passed it unharmed
    turned = trainwarden("replay", str(later), str(broken), "--output", "json", "--suspects", str(out))
    assert not [one for one in json.loads(turned.stdout)[0]["notices"] if one["kind"] == "known_suspect"]
    assert [one.shard for one in decode_exclusions(out.read_bytes())] == ["shard-006"]
