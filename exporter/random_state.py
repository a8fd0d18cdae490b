"""The states of the global random number generators: taken, put back, and as plain tensors and numbers that a file can hold.

Those of torch on the CPU and on the CUDA devices of the run, of numpy's global generator, and of Python's. Generators that a
trainer or a data set made for itself are their own affair. A CUDA generator's state is a seed and an offset on the host: taking
it waits for no device. Nothing here is pickled but tensors, numbers and words, so ``weights_only`` loads it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

#: States of the generators: name to tensors, numbers and words.
States = dict[str, Any]


def capture(devices: Iterable[torch.device]) -> States:
    """Return the present states. ``devices`` are those that the run computes on."""
    version, numbers, gauss = random.getstate()
    states: States = {
        "torch": torch.get_rng_state(),
        "cuda": {},
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": None,
    }
    for device in devices:
        if device.type == "cuda":
            states["cuda"][int(device.index or 0)] = torch.cuda.get_rng_state(device)
    known: Any = np.random.get_state(legacy=False)
    if known["bit_generator"] == "MT19937":
        states["numpy"] = {
            "key": torch.from_numpy(known["state"]["key"].astype(np.int64)),
            "pos": int(known["state"]["pos"]),
            "has_gauss": int(known["has_gauss"]),
            "gauss": float(known["gauss"]),
        }
    return states


def restore(states: States) -> None:
    """Put states back that :func:`capture` returned; a CUDA device that is not there is passed over.

    Raises:
        KeyError, TypeError, RuntimeError: these are no such states.
    """
    torch.set_rng_state(states["torch"])
    for index, state in states["cuda"].items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)
    python = states["python"]
    numbers = tuple(int(number) for number in python["numbers"].numpy())
    random.setstate((python["version"], numbers, python["gauss"]))
    known = states["numpy"]
    if known is not None:
        key = known["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, known["pos"], known["has_gauss"], known["gauss"]))
