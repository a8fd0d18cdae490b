"""Faults planted into real training runs: whether each is seen, what is said to have caused it, and whether a rollback mends it.

A GPT of 84,000 parameters learns the standard library's sources for 400 steps, watched by the exporter; ``bench/faulty`` holds the
kinds of faults, whose places and sizes the seed draws. What the default rules and the judgement say of the records is compared with what was
planted. Runs of the kinds that a rollback can mend are made once more under a supervisor, a daemon and a receiver that act over HTTP. Healthy runs
of several kinds must bring no page and no action; one of them is the reference, made three times in different orders for the spread
of clean runs.

Harmful is measured: a held-out loss 2 % above that of the reference of the same seed, one that is not finite, or a run that hung.

    python bench/faults.py --seeds 1 --output .bench/faults.json
    python bench/faults.py --kinds dirty_binary lr_jump plain          # some of them
    python bench/faults.py --list

Runs, references included, are kept under ``.bench/faults``; references are made once a seed. What is measured so far is written after each
run, with ``"partial": true`` until all are done: a bench that is stopped leaves it behind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from faulty.acting import treat
from faulty.fault import SCALE
from faulty.judge import POLICY, judge
from faulty.kinds import KINDS
from faulty.rows import figures, row_of, spread, treated_row
from faulty.runs import RunError, lay_out, run

#: Clean runs a seed that tell the spread of the held-out loss: the reference, and others in another order.
SPREAD = 3
CACHE = Path(".bench/faults")


class Bench:
    """All runs of one call, and what is known of them."""

    def __init__(self, seeds: list[int], kinds: list[str], options: argparse.Namespace) -> None:
        self.seeds, self.kinds, self.options = seeds, kinds, options
        self.rows: list[dict[str, Any]] = []
        self.recovered: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.begun = time.monotonic()

    def references(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return held-out losses of the references, made now or before, by kind and seed; of ``plain`` also other orders."""
        wanted = {
            (KINDS[kind].reference, seed) for kind in self.kinds for seed in self.seeds if not KINDS[kind].healthy
        }
        wanted |= {(kind, seed) for kind in self.kinds for seed in self.seeds if KINDS[kind].healthy}
        if any(KINDS[kind].recoverable for kind in self.kinds) and self.options.act:
            wanted |= {("plain", 1000 * seed + turn) for seed in self.seeds for turn in range(1, SPREAD)}
        return dict(self._at_once(sorted(wanted), self._reference))

    def _reference(self, one: tuple[str, int]) -> tuple[tuple[str, int], dict[str, Any]]:
        kind, seed = one
        folder = self.options.cache / f"seed-{seed}" / kind
        return one, self._trained(kind, seed, folder, again=False)

    def _trained(self, kind: str, seed: int, folder: Path, *, again: bool) -> dict[str, Any]:
        """Return how a run ended, made now, or where not ``again`` by an earlier call with the same program."""
        known = folder / "ended.json"
        key = {"code": _code(kind), "torch": torch.__version__}
        if known.exists() and not again:
            found: dict[str, Any] = json.loads(known.read_text())
            if found["key"] == key:
                return found
        job = lay_out(kind, seed, folder)
        ended = run(job)
        found = {"loss": ended.loss, "hung": ended.hung, "seconds": ended.seconds, "values": job.values, "key": key}
        known.write_text(json.dumps(found))
        return found

    @staticmethod
    def _needs(one: tuple[str, int]) -> tuple[str, int]:
        kind, seed = one
        return one if KINDS[kind].healthy else (KINDS[kind].reference, seed)

    def watch(self, one: tuple[str, int], references: dict[tuple[str, int], dict[str, Any]]) -> None:
        """Make one run and judge its records."""
        kind, seed = one
        of = KINDS[kind]
        folder = self.options.cache / f"seed-{seed}" / kind
        if of.healthy:
            ended = references[one]
            clean = ended["loss"]
        else:
            ended = self._trained(kind, seed, folder, again=not self.options.recorded)
            clean = references[of.reference, seed]["loss"]
        self.rows.append(row_of(kind, seed, ended["values"], ended, clean, judge(folder / "runs" / kind)))
        self._tell(self.rows[-1])
        self._tidy(folder)

    def act(self, one: tuple[str, int], references: dict[tuple[str, int], dict[str, Any]]) -> None:
        """Make one run under those that act."""
        kind, seed = one
        folder = self.options.cache / f"seed-{seed}" / f"{kind}-treated"
        clean = references[KINDS[kind].reference, seed]["loss"]
        orders = [clean, *(references["plain", 1000 * seed + turn]["loss"] for turn in range(1, SPREAD))]
        harm = next((row["change"] for row in self.rows if (row["kind"], row["seed"]) == one), None)
        treated = treat(lay_out(kind, seed, folder))
        off = spread(orders) if KINDS[kind].reference == "plain" else 0.0
        self.recovered.append(treated_row(kind, seed, treated, clean, off, harm))
        row = self.recovered[-1]
        change = "not finite" if row["change"] is None else f"{row['change']:+.1%}"
        print(
            f"  {kind:20} treated: {change:>10} of the clean loss, {row['rollbacks']} rollbacks to {row['targets']}, "
            f"{row['approved']} approved, {'recovered' if row['recovered'] else 'NOT RECOVERED'} ({row['seconds']} s)",
            flush=True,
        )
        self._tidy(folder)

    def _tidy(self, folder: Path) -> None:
        if not self.options.keep:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _tell(self, row: dict[str, Any]) -> None:
        if KINDS[row["kind"]].healthy:
            print(
                f"  {row['kind']:20} healthy: {row['pages']} pages, {row['actions']} actions ({row['seconds']} s)",
                flush=True,
            )
            return
        change = "hung" if row["hung"] else "not finite" if row["change"] is None else f"{row['change']:+.1%}"
        found = row["found"]
        said = "nothing" if found is None else f"{found['verdict']}, {found['cause']} {found['confidence']:.2f}"
        right = "right" if row["top1"] else "" if found is None else f"(wanted {', '.join(row['expected'])})"
        print(f"  {row['kind']:20} {change:>10}: {said} {right} ({row['seconds']} s)", flush=True)

    def _at_once(self, items: list[Any], work: Any) -> Iterator[Any]:
        """Yield what work gives of each item, several at once; what fails is said and left out."""
        pool = ThreadPoolExecutor(self.options.workers)
        try:
            open_: dict[Future[Any], Any] = {pool.submit(work, item): item for item in items}
            while open_:
                done, _ = wait(open_, return_when=FIRST_COMPLETED)
                for one in done:
                    item = open_.pop(one)
                    try:
                        yield one.result()
                    except RunError as error:
                        self.failed.append(f"{item}: {error}")
                        print(f"  {item}: {error}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def run(self) -> int:
        """Make all runs; write after each of them."""
        references = self.references()
        runs = [(kind, seed) for seed in self.seeds for kind in self.kinds]
        runs = [one for one in runs if self._needs(one) in references]  # what failed is said already
        try:
            for _ in self._at_once(runs, lambda one: self.watch(one, references)):
                self.write(partial=True)
            acting = [one for one in runs if KINDS[one[0]].recoverable] if self.options.act else []
            for _ in self._at_once(acting, lambda one: self.act(one, references)):
                self.write(partial=True)
        except KeyboardInterrupt:
            self.write(partial=True)
            print("interrupted; what was measured is written", file=sys.stderr)
            return 130
        self.write(partial=False)
        return 1 if self.failed else 0

    def write(self, *, partial: bool) -> None:
        """Write the figures and the rows so far."""
        result = {
            **({"partial": True} if partial else {}),
            **figures(self.rows, self.recovered),
            "seeds": self.seeds,
            "steps": SCALE.steps,
            "policy": POLICY,
            "scale": asdict(SCALE),
            "seconds": round(time.monotonic() - self.begun, 1),
            "workers": self.options.workers,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "failed": self.failed,
            "kinds": sorted(self.rows, key=lambda row: (row["seed"], list(KINDS).index(row["kind"]))),
            "treated_runs": self.recovered,
        }
        path: Path = self.options.output
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".writing")
        draft.write_text(json.dumps(result, indent=1) + "\n")
        draft.replace(path)


def _code(kind: str) -> int:
    """Return what tells whether a run was made by the same program: that of training, and the kind's own file."""
    own = Path(sys.modules[KINDS[kind].__module__].__file__ or "")
    folder = Path(__file__).parent / "faulty"
    files = [folder / name for name in ("train.py", "texts.py", "fault.py")] + [own]
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (1)")
    parser.add_argument("--seed", type=int, default=1, help="the first of them (1)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help="some kinds; all by default")
    parser.add_argument("--list", action="store_true", help="list the kinds and end")
    parser.add_argument("--output", type=Path, default=Path(".bench/faults.json"))
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder of the runs and the references (.bench/faults)"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at once, one thread each (2)")
    parser.add_argument(
        "--no-act", dest="act", action="store_false", help="leave out the runs with daemon and receiver"
    )
    parser.add_argument(
        "--recorded", action="store_true", help="judge runs again that were made before, and train the others"
    )
    parser.add_argument("--keep", action="store_true", help="keep checkpoints")
    options = parser.parse_args()
    if options.list:
        for name, kind in KINDS.items():
            print(f"{name:20} {'healthy' if kind.healthy else ', '.join(kind.causes):24} {kind.says}")
        return 0
    seeds = list(range(options.seed, options.seed + options.seeds))
    return Bench(seeds, options.kinds or list(KINDS), options).run()


if __name__ == "__main__":
    sys.exit(main())
