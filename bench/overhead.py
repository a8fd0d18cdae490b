"""What the exporter costs a training step: total time with it over total time without.

One model and one optimizer; blocks of one full cadence in turn without an exporter, with the default one, and with every probe
at every step. All arms of a round share one baseline, their order changes from round to round, and an exporter exists
only during its own blocks. Reported are the ratio of the totals (``_mid``) and the upper end of its 95 % bootstrap interval over
rounds; ``ratio_probed_step`` is a step with all probes over a step without any, in the default arm. ``cpu_`` ratios are of the
processor time of the whole process, the exporter's threads included: they tell more where other programs share the machine.

``--peers`` puts two other ways of watching beside it, each at every step: trainscope (``pip install trainscope``) as it comes, and a monitor
that asks for each parameter's norms with ``.item()``.

Torch gets all cores but one: on a host of GPUs the training thread never has them all either. ``--threads N`` with all of them is the
hardest case: whatever the exporter's own threads do is then taken from the mathematics.

Twenty rounds take about twenty minutes on two idle cores, with the peers well above half an hour. What is measured so far is written after each round,
with ``"partial": true`` until all rounds are done: a bench that is stopped, by ``--minutes`` or Ctrl-C, leaves it behind.

    python bench/overhead.py --output .bench/overhead.json
    python bench/overhead.py --peers --tokens 512 --output .bench/overhead_peers.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gpt import GPT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwarden.exporter import Exporter

CADENCE = 10
#: Threads of torch: one core stays free for what a trainer's process does beside its mathematics, as on a host of GPUs.
SPARED = max(1, (os.cpu_count() or 1) - 1)


class Watcher(Protocol):
    """What is attached to the training for one block. ``computed`` comes before the update, ``updated`` after it."""

    def computed(self, loss: Tensor) -> None: ...  # noqa: D102 - said above

    def updated(self, loss: Tensor, inputs: Tensor, labels: Tensor) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


#: Attaches a watcher to a model and its optimizer; the folder is where it may write.
Attach = Callable[[nn.Module, torch.optim.Optimizer, str], Watcher]


class Ours:
    """The exporter, costly probes at every ``cadence``-th step."""

    def __init__(self, cadence: int, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        self.exporter = Exporter(
            model, optimizer, run="bench", dir=folder, port=0, reader_seconds=0.0, cadence=cadence, preflight=False
        )

    def computed(self, loss: Tensor) -> None:
        """Nothing: hooks see what is to be seen."""

    def updated(self, loss: Tensor, inputs: Tensor, labels: Tensor) -> None:
        """Hand in batch and loss."""
        self.exporter.batch(inputs, labels)
        self.exporter.step(loss)

    def close(self) -> None:
        """End the record; a bench of an exporter that failed would measure nothing."""
        self.exporter.close()
        faults = [said for said in self.exporter.notices if "Error" in said]
        assert not faults, faults


ARMS: dict[str, Attach | None] = {"base": None, "default": partial(Ours, CADENCE), "full": partial(Ours, 1)}
#: Steps of a block; the first one, which is always probed, is not timed: exactly one timed step of the default arm is due.
BLOCK = CADENCE + 1
#: Steps before the first round: the first makes the optimizer's state, the next ones settle the allocator.
WARM_UP = 3


class Trainer:
    """A plain training loop with AdamW and clipping, on random tokens made beforehand."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers, width, vocabulary, length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1)
        self.batches = [torch.randint(0, vocabulary, (max(1, tokens // length), length + 1)) for _ in range(16)]
        self.count = 0

    def step(self, watcher: Watcher | None) -> None:
        """Make one step."""
        ids = self.batches[self.count % len(self.batches)]
        self.count += 1
        inputs, labels = ids[:, :-1], ids[:, 1:]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        if watcher is not None:
            watcher.computed(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if watcher is not None:
            watcher.updated(loss, inputs, labels)

    def block(self, attach: Attach | None, folder: str) -> tuple[list[float], float]:
        """Return the seconds of each timed step of one block, and the processor seconds of all of them together."""
        watcher = None if attach is None else attach(self.model, self.optimizer, folder)
        self.step(watcher)
        seconds = []
        began_cpu = time.process_time()
        for _ in range(BLOCK - 1):
            began = time.perf_counter()
            self.step(watcher)
            seconds.append(time.perf_counter() - began)
        if watcher is not None:
            watcher.close()
        return seconds, time.process_time() - began_cpu


class Spy(TorchDispatchMode):
    """Counts values that are read on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function).startswith("aten._local_scalar_dense")
        return function(*args, **(kwargs or {}))


def host_syncs(attach: Attach, folder: str, steps: int = 4) -> float:
    """Return how many values a step reads with a watcher, beyond those that it reads without."""
    counts = []
    for chosen in (None, attach):
        trainer = Trainer(layers=1, width=64, vocabulary=64, length=16, tokens=32)
        watcher = None if chosen is None else chosen(trainer.model, trainer.optimizer, folder)
        with Spy() as spy:
            for _ in range(steps):
                trainer.step(watcher)
        if watcher is not None:
            watcher.close()
        counts.append(spy.count)
    return (counts[1] - counts[0]) / steps


def interval(over: np.ndarray, under: np.ndarray, resamples: int = 4000) -> tuple[float, float]:
    """Return (ratio of totals, upper end of its 95 % bootstrap interval over rounds)."""
    picks = np.random.default_rng(0).integers(0, len(over), (resamples, len(over)))
    ratios = over[picks].sum(axis=1) / under[picks].sum(axis=1)
    return float(over.sum() / under.sum()), float(np.quantile(ratios, 0.975))


def summary(blocks: dict[str, list[tuple[list[float], float]]]) -> dict[str, Any]:
    """Return what the rounds so far show. ``blocks`` holds the seconds of each timed step and the processor seconds, by arm."""
    base = np.array([sum(seconds) for seconds, _ in blocks["base"]])
    base_cpu = np.array([cpu for _, cpu in blocks["base"]])
    found: dict[str, Any] = {}
    for arm in blocks:
        if arm == "base":
            continue
        totals = np.array([sum(seconds) for seconds, _ in blocks[arm]])
        found[f"ratio_{arm}_mid"], found[f"ratio_{arm}"] = interval(totals, base)
        cpu = np.array([cpu for _, cpu in blocks[arm]])
        found[f"cpu_ratio_{arm}_mid"], found[f"cpu_ratio_{arm}"] = interval(cpu, base_cpu)
    # Steps 2 to 11 of a block are timed; the tenth is due, and all others are not.
    probed = np.array([seconds[CADENCE - 2] for seconds, _ in blocks["default"]])
    found["ratio_probed_step"] = interval(probed, base / CADENCE)[0]
    found["seconds_per_step"] = float(base.mean() / CADENCE)
    found["rounds"] = len(base)
    return found


def measure(
    trainer: Trainer, arms: dict[str, Attach | None], rounds: int, end: float, folder: str
) -> Iterator[dict[str, Any]]:
    """Yield what all rounds so far show, after each of them. None is begun that would last beyond ``end`` (monotonic)."""
    blocks: dict[str, list[tuple[list[float], float]]] = {arm: [] for arm in arms}
    for _ in range(WARM_UP):
        trainer.step(None)
    names = list(arms)
    longest = 0.0
    for number in range(rounds):
        began = time.monotonic()
        if began + longest > end:
            break
        turn = names[number % len(names) :] + names[: number % len(names)]
        for arm in turn if number % 2 == 0 else turn[::-1]:
            blocks[arm].append(trainer.block(arms[arm], folder))
        longest = max(longest, time.monotonic() - began)
        yield summary(blocks)


def outlook(took: float, rounds: int, left: float) -> str:
    """Say how long it will last, after a first round of ``took`` seconds with ``left`` seconds to go.."""
    fit = 1 + int(left / took)
    says = f"{rounds} rounds of about {took:.0f} s: {max(1.0, took * rounds / 60):.0f} min"
    if fit >= rounds:
        return says
    return f"{says}, of which the budget allows about {fit} rounds; raise --minutes, or leave the machine idle, for all"


def write(output: Path | None, found: dict[str, Any]) -> None:
    """Replace the output, whole or not at all."""
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(output.name + ".writing")
    draft.write_text(json.dumps(found, indent=2) + "\n")
    draft.replace(output)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where to write the JSON, after each round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of one block an arm")
    parser.add_argument("--peers", action="store_true", help="measure two other ways of watching beside it")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no round that would end later than this")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--width", type=int, default=320, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=1024, help="of the model")
    parser.add_argument("--threads", type=int, default=SPARED, help="of torch; else one core is left free")
    options = parser.parse_args()
    for name in ("rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)} is not positive")
    return options


def main() -> None:
    """Measure, print and write."""
    options = parse()
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    end = began + 60 * options.minutes
    arms = dict(ARMS)
    if options.peers:
        from overhead_peers import PEERS

        arms |= PEERS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(options.layers, options.width, options.vocabulary, options.length, options.tokens)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(
            f"{parameters / 1e6:.1f} M parameters, {options.tokens} tokens a step, {torch.get_num_threads()} threads, on a machine "
            f"with {os.cpu_count()} cores and load {os.getloadavg()[0]:.1f}\n"
            f"{options.rounds} rounds of {len(arms)} blocks ({', '.join(arms)}) of {BLOCK} steps, {options.minutes:g} minutes at most; "
            f"the first round tells how long it takes",
            flush=True,
        )
        about: dict[str, Any] = {
            f"host_syncs_per_step{'' if arm == 'full' else '_' + arm}": host_syncs(attach, folder)
            for arm, attach in arms.items()
            if attach is not None and arm != "default"
        }
        about |= {
            "parameters": parameters,
            "tokens": options.tokens,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        turned = time.monotonic()
        try:
            for shown in measure(trainer, arms, options.rounds, end, folder):
                now = time.monotonic()
                found = {**shown, **about, "seconds": round(now - began, 1)}
                if shown["rounds"] < options.rounds:
                    found["partial"] = True
                write(options.output, found)
                ratios = f"default {shown['ratio_default_mid']:.3f}, full {shown['ratio_full_mid']:.3f} so far"
                print(f"round {shown['rounds']}/{options.rounds}: {now - turned:.1f} s; {ratios}", flush=True)
                if shown["rounds"] == 1:
                    print(outlook(now - turned, options.rounds, end - now), flush=True)
                turned = now
        except KeyboardInterrupt:
            print("interrupted")
    if not found or "partial" in found:
        print(f"stopped after {found.get('rounds', 0)} of {options.rounds} rounds: the result is partial")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
