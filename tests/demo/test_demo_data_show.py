"""A real run of the demo's trainer over a poisoned shard: what a step ate, from its journal, is what was on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainwarden.demo.corpus import read_index, read_rows
from trainwarden.demo.layout import prepare
from trainwarden.demo.main import lay_out
from trainwarden.demo.scale import Scale

TINY = Scale(steps=110, width=16, layers=1, heads=2, checkpoint_every=0)


def shown(runs: Path, folder: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "trainwarden.rules.cli", "data", "show", "--run", "demo", "--dir", str(runs)]
    ran = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_text_of_the_poison_is_shown_by_the_step_that_ate_it(tmp_path: Path) -> None:
    layout = prepare(tmp_path / ".demo")
    answer = lay_out(layout, 2, TINY)
    runs = layout.runs("untreated")
    training = [
        sys.executable,
        "-m",
        "trainwarden.demo.train",
        "--data",
        str(layout.data),
        "--out",
        str(tmp_path / "out"),
    ]
    subprocess.run(
        [*training, "--seed", "2", "--port", "0", *TINY.options()],
        env={**os.environ, "TRAINWARDEN_DIR": str(runs)},
        capture_output=True,
        check=True,
        timeout=300,
    )
    wanted = (answer.first_step - 1, answer.first_step + 1)  # before the poison, and within it
    index = read_index(layout.data)
    on_disk = read_rows(layout.data / "train.bin", index.row_bytes)
    (first, end) = next((first, end) for name, first, end in index.shards if name == answer.shard)
    for step in wanted:
        given = ["--dataset", "trainwarden.demo.train:text_rows", "--tokenizer", "bytes", "--output", "json"]
        told = json.loads(shown(runs, tmp_path, "--step", str(step), *given))
        (rank,) = told["steps"][0]["ranks"]
        assert len(rank["rows"]) == rank["count"] == TINY.batch_size
        for row in rank["rows"]:
            assert (row["shard"] == answer.shard) == (first <= row["row"] < end) == (step > answer.first_step)
            text = on_disk[row["row"]].tobytes().decode("utf-8", "backslashreplace")
            assert row["text"] == text
    of_file = ["--dataset", str(layout.data / "train.bin"), "--dtype", "uint8", "--context", str(index.row_bytes)]
    page = shown(runs, tmp_path, "--step", str(wanted[1]), *of_file)
    assert page.count(answer.shard) == TINY.batch_size + 1
    assert "train.bin, byte " in page
