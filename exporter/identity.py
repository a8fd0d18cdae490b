"""Who a start is: run_uid, attempt and start_id, chosen by rank 0 and shared through the process group's store.

The attempt is the fence for actions: it never goes down. A launch that is restarted in place (torchrun after a worker
died, the same Slurm job and restart count) keeps its attempt and gets a new start_id.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from trainwarden.runfolder import RunFolder, RunFolderError, write_whole

from .notices import Notices

#: How long the other ranks wait for what rank 0 chose.
SHARE_SECONDS = 60.0
_shared = count()


@dataclass(frozen=True, slots=True)
class Identity:
    """One start of one rank."""

    run_uid: str
    run: str
    attempt: int
    start_id: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def _number(*names: str) -> int | None:
    """Return the first of some environment variables that is a whole number."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def launch() -> str | None:
    """Return a name of the launch that a restart in place keeps, or None where nothing tells.

    torchrun's default run id ("none") is no name: the agent process, which outlives its workers, stands in for it.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        return f"slurm {job} {os.environ.get('SLURM_RESTART_COUNT', '0')}"
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic is None:
        return None
    return f"torchrun {elastic}" if elastic != "none" else f"torchrun {socket.gethostname()} {_parent()}"


def _parent() -> str:
    """Return the parent process as its number and start time, which together are never used again on a host."""
    parent = os.getppid()
    try:
        stat = Path(f"/proc/{parent}/stat").read_text()
        return f"{parent} {stat.rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return str(parent)


def next_attempt(folder: RunFolder, notices: Notices) -> int:
    """Return the attempt of a start that begins now, by reading alone.

    ``TRAINWARDEN_ATTEMPT`` where that is not lower than an attempt that exists; the newest attempt again for the same
    launch; else one more than the newest, 0 in an empty folder.
    """
    name = launch()
    known = folder.attempts()
    newest = known[-1] if known else -1
    given = _number("TRAINWARDEN_ATTEMPT")
    if given is not None:
        if given < newest:
            notices.say("attempt", f"TRAINWARDEN_ATTEMPT is {given}, but attempt {newest} exists: going on as {newest}")
        return max(given, newest)
    if known and name is not None and _launch_of(folder, newest) == name:
        return newest
    return newest + 1


def choose_attempt(folder: RunFolder, notices: Notices) -> int:
    """Return :func:`next_attempt`, and leave the attempt's folder behind with the launch that it belongs to."""
    attempt = next_attempt(folder, notices)
    write_whole(folder.path / f"attempt-{attempt}" / "launch.json", msgspec.json.encode({"launch": launch()}))
    return attempt


def _launch_of(folder: RunFolder, attempt: int) -> str | None:
    try:
        found: Any = msgspec.json.decode((folder.path / f"attempt-{attempt}" / "launch.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return found.get("launch") if isinstance(found, dict) else None


def choose(folder: RunFolder, notices: Notices) -> Identity:
    """Choose for all ranks. A folder that cannot be used costs the journal and the plans, not the run."""
    try:
        known = folder.open_identity()
        return Identity(known.run_uid, known.run, choose_attempt(folder, notices), str(uuid.uuid4()))
    except (OSError, RunFolderError) as error:
        notices.fault(f"run folder {folder.path}", error)
        return Identity(str(uuid.uuid4()), folder.run, _number("TRAINWARDEN_ATTEMPT") or 0, str(uuid.uuid4()))


def establish(folder: RunFolder, notices: Notices) -> Identity:
    """Return the identity of this rank's start. With a process group, every rank must call this."""
    local_rank = _number("LOCAL_RANK", "SLURM_LOCALID") or 0
    if not (dist.is_available() and dist.is_initialized()):
        world = _number("WORLD_SIZE") or 1
        if world > 1:
            notices.say(
                "process group",
                f"WORLD_SIZE is {world}, but torch.distributed is not initialised: make the Exporter after "
                "init_process_group, or the ranks have different start_ids",
            )
            return replace(choose(folder, notices), rank=_number("RANK") or 0, local_rank=local_rank, world_size=world)
        return replace(choose(folder, notices), local_rank=local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return replace(choose(folder, notices), local_rank=local_rank)
    store = dist.distributed_c10d._get_default_store()
    key = f"trainwarden/{folder.run}/{next(_shared)}"
    if rank == 0:
        chosen = choose(folder, notices)
        store.set(key, msgspec.json.encode(asdict(chosen)).decode())
    else:
        store.wait([key], timedelta(seconds=SHARE_SECONDS))
        chosen = Identity(**msgspec.json.decode(store.get(key)))
    return replace(chosen, rank=rank, local_rank=local_rank, world_size=world)
