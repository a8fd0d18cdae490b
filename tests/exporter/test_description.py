"""What a start event says of the machine: what fails together, and with what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.exporter.runs import events, make, watch
from trainwarden.exporter.description import domain, nccl


@pytest.mark.parametrize(
    ("told", "slurm", "expected"),
    [
        ("rack-7", "s0.s1.n12", "rack-7"),
        ("", "s0.s1.n12", "s0.s1"),
        ("", "n12", None),
        ("", "", None),
    ],
)
def test_the_domain_is_what_the_operator_says_or_the_switches_above_the_node(
    monkeypatch: pytest.MonkeyPatch, told: str, slurm: str, expected: str | None
) -> None:
    monkeypatch.setenv("TRAINWARDEN_DOMAIN", told)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", slurm)
    assert domain() == expected


def test_the_start_event_names_host_domain_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWARDEN_DOMAIN", "rack-7")
    model = make()
    exporter = watch(model, torch.optim.AdamW(model.parameters(), lr=1e-2), tmp_path)
    exporter.step(1.0)
    exporter.close()
    fields = events(tmp_path)[0].fields
    assert fields["hostname"]
    assert fields["domain"] == "rack-7"
    assert fields["torch"] == torch.__version__
    assert (fields["cuda"], fields["nccl"]) == (torch.version.cuda, nccl())
