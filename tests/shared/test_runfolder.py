"""The folder of a run: one identity whoever comes first, secrets for their owner alone, plans that can be trusted."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainwarden.plan import Ledger, LedgerEntry, Plan, PlanError
from trainwarden.record import Event, Header, encode_line
from trainwarden.runfolder import RunFolder, RunFolderError, base_folder, write_whole


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder("gpt-7b", tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", ".hidden", "-x", "a b", "ä", "x" * 129, "a\n"])
def test_a_run_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(RunFolderError, match="run name"):
        RunFolder(name)


def test_looking_at_a_run_that_never_started_makes_nothing(folder: RunFolder) -> None:
    assert folder.identity() is None
    assert folder.token() is None
    assert folder.ledger() is None
    assert folder.attempts() == []
    assert list(folder.journal_files()) == []
    assert folder.read_plans() == ([], [])
    assert not folder.path.exists()


def test_the_base_folder_is_the_environment_s_or_a_hidden_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base_folder() == Path(".trainwarden")
    monkeypatch.setenv("TRAINWARDEN_DIR", "/runs")
    assert base_folder() == Path("/runs")


def test_the_identity_is_minted_once_and_kept(folder: RunFolder) -> None:
    first = folder.open_identity()
    assert first.run == "gpt-7b"
    assert folder.open_identity() == folder.identity() == first


def test_processes_that_mint_at_once_get_one_run_uid_and_one_token(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from trainwarden.runfolder import RunFolder\n"
        "folder = RunFolder('r', pathlib.Path(sys.argv[1]))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(folder.open_identity().run_uid, folder.token(create=True))\n"
    )
    for attempt in range(5):
        base = tmp_path / str(attempt)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = {child.communicate(timeout=30)[0] for child in children}
        assert len(answers) == 1
        assert "None" not in answers.pop()
        assert sorted(path.name for path in (base / "r").iterdir()) == ["run.json", "token"]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"run": 5}'])
def test_a_broken_identity_is_an_error_that_says_what_to_do(folder: RunFolder, data: bytes) -> None:
    folder.path.mkdir()
    (folder.path / "run.json").write_bytes(data)
    with pytest.raises(RunFolderError, match=r"run\.json.*restore it"):
        folder.open_identity()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_secrets_are_for_their_owner_whatever_the_umask(folder: RunFolder, umask: int) -> None:
    before = os.umask(umask)
    try:
        token = folder.token(create=True)
        plan_file = folder.write_plan(Plan(plan_id="p", run_uid="u", for_attempt=1))
        folder.write_ledger(Ledger(run_uid="u"))
    finally:
        os.umask(before)
    assert token is not None
    assert len(token) >= 32
    assert mode(folder.path / "token") == mode(plan_file) == mode(folder.path / "ledger.json") == 0o600
    assert folder.token(create=True) == folder.token() == token


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o666])
def test_a_token_that_others_could_read_or_replace_is_refused(folder: RunFolder, bits: int) -> None:
    folder.token(create=True)
    (folder.path / "token").chmod(bits)
    with pytest.raises(RunFolderError, match="chmod 600"):
        folder.token()


def test_an_empty_token_is_no_token(folder: RunFolder) -> None:
    write_whole(folder.path / "token", b"\n")
    with pytest.raises(RunFolderError, match="empty"):
        folder.token()


def test_attempts_and_journals_are_listed_in_the_order_they_were_lived(folder: RunFolder) -> None:
    def journal(attempt: int, start: str, rank: int, number: int, time: float) -> Path:
        path = folder.journal(attempt, start, rank) / f"{number:05}.ndjson"
        path.parent.mkdir(parents=True, exist_ok=True)
        header = Header(run_uid="u", run="r", attempt=attempt, start_id=start, rank=rank)
        lines = [header, Event(kind="start", time=time, seq=1)]
        path.write_bytes(b"".join(encode_line(line) + b"\n" for line in lines))
        return path

    tenth = journal(10, "s", 0, 1, 500.0)
    later = journal(2, "a-later", 0, 1, 300.0)
    earlier = [journal(2, "z-earlier", rank, number, 200.0) for rank in (0, 2, 10) for number in (1, 2)]
    os.utime(earlier[0], (900, 900))  # what a start was, not when its files were last touched
    for stray in ("attempt-²", "attempt-x", "attempt-", "other"):
        (folder.path / stray).mkdir()
    (folder.path / "attempt-7").touch()
    (folder.journal(2, "z-earlier", 0).parent / "rank-old").mkdir()
    assert folder.attempts() == [2, 10]
    assert list(folder.journal_files()) == [*earlier, later, tenth]
    assert list(folder.journal_files(rank=2)) == earlier[2:4]


def test_a_journal_with_a_torn_first_line_still_has_its_place(folder: RunFolder) -> None:
    path = folder.journal(0, "s", 0) / "00001.ndjson"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"schema": 1, "run_\xff')
    assert list(folder.journal_files()) == [path]


def written(folder: RunFolder, plan_id: str = "p", for_attempt: int = 1) -> Path:
    return folder.write_plan(Plan(plan_id=plan_id, run_uid=folder.open_identity().run_uid, for_attempt=for_attempt))


def test_plans_are_read_by_attempt(folder: RunFolder) -> None:
    for number in (10, 2, 1):
        written(folder, f"p{number}", number)
    accepted, refused = folder.read_plans()
    assert [plan.for_attempt for plan in accepted] == [1, 2, 10]
    assert refused == []


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o602, 0o660])
def test_a_plan_that_others_could_read_or_write_is_not_trusted(folder: RunFolder, bits: int) -> None:
    path = written(folder)
    path.chmod(bits)
    accepted, refused = folder.read_plans()
    assert accepted == []
    assert len(refused) == 1
    assert str(path) in refused[0]
    assert "0600" in refused[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_plan_of_another_user_is_not_trusted(folder: RunFolder) -> None:
    os.chown(written(folder), 12345, -1)
    accepted, refused = folder.read_plans()
    assert accepted == []
    assert "another user" in refused[0]


def test_a_plan_of_another_run_is_not_trusted(folder: RunFolder) -> None:
    folder.open_identity()
    folder.write_plan(Plan(plan_id="p", run_uid="somebody else's", for_attempt=1))
    accepted, refused = folder.read_plans()
    assert accepted == []
    assert "run_uid" in refused[0]


def test_a_plan_before_the_run_has_an_identity_is_not_trusted(folder: RunFolder) -> None:
    folder.write_plan(Plan(plan_id="p", run_uid="u", for_attempt=1))
    assert folder.read_plans()[0] == []


def test_a_plan_under_another_plan_s_name_is_not_trusted(folder: RunFolder) -> None:
    path = written(folder)
    path.rename(path.with_name("2-p.json"))
    accepted, refused = folder.read_plans()
    assert accepted == []
    assert "named for another plan" in refused[0]


def test_a_link_a_pipe_and_a_torn_file_are_each_refused_and_the_good_plan_is_still_read(folder: RunFolder) -> None:
    good = written(folder)
    (folder.plan_folder / "2-link.json").symlink_to(good)
    os.mkfifo(folder.plan_folder / "3-pipe.json", 0o600)
    write_whole(folder.plan_folder / "4-torn.json", good.read_bytes()[:40])
    accepted, refused = folder.read_plans()
    assert [plan.plan_id for plan in accepted] == ["p"]
    assert len(refused) == 3


def test_a_ledger_comes_back_as_it_was(folder: RunFolder) -> None:
    ledger = Ledger(
        run_uid="u", entries=[LedgerEntry(plan_id="p", for_attempt=1, target_step=4, skip_samples=[(0, 8)])]
    )
    folder.write_ledger(ledger)
    assert folder.ledger() == ledger


def test_a_file_is_for_its_owner_unless_said_otherwise(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "secret", b"x")
        write_whole(tmp_path / "public", b"x", 0o644)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "secret"), mode(tmp_path / "public")) == (0o600, 0o644)


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["run.json", "token", "ledger.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "noise"])
def test_what_is_no_file_of_ours_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    folder = RunFolder("run", tmp_path)
    path = folder.path / name
    folder.path.mkdir()
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path.write_bytes(b"\xff\xfe" * 20)
        path.chmod(0o600)
    read = {"run.json": folder.identity, "token": folder.token, "ledger.json": folder.ledger}[name]
    found: list[BaseException] = []

    def refuse() -> None:
        try:
            read()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    thread.join(5)
    assert len(found) == 1
    assert isinstance(found[0], RunFolderError | PlanError)
    assert str(path) in str(found[0])
