"""Logs as people really have them: other names, other ways of writing a number, restarts, prefixes, several ranks, other systems.

Each is 40 steps of one loss; what is asserted is that all of replay's reading gives those steps with that loss, and what else it says.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.rules.replay.logs import placed_of
from trainwarden.record import Event, Step

N = 40
STEPS = range(1, N + 1)


def loss(step: int) -> float:
    return round(5 / math.sqrt(step) + 2 + 0.01 * ((step * 37) % 11), 4)


@dataclass
class Log:
    """A file, and what must come of it beside the steps and losses: signals, evaluations, starts, values that are not finite."""

    text: str
    signals: set[str] = field(default_factory=set)
    evaluations: int = 0
    starts: int = 1
    scale: int = 1
    nan: tuple[int, ...] = ()
    infinite: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    steps: list[int] | None = None
    encoding: str = "utf-8"


def rows(form: str, head: str = "", ends: str = "\n", of: range | list[int] = STEPS) -> str:
    return head + "".join(form.format(s=s, x=loss(s), m=f"{s // 60:02}:{s % 60:02}") + ends for s in of)


def every(n: int, form: str, text: str) -> str:
    """Put a line behind each n-th one."""
    lines = text.splitlines(keepends=True)
    found = []
    for line, step in zip(lines, STEPS, strict=True):
        found.append(line)
        if step % n == 0:
            found.append(form.format(s=step, x=loss(step) + 0.1) + "\n")
    return "".join(found)


NAN = {5: "NaN", 6: "nan", 7: "-nan(ind)", 8: "1.#QNAN"}
INF = {9: "inf", 10: "-inf", 11: "Infinity", 12: "1.#INF"}
MISSING = {13: "", 14: "null", 15: "None", 16: "NA"}
WORDS = {**NAN, **INF, **MISSING}
RATES = {"grad_norm", "lr"}

MEGATRON = (
    " iteration {s:8d}/  500000 | consumed samples: {s:12d} | learning rate: 1.200E-04 | lm loss: {x:.6E} | loss scale: 1.0 |"
    " grad norm: 1.{s:03d} | number of skipped iterations:   0 |"
)
TITAN = "2025-01-01 10:{m},123 - root - INFO - step: {s:2d}  loss: {x:7.4f}  grad_norm: 1.2{s:03d}  tps: 6,123"
LLMC = "step {s:4d}/40 | loss {x:8.6f} (+1.23z)| norm 1.2{s:03d} (-0.44z)| lr 1.00e-04 | 2733.1 ms"
DICT = "{{'loss': {x}, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': {s}.5}}"

LOGS = {
    "slashes.csv": Log(rows("{s},{x},1.5,3e-4", "global_step,train/loss,train/grad_norm,train/learning_rate\n"), RATES),
    "words.csv": Log(rows("{s},{x},1.5,3e-4", "Step,Train Loss,Grad Norm,Learning Rate\n"), RATES),
    "humps.csv": Log(rows("{s},{x},1.5,3e-4", "globalStep,trainLoss,gradNorm,learningRate\n"), RATES),
    "brackets.csv": Log(rows("{s},{x},3e-4", "Iteration,Loss (train),LR\n"), {"lr"}),
    "thousands.csv": Log(rows('"{s},000",{x},"{s},000,000"', "step,loss,tokens\n"), {"tokens"}, scale=1000),
    "scientific.csv": Log(rows("{s}e+02,{x:.4e}", "step,loss\n"), scale=100),
    "windows.csv": Log(rows("{s},{x}", "step,loss\r\n", "\r\n")),
    "old-mac.csv": Log(rows("{s},{x}", "step,loss\r", "\r")),
    "utf16.csv": Log(rows("{s},{x}", "step,loss\r\n", "\r\n"), encoding="utf-16"),
    "pipes.txt": Log(rows("{s}|{x}|1e-4", "step|loss|lr\n"), {"lr"}),
    "remarks.csv": Log(rows("{s},{x}", "# run of May\n# seed 3\nstep,loss\n")),
    "savetxt.csv": Log(rows("{s},{x}", "# step,loss\n")),
    "not-finite.csv": Log(
        "step,loss,lr\n" + "".join(f"{s},{WORDS.get(s, loss(s))},1e-4\n" for s in STEPS),
        nan=tuple(NAN),
        infinite=tuple(INF),
        missing=tuple(MISSING),
    ),
    "restarted.csv": Log(
        rows("{s},{x}", "step,loss\n", of=range(1, 31)) + rows("{s},{x}", "step,loss\n", of=range(21, N + 1)),
        starts=2,
        steps=[*range(1, 31), *range(21, N + 1)],
    ),
    "more-columns.csv": Log(
        rows("{s},{x}", "step,loss\n", of=range(1, 31)) + rows("{s},{x},1e-4", "step,loss,lr\n", of=range(31, N + 1)),
        {"lr"},
    ),
    "other-order.csv": Log(
        rows("{s},{x},1e-4", "step,loss,lr\n", of=range(1, 31))
        + rows("{s},1e-4,{x}", "step,lr,loss\n", of=range(31, N + 1)),
        {"lr"},
    ),
    "by-epoch.csv": Log(
        "epoch,step,loss\n" + "".join(f"{(s - 1) // 20},{(s - 1) % 20 + 1},{loss(s)}\n" for s in STEPS)
    ),
    "history.csv": Log(
        "_step,train/loss,_runtime,val/loss\n" + every(10, "{s},,{s}.5,{x}", rows("{s},{x},{s}.0,")), evaluations=4
    ),
    "texts.jsonl": Log(rows('{{"step":"{s}","loss":"{x}","lr":"1e-4"}}'), {"lr"}),
    "prefixed.jsonl": Log(rows('2024-01-01 10:{m} INFO {{"step":{s},"loss":{x}}}')),
    "fairseq.log": Log(
        rows(
            '2023-01-01 10:{m} | INFO | train_inner | {{"epoch": 1, "update": 0.{s:03d}, "loss": "{x}", "gnorm": "1.2",'
            ' "num_updates": "{s}", "lr": "1e-05"}}'
        ),
        RATES,
    ),
    "olmo.jsonl": Log(
        rows('{{"step":{s},"train/CrossEntropyLoss":{x},"optim/total_grad_norm":1,"throughput/total_tokens":{s}}}'),
        {"grad_norm", "tokens"},
    ),
    "list.json": Log(json.dumps([{"step": s, "loss": loss(s)} for s in STEPS], indent=1)),
    "trainer.log": Log(every(20, "{{'eval_loss': {x}, 'epoch': 1.0}}", rows(DICT)), RATES, evaluations=2),
    "trainer-bar.log": Log(
        rows("\r 2%|#  | {s}/40 [00:{s:02}<00:30, 1.2it/s]      \n" + DICT)
        + "{'train_runtime': 9.1, 'train_loss': 2.9, 'epoch': 1.0}\n",
        RATES,
    ),
    "trainer-nan.log": Log(rows(DICT).replace(f"'loss': {loss(9)},", "'loss': nan,"), RATES, nan=(9,)),
    "trainer_state.json": Log(
        json.dumps({"log_history": [{"step": s, "loss": str(loss(s)), "grad_norm": "NaN"} for s in STEPS]}),
        {"grad_norm"},
    ),
    "megatron-slurm.log": Log(rows("15: [2024-01-01 10:{m}]" + MEGATRON), {*RATES, "loss_scale", "samples_seen"}),
    "megatron-ranks.log": Log(rows("[default6]:" + MEGATRON + "\n[default7]:" + MEGATRON), RATES),
    "megatron-colours.log": Log(rows("\x1b[32m" + MEGATRON + "\x1b[0m", ends="\r\n"), RATES),
    "megatron-utf16.log": Log(rows(MEGATRON), RATES, encoding="utf-16"),
    "titan-slurm.log": Log(rows("0: [rank0]:" + TITAN), {"grad_norm"}),
    "titan-ranks.log": Log(rows("[rank1]:" + TITAN + "\n[rank0]:" + TITAN), {"grad_norm"}),
    "llmc-slurm.log": Log(rows("0: " + LLMC), RATES),
    "llmc-time.log": Log(rows("[2024-01-01 10:{m}][rank0]: " + LLMC), RATES),
    "llmc-nan.log": Log(rows(LLMC).replace(f"{loss(9):8.6f} (+1.23z)", "-nan (nanz)"), RATES, nan=(9,)),
    "nanogpt-slurm.log": Log(rows("0: iter {s}: loss {x:.4f}, time 340.12ms, mfu -100.00%")),
    "nanogpt-bar.log": Log(rows("\r{s}it [00:01, 1.2it/s]\riter {s}: loss {x:.4f}, time 340.12ms, mfu 3.21%")),
    "modded-slurm.log": Log(rows("0: step:{s}/40 train_loss:{x:.4f} train_time:100ms step_avg:100.0ms")),
    "deepspeed-ranks.log": Log(
        rows(
            "0: steps: {s} loss: {x:.4f} iter time (s): 1.2 samples/sec: 8.1\n1: steps: {s} loss: {x:.4f} iter time (s): 1.2 samples/sec: 8.1"
        )
    ),
    "unknown.log": Log(rows("Epoch [1/3], Step [{s}/60], Loss: {x}")),
}


@pytest.mark.parametrize("name", LOGS)
def test_it_is_read(name: str, tmp_path: Path) -> None:
    log = LOGS[name]
    path = tmp_path / name
    path.write_bytes(log.text.encode(log.encoding))
    placed, notices = placed_of(path)
    records = [(start.attempt, item) for start, _, item in placed if isinstance(item, Step)]
    led = [item for _, item in records if "loss" in item.signals]
    wanted = [s * log.scale for s in log.steps or STEPS if s not in log.missing]
    assert [item.step for item in led] == wanted, notices
    for item in led:
        value, step = item.value("loss"), item.step // log.scale
        assert value is not None
        if step in log.nan:
            assert math.isnan(value)
        elif step in log.infinite:
            assert math.isinf(value)
        else:
            assert value == pytest.approx(loss(step), abs=1e-3), step
    signals = set().union(*(item.signals for _, item in records))
    assert log.signals <= signals
    assert sum(isinstance(item, Event) and item.kind == "evaluation" for _, _, item in placed) == log.evaluations
    assert len({attempt for attempt, _ in records}) == log.starts


@pytest.mark.parametrize("form", ["2024-01-01T10:{m}Z", "2024-01-01 10:{m}", "17040000{s:02d}", "17040000{s:02d}.5"])
def test_times_of_a_table_are_used_however_they_are_written(form: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(rows(form + ",{s},{x}", "timestamp,step,loss\n"))
    times = [item.time for _, _, item in placed_of(path)[0] if isinstance(item, Step)]
    assert times[0] > 1.7e9
    assert times[-1] - times[0] == N - 1


def test_a_comma_is_no_sign_of_thousands_where_it_may_be_a_decimal_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(rows("{s};3,{s:03d};1e-4", "step;loss;lr\n"))
    placed, notices = placed_of(path)
    assert not any("loss" in item.signals for _, _, item in placed if isinstance(item, Step))
    assert any("a point as the decimal mark" in row["says"] for row in notices)
