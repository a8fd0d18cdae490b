"""What the demo reads of a run while it is written, and what it gives to daemon and receiver."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwarden.demo import arms
from trainwarden.demo.follow import Journals
from trainwarden.demo.layout import DemoError, prepare
from trainwarden.demo.processes import start
from trainwarden.receiver.settings import settings_from
from trainwarden.record import Header, Step, encode_line
from trainwarden.rules.config import load_config, read_webhook_secret
from trainwarden.rules.yamltext import load
from trainwarden.runfolder import RunFolder


def test_each_journal_line_is_read_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    run = RunFolder("toy", tmp_path)
    file = run.journal(1, "start", 0) / "00001.ndjson"
    journals = Journals(run)
    assert list(journals.new()) == []
    file.parent.mkdir(parents=True)
    header = encode_line(Header(run_uid="u", run="toy", attempt=1, start_id="start")) + b"\n"
    first, second = (encode_line(Step(seq=step, step=step, time=1.0)) + b"\n" for step in (1, 2))
    file.write_bytes(header + first + second[:20])
    assert [(attempt, line.step) for attempt, line in journals.new()] == [(1, 1)]
    assert list(journals.new()) == []
    with file.open("ab") as torn:
        torn.write(second[20:])
    assert [(attempt, line.step) for attempt, line in journals.new()] == [(1, 2)]


def test_daemon_and_receiver_can_read_what_they_are_given_wherever_the_folder_lies(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "a [b] #c: d")
    addresses = arms.configure(layout)
    config = load_config(layout.ops / "trainwarden.yml")
    assert config.policy.mode == "act"
    assert config.listen == addresses.daemon
    assert config.receiver is not None
    read_webhook_secret(config.path(config.receiver.secret_file))
    run = layout.run_folder("treated").path
    (run / "targets").mkdir(parents=True)
    assert config.sources[0].folder is not None
    assert list(Path("/").glob(config.sources[0].folder.lstrip("/"))) == [run / "targets"]

    text = (layout.ops / "receiver.yml").read_text()
    receiver = settings_from(load(text, "receiver.yml").value)
    assert receiver.listen == addresses.receiver
    assert receiver.root_folders() == [layout.runs("treated")]
    assert layout.arm("treated") / "checkpoints" in receiver.checkpoint_folders()


def test_all_runs_are_given_the_same_training(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "demo")
    scale = arms.Scale()
    commands = [arms.training_command(layout, arm, 2, scale) for arm in ("clean", "untreated", "treated")]
    differing = {index for index, words in enumerate(zip(*commands, strict=True)) if len(set(words)) > 1}
    assert {commands[0][index - 1] for index in differing} == {"--out", "--run", "--keep-checkpoints"}
    supervised = arms.supervise_command(layout, 2, scale)
    assert supervised[supervised.index("--") + 1 :] == commands[2]


def test_settings_of_the_callers_shell_do_not_reach_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWARDEN_MODE", "observe")
    process = start([], "printer", ["env"], tmp_path / "log", {"TRAINWARDEN_DIR": "/somewhere"})
    process.popen.wait()
    said = (tmp_path / "log").read_text().splitlines()
    assert [line for line in said if line.startswith("TRAINWARDEN_")] == ["TRAINWARDEN_DIR=/somewhere"]


def test_a_program_that_fails_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = start([], "the trainer", ["sh", "-c", "echo out of memory; exit 7"], tmp_path / "log")
    process.popen.wait()
    with pytest.raises(DemoError, match=r"(?s)the trainer ended with exit code 7.*out of memory"):
        process.done()
