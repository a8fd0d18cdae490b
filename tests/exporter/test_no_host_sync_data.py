"""What is said about batches reads no value on the training thread either: fingerprint, classes of tokens, documents, sources."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.exporter.test_no_host_sync import Spy
from trainwarden.exporter.probes.fingerprint import Fingerprint
from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.probes.sources import Sources
from trainwarden.exporter.sheet import Sheet
from trainwarden.exporter.staging import Staging
from trainwarden.exporter.vocabulary import TokenClasses

SAID: dict[str, Any] = {
    "labels": torch.zeros(4, 9, dtype=torch.int64),
    "attention_mask": torch.ones(4, 9, dtype=torch.int64),
    "loss_mask": torch.ones(4, 9),
    "position_ids": torch.arange(9).expand(1, 9),
    "cu_seqlens": torch.tensor([0, 9, 18, 36]),
    "seq_idx": torch.zeros(4, 9, dtype=torch.int32),
    "source": torch.tensor([0, 1, 1, 99]),
}


def probes(device: str) -> list[Probe]:
    classes = TokenClasses({"digit": range(10), "padding": 0})
    return [Fingerprint(classes, [torch.device(device)]), Sources()]


def closing(device: str, *names: str) -> Closing:
    ids = torch.randint(-5, 90, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids.to(device), **{name: SAID[name].to(device) for name in (*names, "source")}}
    losses = torch.rand(4).to(device)
    watched = SimpleNamespace(vocabulary=64)
    return Closing(Sheet(), cast(Any, watched), losses, None, [batch])


@pytest.mark.parametrize("said", [*SAID, "nothing"])
def test_no_value_is_read_whatever_a_batch_says(said: str) -> None:
    names = () if said == "nothing" else (said,)
    on_meta = closing("meta", *names)
    for probe in probes("meta"):
        probe.close(on_meta)  # reading a value there raises
    here = closing("cpu", *names)
    ready = probes("cpu")
    with Spy() as spy:
        for probe in ready:
            probe.close(here)
    assert spy.seen == []
    assert {name for name, _, _ in here.sheet.tensors} == {name for name, _, _ in on_meta.sheet.tensors}
    assert {"batch.classes", "batch.distinct", "sources.counts", "sources.sums"} <= {
        name for name, _, _ in here.sheet.tensors
    }


def test_many_micro_batches_fit_the_room_that_a_step_has() -> None:
    batches = [closing("cpu", "attention_mask", "labels").batches[0] for _ in range(300)]
    many = Closing(Sheet(), cast(Any, SimpleNamespace(vocabulary=64)), 1.0, None, batches)
    for probe in probes("cpu"):
        probe.close(many)
    assert sum(tensor.numel() for _, _, tensor in many.sheet.tensors) < 64, (
        "of 1,024 numbers beside those of parameters"
    )
    assert Staging(set(), 1024).send(many.sheet) is not None
