"""Columns that tell of clipping, routers, tokens and values that are not finite, under the names that logs give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rules.replay.logs import placed_of
from trainwarden.record import Step, Value


def signals(tmp_path: Path, rows: list[dict[str, float]]) -> list[dict[str, Value]]:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [item.signals for _, _, item in placed_of(path)[0] if isinstance(item, Step)]


@pytest.mark.parametrize(
    ("column", "signal"),
    [
        ("train/aux_loss", "router_aux_loss"),
        ("post_clip_norm", "grad_norm_clipped"),
        ("max_grad_norm", "clip_threshold"),
        ("token_id_max", "batch_token_id_max"),
        ("vocab_size", "vocabulary_size"),
        ("update_norm", "update_norm"),
        ("update_zero_fraction", "update_zero_ratio"),
        ("batch_hash", "batch_hash"),
        ("valid_tokens", "batch_supervised_tokens"),
        ("dataloader_offset", "sample_position"),
        ("grad_norm_post", "grad_norm_clipped"),
        ("grad_norm_pre", "grad_norm"),
        ("clip", "clip_threshold"),
        ("shard_id", "shard"),
    ],
)
def test_a_column_is_known_by_its_usual_name(tmp_path: Path, column: str, signal: str) -> None:
    assert signals(tmp_path, [{"step": step, "loss": 2.0, column: 3.0} for step in range(1, 30)])[-1][signal] == 3.0


def test_norms_before_and_behind_the_clipping_are_told_apart(tmp_path: Path) -> None:
    found = signals(
        tmp_path, [{"step": s, "loss": 2.0, "pre_clip_norm": 3.0, "post_clip_norm": 1.0} for s in range(1, 30)]
    )
    assert (found[0]["grad_norm"], found[0]["grad_norm_clipped"]) == (3.0, 1.0)


def test_a_running_total_is_taken_by_what_it_grew(tmp_path: Path) -> None:
    totals = [7, 7, 7, 8, 10, 10, 0, 1]
    rows: list[dict[str, float]] = [
        {"step": step, "loss": 2.0, "nonfinite_total": total, "skipped_steps_total": total}
        for step, total in enumerate(totals, 1)
    ]
    found = signals(tmp_path, rows)
    assert [row["skipped"] for row in found] == [0, 0, 0, 1, 2, 0, 0, 1]
    assert [row["nonfinite"] for row in found] == [{"loss": grown} for grown in (0, 0, 0, 1, 2, 0, 0, 1)]


@pytest.mark.parametrize(("column", "signal"), [("batch_hash", "batch_hash"), ("shard_name", "shard")])
def test_a_hash_or_a_shard_may_be_a_text_and_the_same_text_is_the_same_number(
    tmp_path: Path, column: str, signal: str
) -> None:
    path = tmp_path / "log.csv"
    names = ["a0f3", "b17c", "a0f3", "shard-04"] * 5
    path.write_text(f"step,loss,{column}\n" + "".join(f"{step},2.0,{name}\n" for step, name in enumerate(names, 1)))
    found = [item.signals[signal] for _, _, item in placed_of(path)[0] if isinstance(item, Step)]
    assert len(found) == 20
    assert found[0] == found[2] == found[4]
    assert len(set(map(str, found))) == 3


def test_a_text_in_another_column_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss,shard_grad_norm\n" + "".join(f"{step},2.0,broken\n" for step in range(1, 20)))
    found = [item.signals for _, _, item in placed_of(path)[0] if isinstance(item, Step)]
    assert [list(signals) for signals in found] == [["loss"]] * 19
