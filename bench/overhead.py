"""What the exporter costs a training step: total time with it over total time without.

One model and one optimizer; blocks of one full cadence in turn without an exporter, with the default one, and with every probe
at every step. All arms of a round share one baseline, their order changes from round to round, and an exporter exists
only during its own blocks. Reported are the ratio of the totals (``_mid``) and the upper end of its 95 % bootstrap interval over
rounds; ``ratio_probed_step`` is a step with all probes over a step without any, in the default arm.

Twenty rounds take under ten minutes on two idle cores. What is measured so far is written after each round, with ``"partial": true``
until all rounds are done: a bench that is stopped, by ``--minutes`` or Ctrl-C, leaves it behind.

    python bench/overhead.py --output .bench/overhead.json
    python bench/overhead.py --tokens 2048 --rounds 30
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwarden.exporter import Exporter

CADENCE = 10
ARMS: dict[str, dict[str, Any] | None] = {"base": None, "default": {"cadence": CADENCE}, "full": {"cadence": 1}}
#: Steps of a block; the first one, which is always probed, is not timed: exactly one timed step of the default arm is due.
BLOCK = CADENCE + 1
#: Steps before the first round: the first makes the optimizer's state, the next ones settle the allocator.
WARM_UP = 3


class Layer(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.qkv_proj(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A GPT of about ten million parameters with the default sizes."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Layer(width, max(1, width // 64)) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of (batch, tokens) ids."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = layer(x)
        out: torch.Tensor = self.lm_head(self.ln_f(x))
        return out


class Trainer:
    """A plain training loop with AdamW and clipping, on random tokens made beforehand."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers, width, vocabulary, length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1)
        self.batches = [torch.randint(0, vocabulary, (max(1, tokens // length), length + 1)) for _ in range(16)]
        self.count = 0

    def step(self, exporter: Exporter | None) -> None:
        """Make one step."""
        ids = self.batches[self.count % len(self.batches)]
        self.count += 1
        inputs, labels = ids[:, :-1], ids[:, 1:]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if exporter is not None:
            exporter.batch(inputs, labels)
            exporter.step(loss)

    def block(self, settings: dict[str, Any] | None, folder: str) -> list[float]:
        """Return the seconds of each timed step of one block."""
        exporter = None
        if settings is not None:
            exporter = Exporter(
                self.model, self.optimizer, run="bench", dir=folder, port=0, reader_seconds=0.0, **settings
            )
        self.step(exporter)
        seconds = []
        for _ in range(BLOCK - 1):
            began = time.perf_counter()
            self.step(exporter)
            seconds.append(time.perf_counter() - began)
        if exporter is not None:
            exporter.close()
            assert not exporter.notices, exporter.notices
        return seconds


class Spy(TorchDispatchMode):
    """Counts values that are read on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function).startswith("aten._local_scalar_dense")
        return function(*args, **(kwargs or {}))


def host_syncs(folder: str, steps: int = 4) -> float:
    """Return how many values a step reads with every probe on, beyond those that it reads without the exporter."""
    counts = []
    for settings in (None, ARMS["full"]):
        trainer = Trainer(layers=1, width=64, vocabulary=64, length=16, tokens=32)
        exporter = None
        if settings is not None:
            exporter = Exporter(trainer.model, trainer.optimizer, run="syncs", dir=folder, port=0, **settings)
        with Spy() as spy:
            for _ in range(steps):
                trainer.step(exporter)
        if exporter is not None:
            exporter.close()
        counts.append(spy.count)
    return (counts[1] - counts[0]) / steps


def interval(over: np.ndarray, under: np.ndarray, resamples: int = 4000) -> tuple[float, float]:
    """Return (ratio of totals, upper end of its 95 % bootstrap interval over rounds)."""
    picks = np.random.default_rng(0).integers(0, len(over), (resamples, len(over)))
    ratios = over[picks].sum(axis=1) / under[picks].sum(axis=1)
    return float(over.sum() / under.sum()), float(np.quantile(ratios, 0.975))


def summary(seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return what the rounds so far show. ``seconds`` holds the seconds of each timed step, by arm and block."""
    base = np.array([sum(block) for block in seconds["base"]])
    found: dict[str, Any] = {}
    for arm in ("default", "full"):
        totals = np.array([sum(block) for block in seconds[arm]])
        found[f"ratio_{arm}_mid"], found[f"ratio_{arm}"] = interval(totals, base)
    # Steps 2 to 11 of a block are timed; the tenth is due, and all others are not.
    probed = np.array([block[CADENCE - 2] for block in seconds["default"]])
    found["ratio_probed_step"] = interval(probed, base / CADENCE)[0]
    found["seconds_per_step"] = float(base.mean() / CADENCE)
    found["rounds"] = len(base)
    return found


def measure(trainer: Trainer, rounds: int, end: float, folder: str) -> Iterator[dict[str, Any]]:
    """Yield what all rounds so far show, after each of them. None is begun that would last beyond ``end`` (monotonic)."""
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for _ in range(WARM_UP):
        trainer.step(None)
    names = list(ARMS)
    longest = 0.0
    for number in range(rounds):
        began = time.monotonic()
        if began + longest > end:
            break
        turn = names[number % len(names) :] + names[: number % len(names)]
        for arm in turn if number % 2 == 0 else turn[::-1]:
            seconds[arm].append(trainer.block(ARMS[arm], folder))
        longest = max(longest, time.monotonic() - began)
        yield summary(seconds)


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
    parser.add_argument("--minutes", type=float, default=15.0, help="begin no round that would end later than this")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--width", type=int, default=320, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=1024, help="of the model")
    parser.add_argument("--threads", type=int, help="of torch; None: as torch chooses")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is not positive")
    return options


def main() -> None:
    """Measure, print and write."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    began = time.monotonic()
    end = began + 60 * options.minutes
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(options.layers, options.width, options.vocabulary, options.length, options.tokens)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(
            f"{parameters / 1e6:.1f} M parameters, {options.tokens} tokens a step, {torch.get_num_threads()} threads, on a machine "
            f"with {os.cpu_count()} cores and load {os.getloadavg()[0]:.1f}\n"
            f"{options.rounds} rounds of {len(ARMS)} blocks ({', '.join(ARMS)}) of {BLOCK} steps, {options.minutes:g} minutes at most; "
            f"the first round tells how long it takes",
            flush=True,
        )
        syncs = host_syncs(folder)
        about = {
            "host_syncs_per_step": int(syncs) if syncs == int(syncs) else syncs,
            "parameters": parameters,
            "tokens": options.tokens,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        turned = time.monotonic()
        try:
            for shown in measure(trainer, options.rounds, end, folder):
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
