"""What the exporter allocates beside a training: the most at once, in a step in which every probe runs.

Torch's own allocator is asked, through its profiler: each allocation and each release on the training thread, those inside an
operator too. In the step that is measured the optimizer's own kernel is left out (a fused one copies what is not contiguous), so that
what is seen is the exporter's. Wanted: under 1 % of the
parameters' bytes plus 64 MiB. Each case runs twice: as on a CPU, and with the larger blocks that a device is worked on in, which is
more than on a device: there no block is copied to be summed in float64. The host memory that a CUDA device's values are copied into
is computed from how many there are.

    python bench/memory.py --output .bench/memory.json      # a minute, 2 GB of memory
    python bench/memory.py --parameters 2000000              # a small one
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainwarden.exporter import Exporter, measure
from trainwarden.exporter.staging import slots_for
from trainwarden.exporter.watched import Watched

#: Share of the parameters' bytes, and bytes beside it, that the exporter may take.
SHARE, BESIDE = 0.01, 64 * 2**20
MIB = 2**20
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True)


def large(count: int, dtype: torch.dtype, transposed: bool = False) -> nn.Module:
    """Return a model with half of its parameters in one embedding and the rest in eight layers."""
    width = 512
    rows = [count // 2 // width] + [count // 16 // width] * 8
    tensors = [torch.randn(row, width, dtype=dtype) * 0.02 for row in rows]
    return nn.ParameterList([nn.Parameter(tensor.t() if transposed else tensor) for tensor in tensors])


def tiny(count: int) -> nn.Module:
    """Return a model of 10,000 parameters."""
    return nn.ParameterList([nn.Parameter(torch.randn(max(1, count // 10_000)) * 0.02) for _ in range(10_000)])


def most(model: nn.Module, make: Optimizer, folder: Path, clip: bool) -> int:
    """Return the most bytes that were allocated at once in a due step, beyond what there was before it."""
    optimizer = make(model.parameters())
    exporter = Exporter(model, optimizer, run="memory", dir=folder, port=0, cadence=1, reader_seconds=0.0)

    def step() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exporter.step(1.0)

    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    step()  # the optimizer's state is made here
    nothing = mock.Mock(return_value=None)
    with (
        mock.patch("torch.optim.adam.adam", nothing),
        mock.patch("torch.optim.sgd.sgd", nothing),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        step()
    exporter.close()
    if exporter.notices:
        raise RuntimeError(f"the exporter was not well: {exporter.notices}")
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def pinned(model: nn.Module) -> int:
    """Return the bytes of host memory that one CUDA device's values are copied into."""
    watched = Watched(model, [])
    capacity = 16 * len(watched) + watched.blocks(16) + 1024
    return slots_for(capacity) * (capacity + 1) * 8


def main() -> int:
    """Measure each case and write the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters", type=int, default=50_000_000)
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--output", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    count = given.parameters
    cases: dict[str, tuple[Callable[[], nn.Module], Optimizer, bool]] = {
        "float32, AdamW": (lambda: large(count, torch.float32), adamw, False),
        "float32, AdamW, clipped": (lambda: large(count, torch.float32), adamw, True),
        "bfloat16, AdamW": (lambda: large(count, torch.bfloat16), adamw, False),
        "float32 transposed, AdamW": (lambda: large(count, torch.float32, transposed=True), adamw, False),
        "bfloat16, SGD with Nesterov": (lambda: large(count, torch.bfloat16), sgd, False),
        "10,000 parameters, AdamW": (lambda: tiny(count // 10), adamw, False),
    }
    found = []
    for name, (make_model, make, clip) in cases.items():
        if given.only not in name:
            continue
        for blocks in ("host", "device"):
            torch.manual_seed(0)
            model = make_model()
            size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
            block = measure.HOST_BLOCK if blocks == "host" else measure.DEVICE_BLOCK
            together = measure.SMALL if blocks == "host" else -1  # on a device small tensors are not laid end to end
            with (
                tempfile.TemporaryDirectory() as folder,
                mock.patch.multiple(measure, HOST_BLOCK=block, SMALL=together),
                mock.patch.multiple("trainwarden.exporter.probes.optimizer_state", HOST_BLOCK=block, SMALL=together),
            ):
                peak = most(model, make, Path(folder), clip)
            bound = SHARE * size + BESIDE
            row = {
                "case": name,
                "blocks": blocks,
                "parameter_bytes": size,
                "peak_bytes": peak,
                "pinned_bytes": pinned(model),
                "bound_bytes": bound,
                "within": max(peak, pinned(model)) <= bound,
            }
            found.append(row)
            print(
                f"{name + ', ' + blocks + ' blocks':48} {peak / MIB:7.1f} MiB at most, {pinned(model) / MIB:6.1f} MiB pinned on CUDA, "
                f"of {bound / MIB:6.1f} beside {size / MIB:6.1f} of parameters",
                flush=True,
            )
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(
            json.dumps({"torch": torch.__version__, "parameters": count, "cases": found}, indent=1) + "\n"
        )
    return 0 if all(row["within"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
