"""The folder of a run: where everything of one run lies on disk, and who may read it.

``RUN`` is ``$TRAINWARDEN_DIR/<run>`` (default ``./.trainwarden/<run>``), shared by all ranks and the receiver::

    RUN/run.json                               run_uid and display name
    RUN/token                                  bearer token of the exporters' /api, mode 0600
    RUN/ledger.json                            executed plans, written by the receiver
    RUN/targets/rank-R.json                    address of each exporter, for Prometheus and the daemon, while it runs
    RUN/plans/<for_attempt>-<plan_id>.json     plans, written by the receiver, mode 0600
    RUN/attempt-N/START_ID/rank-R/00001.ndjson journals, written by the exporters
    RUN/quarantine/incident-ID/                damaged states, kept by exporters that were asked to; never resumed from

The receiver writes plans and the ledger, the exporters everything else; both only through this module.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from . import plan as plans

#: Lies in the folder of each quarantined checkpoint from before anything else does.
QUARANTINED = "QUARANTINED.json"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RunFolderError(ValueError):
    """A run folder that cannot be used as it is. The message names the path and says what to do."""


class RunIdentity(msgspec.Struct, frozen=True):
    """Contents of ``run.json``."""

    run_uid: str
    run: str


def base_folder() -> Path:
    """Return the folder that holds all runs: ``$TRAINWARDEN_DIR``, else ``./.trainwarden``."""
    return Path(os.environ.get("TRAINWARDEN_DIR") or ".trainwarden")


class RunFolder:
    """Paths and files of one run. Creating the object touches nothing on disk."""

    def __init__(self, run: str, base: Path | None = None) -> None:
        if not _NAME.fullmatch(run):
            raise RunFolderError(
                f"run name {run!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit, at most 128"
            )
        self.run = run
        self.path = (base or base_folder()) / run

    @property
    def plan_folder(self) -> Path:
        """Folder of the plan files."""
        return self.path / "plans"

    @property
    def quarantine_folder(self) -> Path:
        """Folder of the quarantined checkpoints."""
        return self.path / "quarantine"

    def journal(self, attempt: int, start_id: str, rank: int) -> Path:
        """Folder of one rank's journal files of one start."""
        return self.path / f"attempt-{attempt}" / start_id / f"rank-{rank}"

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts that left something on disk, ascending."""
        found = []
        if self.path.is_dir():
            for entry in self.path.iterdir():
                number = entry.name.removeprefix("attempt-")
                if entry.name != number and _is_number(number) and entry.is_dir():
                    found.append(int(number))
        return sorted(found)

    def journal_files(self, rank: int | None = None) -> Iterator[Path]:
        """Yield the journal files of all attempts, by attempt, then start folder's age, then rank, then number."""
        for attempt in self.attempts():
            folder = self.path / f"attempt-{attempt}"
            starts = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=_age)
            for start in starts:
                ranks = {
                    int(entry.name[5:]): entry
                    for entry in start.iterdir()
                    if entry.name.startswith("rank-") and _is_number(entry.name[5:])
                }
                for number in sorted(ranks):
                    if rank is None or rank == number:
                        yield from sorted(ranks[number].glob("*.ndjson"))

    def identity(self) -> RunIdentity | None:
        """Return the run's identity, or None before its first start.

        Raises:
            RunFolderError: ``run.json`` is there and cannot be read.
        """
        path = self.path / "run.json"
        try:
            return msgspec.json.decode(_read_file(path, RunFolderError), type=RunIdentity)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunFolderError(f"{path}: {error}; restore it, or move the folder away to begin a new run") from None

    def open_identity(self) -> RunIdentity:
        """Return the run's identity, minting a run_uid at the first start. Safe against two processes doing so at once."""
        found = self.identity()
        if found is not None:
            return found
        self.path.mkdir(parents=True, exist_ok=True)
        minted = RunIdentity(run_uid=str(uuid.uuid4()), run=self.run)
        draft = self.path / f".run.json.{os.getpid()}.{secrets.token_hex(4)}"
        draft.write_bytes(msgspec.json.encode(minted))
        try:
            os.link(draft, self.path / "run.json")  # fails if another process was first; rename would overwrite it
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        found = self.identity()
        assert found is not None
        return found

    def token(self, create: bool = False) -> str | None:
        """Return the bearer token of the exporters' API, generating it (mode 0600) where ``create`` says so.

        Raises:
            RunFolderError: other users could read the token, or the file is empty.
        """
        path = self.path / "token"
        if create and not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            draft = self.path / f".token.{os.getpid()}.{secrets.token_hex(4)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise RunFolderError(
                    f"{path}: other users can read it; chmod 600 it, or delete it to have a new one made"
                )
            token = _read_file(path, RunFolderError).decode("ascii").strip()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise RunFolderError(f"{path}: is no token; delete it to have a new one made") from None
        if not token:
            raise RunFolderError(f"{path}: is empty; delete it to have a new one made")
        return token

    def ledger(self) -> plans.Ledger | None:
        """Return the ledger, or None where no plan was ever executed.

        Raises:
            PlanError: it cannot be read.
        """
        path = self.path / "ledger.json"
        try:
            return plans.decode_ledger(_read_file(path, plans.PlanError), str(path))
        except FileNotFoundError:
            return None

    def write_ledger(self, ledger: plans.Ledger) -> None:
        """Replace the ledger, whole or not at all."""
        write_whole(self.path / "ledger.json", plans.encode(ledger))

    def write_plan(self, plan: plans.Plan) -> Path:
        """Write a plan file, whole or not at all, mode 0600, and return its path."""
        path = self.plan_folder / f"{plan.for_attempt}-{plan.plan_id}.json"
        write_whole(path, plans.encode(plan))
        return path

    def read_plans(self) -> tuple[list[plans.Plan], list[str]]:
        """Return the trustworthy plans, ascending by attempt, and one sentence for each file that was refused.

        A plan is trusted if its file belongs to this user or to root, nobody else can write it, its run_uid is this run's and
        its name agrees with its contents.
        """
        accepted: list[plans.Plan] = []
        refused: list[str] = []
        identity = self.identity()
        for path in sorted(self.plan_folder.glob("*.json")) if self.plan_folder.is_dir() else []:
            try:
                status, data = _read_plain(path)
                if status.st_uid not in (os.geteuid(), 0):
                    raise plans.PlanError(f"{path}: belongs to another user (uid {status.st_uid})")
                if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise plans.PlanError(f"{path}: mode {stat.S_IMODE(status.st_mode):o}, a plan must be 0600")
                plan = plans.decode_plan(data, str(path))
                if identity is None or plan.run_uid != identity.run_uid:
                    raise plans.PlanError(f"{path}: run_uid: {plan.run_uid} is not this run's")
                if path.name != f"{plan.for_attempt}-{plan.plan_id}.json":
                    raise plans.PlanError(f"{path}: is named for another plan than it holds")
                for target in (plan.target, *plan.fallback_targets):
                    if target is not None and in_quarantine(Path(target.path)):
                        raise plans.PlanError(f"{path}: target: {target.path} is a damaged state, kept in quarantine")
                accepted.append(plan)
            except (plans.PlanError, OSError) as error:
                refused.append(str(error))
        return sorted(accepted, key=lambda plan: plan.for_attempt), refused


def in_quarantine(path: Path) -> bool:
    """Say whether a path, its links followed, is part of a quarantined checkpoint: such a state is never resumed from.

    It is known by the file :data:`QUARANTINED` above it, so that a folder that was moved or copied is known, too.
    """
    try:
        real = path.resolve()
        return any((parent / QUARANTINED).is_file() for parent in (real, *real.parents))
    except (OSError, RuntimeError, ValueError):  # no path at all, or links that lead round in a circle
        return False


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that after a crash it holds either the old or the new contents. The umask applies to ``mode``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _read_file(path: Path, kind: type[Exception]) -> bytes:
    """Return what a file holds; raise ``kind`` where it is a folder, a device or a pipe, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise kind(f"{path}: is no plain file; move it away")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _read_plain(path: Path) -> tuple[os.stat_result, bytes]:
    """Return status and contents of one and the same file, which must be no link, device or pipe."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise plans.PlanError(f"{path}: is not a plain file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return os.fstat(file.fileno()), file.read()


def _age(path: Path) -> tuple[float, str]:
    """Order start folders by the time of their first journal line; the folder's own mtime moves with later writes."""
    times = [first.stat().st_mtime for first in path.glob("rank-*/00001.ndjson")]
    for first in sorted(path.glob("rank-*/00001.ndjson")):
        with first.open("rb") as file:
            for line in file:
                try:
                    raw = msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    break
                if isinstance(raw, dict) and isinstance(raw.get("time"), int | float):
                    return (float(raw["time"]), path.name)
    return (min(times, default=path.stat().st_mtime), path.name)
