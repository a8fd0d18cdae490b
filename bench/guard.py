"""What the guard costs a training step on top of the exporter.

    python bench/guard.py

A model of ten million parameters and AdamW on one core; a step without the guard's work is the step less the time that its thread
spends in the guard, before and after each update. That is the processor time of the training thread alone, so that other programs on
the machine hardly matter; reported is the ratio of the totals over all steps. For a fused optimizer (a flag), the same with a bound that is
learnt, and for one that is not fused (copies).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from gpt import GPT
from torch import nn

from trainwarden.exporter import Exporter
from trainwarden.exporter.guard import Guard

LAYERS, WIDTH, VOCABULARY, LENGTH = 6, 320, 8192, 128
#: Steps that are not counted: they make the optimizer's state.
WARM_UP = 2

ARMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "found_inf": (True, {}),
    "found_inf with factor": (True, {"factor": 20.0}),
    "copies": (False, {}),
}


def ratio(fused: bool, guard: dict[str, Any], steps: int, batch: int, folder: str) -> float:
    """Return the time of some steps over the same without what the guard spent in them."""
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, VOCABULARY, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    exporter = Exporter(model, optimizer, run="cost", dir=folder, port=0, reader_seconds=0.0)
    timed = Guard(exporter, **guard)
    spent = 0.0

    def clocked(call: Any) -> Any:
        def wrapper(*arguments: Any) -> None:
            nonlocal spent
            began = time.thread_time()
            call(*arguments)
            spent += time.thread_time() - began

        return wrapper

    timed.before, timed.after = clocked(timed.before), clocked(timed.after)  # type: ignore[method-assign]
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH + 1))
    began = 0.0
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            began, spent = time.thread_time(), 0.0
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exporter.step(loss)
    whole = time.thread_time() - began
    exporter.close()
    return whole / (whole - spent)


def main() -> None:
    """Measure and print a line an arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (fused, guard) in ARMS.items():
            found = ratio(fused, guard, arguments.steps, arguments.batch, folder)
            print(f"{name}: {found:.4f}", flush=True)


if __name__ == "__main__":
    main()
