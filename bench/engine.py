"""How many records a second one core takes from a journal through the default pack to decisions, and in what memory.

A journal of ten signals a record is written, then replayed by a process of its own, as ``trainwarden replay`` does it. Reported are
records for each second of processor time (a machine that is busy with other things does not count), the same by the clock, and the
largest resident set of that process. A second, shorter pass says which phase takes which share.

    python bench/engine.py --output .bench/engine.json
    python bench/engine.py --records 100000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainwarden.record import Header, encode_line
from trainwarden.rules.collector import settle
from trainwarden.rules.core import feed as core_feed
from trainwarden.rules.core import judging
from trainwarden.rules.core.language import Evaluator
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay import journal
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.rulefiles import read_packs

#: What every record holds besides its step and time.
SIGNALS = (
    "loss",
    "grad_norm",
    "update_ratio",
    "lr",
    "clip_ratio",
    "optimizer_step",
    "step_duration_seconds",
    "tokens",
    "batch_unique_token_ratio",
    "batch_longest_repeat_tokens",
)
#: One spike in so many records, of this height and length.
SPIKE_EVERY, SPIKE, SPIKE_RECORDS = 50_000, 1.0, 12
WRITTEN_AT_ONCE = 20_000


def write_journal(path: Path, records: int, seed: int) -> None:
    """Write a run that declines with noise, and spikes now and then."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(encode_line(Header(run_uid="bench", run="bench", attempt=0, start_id="s0")) + b"\n")
        for first in range(1, records + 1, WRITTEN_AT_ONCE):
            steps = np.arange(first, min(first + WRITTEN_AT_ONCE, records + 1))
            noise = rng.standard_normal((5, len(steps)))
            spiking = steps % SPIKE_EVERY >= SPIKE_EVERY - SPIKE_RECORDS
            loss = 2.0 + 4.0 * np.exp(-steps / 30_000) + 0.02 * noise[0] + SPIKE * spiking
            norm = 0.3 * np.exp(0.1 * noise[1]) * np.where(spiking, 8.0, 1.0)
            table = zip(
                steps.tolist(),
                loss.tolist(),
                norm.tolist(),
                (1e-3 * np.exp(0.05 * noise[2])).tolist(),
                (0.4 + 0.01 * noise[3]).tolist(),
                (0.45 + 0.01 * noise[4]).tolist(),
                strict=True,
            )
            file.writelines(
                b'{"type":"step","seq":%d,"step":%d,"time":%.3f,"loss":%.6f,"grad_norm":%.6f,"update_ratio":%.8f,'
                b'"lr":0.0003,"clip_ratio":%.6f,"optimizer_step":%d,"step_duration_seconds":%.4f,"tokens":%d,'
                b'"batch_unique_token_ratio":%.5f,"batch_longest_repeat_tokens":%d,"samples":[[%d,%d]]}\n'
                % (step, step, 1.7e9 + step, x, g, u, g, step, d, 4096 * step, r, 3 + step % 7, 8 * step, 8 * step + 8)
                for step, x, g, u, d, r in table
            )


class Phases:
    """Processor time by phase. A phase that runs within another is taken off it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its time counted under ``name``."""

        def wrapped(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                took = time.process_time() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return wrapped

    def shares(self, total: float) -> dict[str, float]:
        """Return each phase's share of the whole; ``rest`` is reading, ordering and driving."""
        rest = total - sum(self.seconds.values())
        return {name: round(took / total, 3) for name, took in {**self.seconds, "rest": rest}.items()}


def watch_phases() -> Phases:
    """Put clocks around the phases: decoding, block building, rules, judgement."""
    phases = Phases()
    journal.decode_line = phases.timed("decode", journal.decode_line)  # type: ignore[attr-defined]
    judging.from_steps = phases.timed("blocks", judging.from_steps)  # type: ignore[attr-defined]
    Evaluator.feed = phases.timed("language", Evaluator.feed)  # type: ignore[method-assign]
    core_feed.judge = phases.timed("judgement", core_feed.judge)  # type: ignore[attr-defined]
    return phases


def replay(path: Path, phases: bool) -> dict[str, Any]:
    """Replay one journal in this process, and say what it took."""
    pack = read_packs(["default"])
    watched = watch_phases() if phases else None
    settle()  # as the command does
    began, clock = time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as spool:
        (recording,) = find_recordings([str(path)], sys.stdin.buffer, Path(spool))
        outcome = Replay(Settings(), pack).run(merged(recording))
    took = time.process_time() - began
    return {
        "records": outcome.records,
        "cpu_seconds": took,
        "wall_seconds": time.monotonic() - clock,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "incidents": len(outcome.incidents),
        "phases": watched.shares(took) if watched else {},
    }


def replay_apart(path: Path, *flags: str) -> dict[str, Any]:
    """Replay in a process of its own, so that memory and time are that of the engine alone."""
    done = subprocess.run([sys.executable, __file__, "--replay", str(path), *flags], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Write the journal, replay it, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phases", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay is not None:
        print(json.dumps(replay(options.replay, options.phases)))
        return
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder, "whole.ndjson"), Path(folder, "part.ndjson")
        write_journal(whole, options.records, options.seed)
        write_journal(part, min(options.records, 200_000), options.seed)
        size = whole.stat().st_size
        done, phases = replay_apart(whole), replay_apart(part, "--phases")
    found = {
        "records": done["records"],
        "signals": len(SIGNALS),
        "records_per_second": round(done["records"] / done["cpu_seconds"]),
        "records_per_second_wall": round(done["records"] / done["wall_seconds"]),
        "rss_mb": round(done["rss_bytes"] / 1e6, 1),
        "journal_mb": round(size / 1e6, 1),
        "incidents": done["incidents"],
        "phases": phases["phases"],
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(json.dumps(found, indent=2))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
