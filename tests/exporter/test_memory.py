"""What the exporter allocates beside a training is bounded, whatever the model is like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cases.registry import case
from trainwarden.exporter.measure import DEVICE_BLOCK, blocks, flat, foreach_norm
from trainwarden.exporter.probes.update_applied import SAMPLE, SAMPLES, stride_of
from trainwarden.exporter.staging import LEAST_SLOTS, SLOT_BYTES, SLOTS, slots_for


@case("D15")
@pytest.mark.slow
def test_in_a_step_with_every_probe_the_most_at_once_is_under_a_hundredth_of_the_parameters_and_64_mib(
    tmp_path: Path,
) -> None:
    output = tmp_path / "memory.json"
    command = [sys.executable, "bench/memory.py", "--parameters", "8000000", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(output.read_text())["cases"]
    assert len(cases) == 12
    for one in cases:
        assert 0 < one["peak_bytes"] <= one["bound_bytes"]
        if one["blocks"] == "host":
            most = 32 if one["case"].startswith("10,000") else 16
            assert one["peak_bytes"] < most * 2**20, one


def test_what_is_not_contiguous_but_dense_is_read_without_a_copy() -> None:
    for tensor in (
        torch.randn(5, 7).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 1, 4).transpose(0, 1),
        torch.randn(()),
        torch.randn(4),
    ):
        elements = flat(tensor)
        assert elements.data_ptr() == tensor.data_ptr()
        assert torch.equal(elements.sort().values, tensor.reshape(-1).sort().values)
    for tensor in (torch.randn(5, 7)[:, ::2], torch.randn(5).expand(3, 5), torch.randn(0, 3).t()):
        assert torch.equal(flat(tensor), tensor.reshape(-1))


def test_elements_of_one_place_stay_together_where_layouts_differ() -> None:
    plain = torch.arange(35.0).view(5, 7)
    for other in (plain.clone(), plain.t().contiguous().t()):
        for parts in blocks({"one": plain.t(), "other": other.t()}):
            assert torch.equal(parts["one"], parts["other"])


def test_samples_and_slots_are_bounded_however_many_parameters_there_are() -> None:
    for count in (1, 100, 10_000, 1_000_000):
        sample = min(SAMPLE, max(1, SAMPLES // count))
        for shape in ((2047,), (4096, 4096), (3, 5, 7), (1,)):
            tensor = torch.empty(shape, device="meta")
            assert -(-tensor.numel() // stride_of(tensor, sample)) <= sample
        capacity = 16 * count + 1024
        slots = slots_for(capacity)
        assert LEAST_SLOTS <= slots <= SLOTS
        assert slots == LEAST_SLOTS or slots * capacity * 8 <= SLOT_BYTES
    assert slots_for(16 * 300 + 1024) == SLOTS
    assert DEVICE_BLOCK * 4 == 16 * 2**20  # bytes of one block in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("power", [-30, -22, 0, 22, 30])
def test_a_norm_of_a_large_tensor_neither_overflows_nor_vanishes(dtype: torch.dtype, power: int) -> None:
    drawn = torch.randn(3, 400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tensor = (drawn * 10.0**power).to(dtype)
    for laid_out in (tensor, tensor.t()):
        (found,) = foreach_norm([laid_out])
        assert found.dtype is torch.float64
        assert float(found) == pytest.approx(float(tensor.double().norm()), rel=1e-12)
