"""The demo as a user runs it: one command, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real import wait_until
from trainwarden.demo.follow import Journals
from trainwarden.demo.layout import Layout
from trainwarden.demo.processes import trainwarden
from trainwarden.demo.summary import broken_promises
from trainwarden.record import Step

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

KEYS = {
    *("clean_loss", "untreated_loss", "treated_loss", "incidents", "rollbacks", "onset_step", "poison_first_step"),
    *("verdict", "cause", "skip_samples", "poison_samples", "contains", "plan_applied", "recovered", "seconds"),
}


@dataclass
class Ran:
    """A demo that has ended: its folder, what it printed, and what daemon and receiver had been given half way there."""

    layout: Layout
    output: str
    code: int
    given: dict[str, bytes]

    def read(self, name: str) -> Any:
        return json.loads((self.layout.root / name).read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    layout = Layout(tmp_path_factory.mktemp("demo") / "out")
    command = [*trainwarden(), "demo", "--seed", "2", "--dir", str(layout.root)]
    log = layout.root.with_suffix(".log")
    with log.open("wb") as output:
        demo = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        journals = Journals(layout.run_folder("treated"))
        newest = 0

        def under_way() -> bool:
            nonlocal newest
            assert demo.poll() is None, log.read_text()
            newest = max([newest, *(line.step for _, line in journals.new() if isinstance(line, Step))])
            return newest >= 150

        wait_until(under_way, 900, what="the watched run is at step 150", every=0.1)
        given = what_daemon_and_receiver_were_given(layout)
        demo.wait(900)
        yield Ran(layout, log.read_text(), demo.returncode, given)
    finally:
        if demo.poll() is None:
            demo.terminate()
            demo.wait(60)


def what_daemon_and_receiver_were_given(layout: Layout) -> dict[str, bytes]:
    """Return their configuration, databases, logs, command lines and environments, and the run folder, as they are now."""
    found: dict[str, bytes] = {}
    for folder in (layout.ops, layout.run_folder("treated").path):
        for path in folder.rglob("*"):
            if path.is_file():
                found[str(path.relative_to(layout.root))] = path.read_bytes()
    for name in ("trainwarden.db", "receiver.db"):
        copy = layout.root.with_name(f"copy-of-{name}")
        for part in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(layout.ops / f"{name}{part}", f"{copy}{part}")
        with contextlib.closing(sqlite3.connect(copy)) as database:
            found[f"dump of {name}"] = "\n".join(database.iterdump()).encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            if str(layout.ops).encode() in words:
                found[f"command line of {process.name}"] = words
                found[f"environment of {process.name}"] = (process / "environ").read_bytes()
    return found


#: The data set's shards, as the start event tells them: name, first row and the row behind the last.
LAYOUT = re.compile(rb'"shards":\[(?:\["[^"]*",\d+,\d+\],?)+\]')


def test_it_exits_0_and_keeps_its_promises(ran: Ran) -> None:
    assert ran.code == 0, ran.output
    summary = ran.read("summary.json")
    assert set(summary) >= KEYS
    assert broken_promises(summary) == []


def test_the_summary_says_what_is_in_the_files(ran: Ran) -> None:
    summary, answer = ran.read("summary.json"), ran.read("answer.json")
    for arm in ("clean", "untreated", "treated"):
        assert summary[f"{arm}_loss"] == json.loads((ran.layout.arm(arm) / "heldout.json").read_text())["loss"]
    (incident,) = ran.read("incidents.json")
    assert summary["onset_step"] == incident["onset_step"]
    (plan,) = ran.layout.run_folder("treated").read_plans()[0]
    assert [tuple(pair) for pair in summary["skip_ranges"]] == plan.skip_samples
    assert summary["poison_first_step"] == answer["first_step"]
    assert summary["poison_samples"] == sum(end - first for first, end in answer["ranges"])


def test_nothing_that_daemon_and_receiver_were_given_says_where_the_poison_is(ran: Ran) -> None:
    answer = ran.read("answer.json")
    assert len([name for name in ran.given if name.startswith("command line")]) >= 2
    assert any("demo/attempt-0" in name for name in ran.given)
    (first, end) = answer["ranges"][0]
    words = "|".join(re.escape(word) for word in (answer["shard"], "poison", str(first), str(end)))
    telling = re.compile(rf"(?<![\w.-])(?:{words})(?![\w.-])".encode())
    for name, content in ran.given.items():
        if name.endswith((".db", ".db-wal", ".db-shm")):
            continue  # pages of a database hold any bytes; its dump is looked at
        for layout in LAYOUT.findall(content):
            assert layout.count(b"],[") >= 10  # all shards, the poisoned one among them: that says nothing
        content = LAYOUT.sub(b"", content)
        found = telling.search(content)
        assert found is None, f"{name}: {content[max(0, found.start() - 80) : found.end() + 80]!r}"


def test_live_equals_replay(ran: Ran) -> None:
    command = [*trainwarden(), "replay", str(ran.layout.run_folder("treated").path), "--output", "json"]
    command += ["--config", str(ran.layout.ops / "trainwarden.yml")]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    paper = [incident for report in json.loads(replayed.stdout) for incident in report["incidents"]]
    live = ran.read("incidents.json")
    same = (
        *(
            "id",
            "run_uid",
            "attempt",
            "onset_step",
            "opened_step",
            "confirmed_step",
            "closed_step",
            "state",
            "severity",
        ),
        *("verdict", "action", "plan", "cause", "scope", "alerts", "suspect_samples", "evidence"),
    )
    assert [{name: row[name] for name in same} for row in paper] == [{name: row[name] for name in same} for row in live]


def test_the_treated_run_is_the_clean_one_from_the_rollback_on(ran: Ran) -> None:
    summary = ran.read("summary.json")
    if summary["skip_ranges"] != summary["poison_ranges"]:
        pytest.skip("more than the poison was skipped: the runs may differ by a few samples")
    assert summary["treated_loss"] == pytest.approx(summary["clean_loss"], rel=1e-6)


def test_the_story_is_told_in_order_and_without_escapes(ran: Ran) -> None:
    at = 0
    for words in (
        "clean ends with a held-out loss",
        "times the usual",
        "incident inc_",
        "Decided",
        "accepted",
        "executed",
        "attempt 1 resumes from step",
        "recovered",
        "Loss on held-out text",
        "To look at",
    ):
        found = ran.output.find(words, at)
        assert found >= 0, f"{words!r} does not follow in:\n{ran.output}"
        at = found
    assert "\x1b" not in ran.output


def test_its_processes_are_gone(ran: Ran) -> None:
    mine = str(ran.layout.root).encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            assert not process.name.isdigit() or mine not in (process / "cmdline").read_bytes()


def test_what_the_poisoned_steps_ate_and_what_stood_in_for_it_can_be_shown(ran: Ran) -> None:
    (first, end) = ran.read("summary.json")["poison_ranges"][0]
    step = first // 8 + 3
    runs, rows_of = ran.layout.runs("treated"), f"trainwarden.demo.train:text_rows:{ran.layout.data}"
    command = [
        *trainwarden(),
        "data",
        "show",
        "--run",
        "demo",
        "--dir",
        str(runs),
        "--step",
        str(step),
        "--output",
        "json",
    ]
    shown = {}
    for attempt in (0, 1):
        given = ["--attempt", str(attempt), "--dataset", rows_of, "--tokenizer", "bytes"]
        told = json.loads(subprocess.run([*command, *given], capture_output=True, check=True, timeout=120).stdout)
        ((rank,), shown[attempt]) = (told["steps"][0]["ranks"], told)
        assert all(first <= row["position"] < end for row in rank["rows"])
        assert [row["instead_of"] is not None for row in rank["rows"]] == [attempt == 1] * 8
    (poison,), (stand_ins,) = (shown[attempt]["steps"][0]["ranks"] for attempt in (0, 1))
    assert {row["shard"] for row in poison["rows"]} == {ran.read("summary.json")["poison_shard"]}
    assert not {row["shard"] for row in stand_ins["rows"]} & {row["shard"] for row in poison["rows"]}
    assert [row["instead_of"] for row in stand_ins["rows"]] == [row["row"] for row in poison["rows"]]
    assert any(max(map(row["text"].count, set(row["text"]))) > 64 for row in poison["rows"])
    assert not any(max(map(row["text"].count, set(row["text"]))) > 64 for row in stand_ins["rows"])
    assert any("attempt 1 went on from step" in notice for notice in shown[0]["notices"])
