"""What a start event says about the run: model, optimizer, precision, versions, commit. Reads; never runs a program."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .identity import Identity
from .watched import Watched

#: What the names of torch's optimizers with two moments end in.
ADAMS = ("adam", "adamw", "adamax", "nadam", "radam")


def describe(
    identity: Identity, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], watched: Watched, scaler: Any
) -> dict[str, Any]:
    """Return the fields of the start event that are known when the exporter is attached."""
    inner: Any = model
    while type(inner).__name__ in (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "DataParallel",
        "Float16Module",
        "OptimizedModule",
    ):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", inner)
    betas = next(
        (group["betas"] for optimizer in optimizers for group in optimizer.param_groups if "betas" in group), None
    )
    if betas is not None and any(isinstance(beta, torch.Tensor) for beta in betas):
        betas = None  # on the device: the records have beta2
    types = Counter(str(parameter.dtype).removeprefix("torch.") for parameter in watched.params)
    return {
        "run_uid": identity.run_uid,
        "run": identity.run,
        "attempt": identity.attempt,
        "start_id": identity.start_id,
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "world_size": identity.world_size,
        "hostname": socket.gethostname(),
        "domain": domain(),
        "pid": os.getpid(),
        "model": type(inner).__name__,
        "parameters": sum(
            parameter.numel() for index, parameter in enumerate(watched.params) if index not in watched.stand_ins
        ),
        "optimizer": "+".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)),
        "betas": None if betas is None else [float(beta) for beta in betas],
        "beta2": None if betas is None else float(betas[1]),
        "precision": types.most_common(1)[0][0] if types else None,
        "optimizer_state_dtype": moments_dtype(optimizers),
        "loss_scaling": bool(scaler is not None and scaler.is_enabled()),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": nccl(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "commit": commit(),
    }


def moments_dtype(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return the precision of torch's Adam moments, or None where these optimizers have none.

    Before the first step they do not exist yet; they will be made in that of their parameters. The coarsest of several counts.
    """
    found: set[torch.dtype] = set()
    for optimizer in optimizers:
        if not (
            type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__.lower().endswith(ADAMS)
        ):
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                moment = optimizer.state.get(parameter, {}).get("exp_avg", parameter)
                if isinstance(moment, torch.Tensor) and moment.dtype.is_floating_point:
                    found.add(moment.dtype)
    if not found:
        return None
    return str(max(found, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")


def domain() -> str | None:
    """Return the part of the cluster that fails together, a rack or a switch, in which this host stands, where that is told.

    ``TRAINWARDEN_DOMAIN``, else what Slurm's topology plugin says of the node: the switches above it.
    """
    told = os.environ.get("TRAINWARDEN_DOMAIN")
    if told:
        return told
    switches, _, node = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    return switches or None if node else None


def nccl() -> str | None:
    """Return the version of NCCL that torch was built with, or None."""
    if torch.version.cuda is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    try:
        version: Any = torch.cuda.nccl.version
        found = version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def commit(start: Path | None = None) -> str | None:
    """Return the commit that the training script's folder is checked out at, read from git's files, or None."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    here = start or (Path(script).parent if script else Path.cwd())
    try:
        for folder in (here.absolute(), *here.absolute().parents):
            git = folder / ".git"
            if git.is_file():
                git = folder / git.read_text().removeprefix("gitdir:").strip()
            if git.is_dir():
                return _head(git)
    except OSError:
        return None
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head or None
    name = head.removeprefix("ref:").strip()
    common = git / "commondir"
    roots = [git, git / common.read_text().strip()] if common.is_file() else [git]
    for root in roots:
        if (root / name).is_file():
            return (root / name).read_text().strip() or None
        packed = root / "packed-refs"
        for line in packed.read_text().splitlines() if packed.is_file() else []:
            found, _, ref = line.partition(" ")
            if ref == name:
                return found
    return None
