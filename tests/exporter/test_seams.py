"""No call of the exporter's on the training thread waits on a lock, a socket, a file or a collective; and a planted one is caught."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.exporter.ranks.harness import run
from tests.exporter.runs import loss_of, make, train, watch
from tests.exporter.seams import Watch
from trainwarden.exporter import Exporter
from trainwarden.exporter.probes.probe import Closing, Probe

#: Steps before the watch begins: the first one records the start event and reads the plan.
BEFORE = 3


def test_no_step_waits_for_anything(tmp_path: Path) -> None:
    with Watch() as watching:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        exporter = watch(model, optimizer, tmp_path, cadence=2)
        train(model, optimizer, exporter, BEFORE)
        watching.caught.clear()
        for step in range(1, 20):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            exporter.batch(torch.ones(2, 4, dtype=torch.int64))
            exporter.step(loss * (float("nan") if step == 10 else 1.0))
            exporter.event("note", text="hello", value=loss.detach())
        found = list(watching.caught)
    exporter.close()
    assert found == []


def test_faults_wait_for_nothing_either(tmp_path: Path) -> None:
    class Broken(Probe):
        name = "broken"

        def close(self, closing: Closing) -> None:
            raise RuntimeError("a fault")

    with Watch() as watching:
        exporter, step = _started(tmp_path)
        watching.caught.clear()
        _plant(exporter, Broken())
        step()
        found = list(watching.caught)
    exporter.close()
    assert len(exporter.notices) == 1
    assert found == []


def _lock() -> None:
    with threading.Lock():
        pass


def _old_lock() -> None:
    OLD.acquire()
    OLD.release()


def _event() -> None:
    threading.Event().wait(0.001)


def _socket() -> None:
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 1))


def _collective() -> None:
    if dist.is_initialized():
        dist.barrier()
    else:
        dist.TCPStore("127.0.0.1", 0, 1, True).set("key", "value")


OLD = threading.RLock()


@pytest.mark.parametrize("planted", [_lock, _old_lock, _event, _socket, _collective, lambda: time.sleep(0.001)])
def test_a_planted_wait_is_caught(tmp_path: Path, planted: Any) -> None:
    class Waiting(Probe):
        name = "waiting"

        def close(self, closing: Closing) -> None:
            planted()

    with Watch() as watching:
        exporter, step = _started(tmp_path)
        watching.caught.clear()
        _plant(exporter, Waiting())
        step()
        found = list(watching.caught)
    exporter.close()
    assert found


def _started(folder: Path) -> tuple[Exporter, Any]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, folder)
    train(model, optimizer, exporter, BEFORE)
    return exporter, lambda: train(model, optimizer, exporter, 1)


def _plant(exporter: Exporter, probe: Probe) -> None:
    assert exporter._parts is not None
    exporter._parts.observer._probes.append(probe)


@pytest.mark.slow
def test_no_step_of_several_ranks_waits_for_anything(tmp_path: Path) -> None:
    body = """
    from tests.exporter.seams import Watch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    for name in ("ddp", "fsdp2"):
        with Watch() as watching:
            model = make()
            model = DistributedDataParallel(model) if name == "ddp" else fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            exporter = watch(model, optimizer, folder, run=name, cadence=2)
            for step in range(1, 31):
                if step == 4:
                    watching.caught.clear()
                optimizer.zero_grad()
                loss = loss_of(model, 10 * step + rank)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                exporter.step(loss)
            found = list(watching.caught)
        rounds = exporter._parts.side.rounds
        exporter.close()
        say(**{name: found, name + " rounds": rounds, name + " notices": exporter.notices})
    """
    for each in run(body, tmp_path, world=2):
        assert each.said["ddp"] == each.said["fsdp2"] == []
        assert each.said["ddp notices"] == each.said["fsdp2 notices"] == []
        assert each.said["ddp rounds"] + each.said["fsdp2 rounds"] > 0
