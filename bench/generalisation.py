"""What the default pack says of kinds of curves that it was not made on: healthy ones, and ones with a planted fault.

Healthy runs of each kind in ``synthetic_curves.py``: incidents above info (each is false), pages and infos per 100,000 records. Then each fault
in runs of several kinds: in how many an incident above info speaks of it, in how many a person is paged.

    python bench/generalisation.py --output .bench/generalisation.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

from synthetic_curves import CARRIERS, FAULTS, HEALTHY, Curve, healthy, planted

from trainwarden.rules.core.language import Pack, load_pack
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay.driver import Replay
from trainwarden.rules.rulefiles import text_of

#: Records by which an onset may lie before the fault: the noise decides where it is first seen.
BEFORE = 10


def rows_of(curve: Curve, name: str, pack: Pack) -> list[dict[str, Any]]:
    """Return the incidents of a run."""
    return list(Replay(Settings(), pack).run(curve.lines(name)).incidents.values())


def paged(row: dict[str, Any]) -> bool:
    """Say whether a person was called."""
    return row["severity"] == "critical" or row["action"] in ("rollback", "stop", "escalate")


class _Worker:
    pack: Pack

    @classmethod
    def begin(cls, text: str) -> None:
        cls.pack = load_pack(text, "pack.yml")

    @classmethod
    def healthy(cls, job: tuple[str, int]) -> dict[str, Any]:
        kind, seed = job
        curve = healthy(kind, seed)
        rows = rows_of(curve, f"{kind} {seed}", cls.pack)
        told = [row for row in rows if row["severity"] != "info"]
        return {
            "kind": kind,
            "records": len(curve.losses),
            "incidents": len(told),
            "pages": sum(map(paged, rows)),
            "infos": len(rows) - len(told),
            "rules": [
                f"{'page' if paged(row) else row['severity']}: {'+'.join(row['alerts'])} {row['verdict']} seed {seed} step {row['onset_step']}"
                for row in told
            ],
        }

    @classmethod
    def planted(cls, job: tuple[str, str, int]) -> dict[str, Any]:
        fault, kind, seed = job
        made = planted(fault, kind, seed)
        stride = made.curve.stride
        first, end = (made.first + 1 - BEFORE) * stride, (made.end + BEFORE) * stride
        # An incident speaks of the fault if it begins within it, or was open when it began.
        rows = [
            row
            for row in rows_of(made.curve, f"{fault} {kind} {seed}", cls.pack)
            if row["onset_step"] <= end and (row["closed_step"] is None or row["closed_step"] >= first)
        ]
        return {
            "fault": fault,
            "kind": kind,
            "told": any(row["severity"] != "info" for row in rows),
            "noted": bool(rows),
            "paged": any(map(paged, rows)),
        }


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(".bench/generalisation.json"))
    parser.add_argument("--pack", default="default", help="a shipped pack or a rule file")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=10, help="runs of a healthy kind; short kinds get more")
    parser.add_argument("--faulty", type=int, default=3, help="runs of a fault and a kind")
    parser.add_argument("--only", default="", help="kinds of healthy runs whose name holds this text")
    options = parser.parse_args()
    text, _ = text_of(options.pack)
    kinds = [kind for kind in HEALTHY if options.only in kind]
    seeds = {
        kind: max(2, options.seeds * min(20, max(1, 3000 // HEALTHY[kind][1]) if HEALTHY[kind][1] < 10_000 else 1))
        for kind in kinds
    }
    seeds = {kind: 2 if HEALTHY[kind][1] > 10_000 else count for kind, count in seeds.items()}
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes, _Worker.begin, (text,)) as pool:
        calm = pool.map(_Worker.healthy, [(kind, seed) for kind in kinds for seed in range(seeds[kind])], 1)
        faulty = pool.map(
            _Worker.planted,
            [(fault, kind, 100 + seed) for fault in FAULTS for kind in CARRIERS for seed in range(options.faulty)],
            4,
        )
    found = {
        "healthy": [_of_kind(kind, calm) for kind in kinds],
        "faults": [_of_fault(fault, faulty) for fault in FAULTS],
        "seconds": round(time.monotonic() - began),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    show(found)


def _of_kind(kind: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [one for one in results if one["kind"] == kind]
    records = sum(one["records"] for one in mine)
    return {
        "kind": kind,
        "runs": len(mine),
        "records": records,
        **{
            f"{name}_per_100k": round(1e5 * sum(one[name] for one in mine) / records, 1)
            for name in ("incidents", "pages", "infos")
        },
        "pages": sum(one["pages"] for one in mine),
        "said": [says for one in mine for says in one["rules"]],
    }


def _of_fault(fault: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [one for one in results if one["fault"] == fault]
    shares = {name: round(sum(one[name] for one in mine) / max(len(mine), 1), 2) for name in ("noted", "told", "paged")}
    by_kind = {
        kind: round(
            sum(one["told"] for one in mine if one["kind"] == kind) / max(1, sum(one["kind"] == kind for one in mine)),
            2,
        )
        for kind in CARRIERS
    }
    return {"fault": fault, "runs": len(mine), **shares, "told_by_kind": by_kind}


def show(found: dict[str, Any]) -> None:
    """Print both tables as in docs/benchmarks.md."""
    print("| healthy runs | records | incidents / 100k | pages / 100k | infos / 100k |\n|---|---|---|---|---|")
    for one in found["healthy"]:
        print(
            f"| {one['kind']} | {one['records']:,} | {one['incidents_per_100k']} | {one['pages_per_100k']} | {one['infos_per_100k']} |"
        )
    records = sum(one["records"] for one in found["healthy"]) or 1
    totals = [
        sum(one[f"{name}_per_100k"] * one["records"] for one in found["healthy"]) / records
        for name in ("incidents", "pages", "infos")
    ]
    print(f"| all | {records:,} | " + " | ".join(f"{total:.1f}" for total in totals) + " |")
    if found["faults"]:
        print("\n| fault | runs | noted | told | paged |\n|---|---|---|---|---|")
    for one in found["faults"]:
        print(f"| {one['fault']} | {one['runs']} | {one['noted']} | {one['told']} | {one['paged']} |")


if __name__ == "__main__":
    main()
