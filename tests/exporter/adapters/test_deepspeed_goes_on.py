"""Checkpoints of DeepSpeed's engine under the adapter: reported, gone on from, taken back by a plan, with two real processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.ranks.harness import records, run
from tests.exporter.runs import events

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/integrations.md").read_text()

BODY = """
torch.set_num_threads(1)
from torch.utils.data import DataLoader
from tests.exporter.adapters.engines import engine_of, loss_on, settle, watched
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.runfolder import RunFolder

data = list(tokens(0, rows=64))

def part(run, stage, last, save=(), of=None, decoupled=False, tag=None, wrap=True, **load):
    saved = folder / "saved" / (of or run)
    engine = engine_of(stage)
    exporter = watched(engine, folder, run)
    loader = exporter.wrap(DataLoader(data, batch_size=4, shuffle=True), seed=3, dataset="rows", reserve=0)
    path, client = engine.load_checkpoint(str(saved), tag=tag, **load)
    if path is not None:
        loader.load_state_dict(client["loader"])
    if decoupled:
        from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
        engine.checkpoint_engine.is_decoupled = lambda: True
        engine.checkpoint_engine.get_commit_info = lambda: info
    losses, info, known = [], None, []
    while engine.global_steps < last:
        for batch in loader:
            loss = loss_on(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if engine.global_steps in save and engine.micro_steps % 2 == 0:
                engine.save_checkpoint(str(saved), client_state={"loader": loader.state_dict()})
                if decoupled:
                    # The second is still being written when the run ends.
                    done = CheckpointCommitInfo(tag="global_step1", save_dir=str(saved), save_latest=True)
                    info = done if engine.global_steps == 1 else None
            if engine.global_steps >= last:
                break
    notices = settle(exporter)
    assert exporter.global_step == engine.global_steps
    # The base optimizer's state and rate are what the next save would hold.
    rate = engine.basic_optimizer.param_groups[0]["lr"]
    return {"path": path, "losses": losses, "notices": notices, "rate": rate, "latest": (saved / "latest").read_text() if (saved / "latest").exists() else None}

def plan(run, stage, attempt, target, **fields):
    if rank == 0:
        where = RunFolder(run, folder)
        uid = where.identity().run_uid
        aim = None if target is None else Target(attempt=0, step=target, path=str(folder / "saved" / run / f"global_step{target}"))
        where.write_plan(Plan(plan_id=f"p{attempt}", run_uid=uid, for_attempt=attempt, target=aim, **fields))
        where.write_ledger(Ledger(run_uid=uid, entries=[LedgerEntry(plan_id=f"p{attempt}", for_attempt=attempt, target_step=target or 0)]))
    dist.barrier()

told = {}
for stage in (0, 1, 2, 3):
    name = f"run-{stage}"
    told[f"whole-{stage}"] = part(f"whole-{stage}", stage, 6)
    told[name] = [part(name, stage, 4, save=(2, 4)), part(name, stage, 6)]
    plan(name, stage, 2, 2, reset_optimizer=True, lr_factor=0.5)
    told[name].append(part(name, stage, 5))
    # Nothing was saved in that attempt: the plan holds on, and what it gave up is not gone back to.
    told[name].append(part(name, stage, 3))
plan("run-1", 1, 4, None)
told["scratch"] = part("run-1", 1, 1)
told["without"] = part("without", 2, 5, of="run-2", load_optimizer_states=False)
told["tag"] = part("tag", 2, 5, of="run-2", tag="global_step4")
told["decoupled"] = part("decoupled", 0, 3, save=(1, 2), decoupled=True)
say(told=told)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("goes-on")
    return folder, run(BODY, folder, world=2)[0].said["told"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_goes_on_from_its_newest_checkpoint_with_its_numbers_positions_and_state(
    ran: tuple[Path, dict[str, Any]], stage: int
) -> None:
    folder, told = ran
    name = f"run-{stage}"
    first, second, *_ = told[name]
    assert (first["path"], second["notices"], first["notices"]) == (None, [], [])
    assert second["path"].startswith(str(folder / "saved" / name / "global_step4"))
    assert first["losses"] + second["losses"] == pytest.approx(told[f"whole-{stage}"]["losses"], rel=1e-6)
    for rank in (0, 1):
        whole, own = records(folder, rank, f"whole-{stage}"), records(folder, rank, name)[:6]
        assert [record.step for record in own] == [1, 2, 3, 4, 5, 6]
        assert [record.samples for record in own] == [record.samples for record in whole]
        for signal in ("loss", "grad_norm", "optimizer_step", "lr", "weight_rms", "update_ratio"):
            values = [[record.value(signal) for record in each] for each in (own, whole)]
            assert values[0] == pytest.approx(values[1], rel=1e-5), signal
    saved = events(folder, "checkpoint", name)
    assert [(event.step, event.fields["path"]) for event in saved] == [
        (step, str(folder / "saved" / name / f"global_step{step}")) for step in (2, 4)
    ]
    assert all(event.fields["complete"] and event.fields["finite"] for event in saved)
    (loaded, *_) = events(folder, "loaded", name)
    assert (loaded.step, loaded.fields["optimizer_states"], loaded.fields["skipped_steps"]) == (4, True, 0)
    assert loaded.fields["optimizer_step"] == 4
    assert events(folder, "start", name)[1].fields["resumed_from"]["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_plan_names_is_loaded_and_its_reset_and_rate_are_seen_in_the_records(
    ran: tuple[Path, dict[str, Any]], stage: int
) -> None:
    folder, told = ran
    name = f"run-{stage}"
    assert told[name][0]["latest"] == "global_step4"  # what DeepSpeed would have loaded
    for which in (2, 3):
        assert told[name][which]["path"].startswith(str(folder / "saved" / name / "global_step2"))
        assert told[name][which]["rate"] == 0.01  # the plan's factor is in nothing that is saved
    for rank in (0, 1):
        after = records(folder, rank, name)[6:10]
        assert [record.step for record in after] == [3, 4, 5, 3]
        assert [record.value("optimizer_step") for record in after] == [1, 2, 3, 1]
        assert [record.value("lr") for record in after] == pytest.approx([0.0005, 0.001, 0.0015, 0.0005])
        before = records(folder, rank, name)[2]
        assert after[0].value("loss") == pytest.approx(before.value("loss"), rel=1e-6)
        assert after[0].samples == before.samples
        second, gradient = (
            after[0].value(what, moment) for what, moment in (("moment_rms", "exp_avg_sq"), ("grad_norm", "all"))
        )
        assert second is not None
        assert gradient is not None
        assert second < 1e-3 * gradient**2  # one gradient's squares alone, times 1 - beta2
        applied = events(folder, "start", name, rank)[2].fields["plan_applied"]
        assert (applied["plan_id"], applied["reset_optimizer"], applied["not_applied"]) == ("p2", True, {})


@pytest.mark.slow
def test_a_plan_to_begin_from_scratch_loads_nothing_though_there_is_a_newest(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, told = ran
    assert told["scratch"]["path"] is None
    assert records(folder, 0, "run-1")[-1].step == 1
    assert any("is not loaded" in sentence for sentence in told["scratch"]["notices"])


@pytest.mark.slow
def test_what_became_of_the_optimizers_states_is_told_where_they_were_not_asked_for(
    ran: tuple[Path, dict[str, Any]],
) -> None:
    folder, told = ran
    (without,) = events(folder, "loaded", "without")
    (tag,) = events(folder, "loaded", "tag")
    assert (without.fields["optimizer_states"], without.fields["optimizer_step"]) == (False, 0)
    assert (tag.fields["optimizer_states"], tag.fields["optimizer_step"]) == (True, 4)
    assert [records(folder, 0, run)[0].value("optimizer_step") for run in ("without", "tag")] == [1, 5]
    assert told["tag"]["notices"] == told["without"]["notices"] == []


@pytest.mark.slow
def test_a_save_in_the_background_is_complete_when_deepspeed_commits_it_and_not_before(
    ran: tuple[Path, dict[str, Any]],
) -> None:
    folder, told = ran
    assert told["decoupled"]["latest"] == "global_step1"
    assert [(event.step, event.fields["complete"]) for event in events(folder, "checkpoint", "decoupled")] == [
        (1, True)
    ]


@pytest.mark.slow
def test_the_example_does_what_its_page_says_and_a_second_call_goes_on(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```\n(python examples/deepspeed_zero\.py.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    environment["TORCHDYNAMO_DISABLE"] = "1"
    environment.pop("TRAINWARDEN_DIR", None)
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    said = []
    for command in (*commands, [*commands[0], "3", "2"]):
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout)
    assert "steps 1 to 40 under ZeRO 2" in said[0]
    assert "40 records, steps 1–40; no incident" in said[1]
    assert "steps 41 to 43 under ZeRO 2" in said[2]
    found = records(tmp_path / ".trainwarden", 0, "deepspeed-zero")
    assert [record.step for record in found] == list(range(1, 44))
    assert [record.samples for record in found] == [[(16 * step, 16 * step + 16)] for step in range(43)]
    assert all(record.value("grad_norm") and record.value("batch_unique_token_ratio") for record in found)
    assert events(tmp_path / ".trainwarden", "start", "deepspeed-zero")[1].fields["resumed_from"]["step"] == 40


@pytest.mark.slow
def test_the_example_refuses_a_checkpoint_of_another_partition_in_one_sentence_that_says_what_to_remove(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    environment["TRAINWARDEN_DIR"] = str(tmp_path / "kept")
    example = str(ROOT / "examples/deepspeed_zero.py")

    def call(stage: int, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launcher, example, "2", str(stage)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def refused(stage: int, ranks: int, of: str) -> None:
        ran = call(stage, ranks)
        assert ran.returncode == 1
        assert ran.stderr.count("deepspeed_zero: ") == 1
        (said,) = [line for line in ran.stderr.splitlines() if line.startswith("deepspeed_zero: ")]
        assert f"{tmp_path}/kept/deepspeed-zero-state/" in said
        assert f"is of {of}" in said
        assert said.endswith(f"remove {tmp_path}/kept/deepspeed-zero-state and {tmp_path}/kept/deepspeed-zero")
        assert "AssertionError" not in ran.stderr

    assert "steps 1 to 2 under ZeRO 2" in call(2).stdout
    refused(3, 1, "ZeRO 1 or 2 with 1 rank,")
    refused(0, 1, "ZeRO 1 or 2 with 1 rank,")
    refused(2, 2, "ZeRO 1 or 2 with 1 rank,")
    assert "steps 3 to 4 under ZeRO 1" in call(1).stdout  # which DeepSpeed loads
    for name in ("deepspeed-zero-state", "deepspeed-zero"):
        shutil.rmtree(tmp_path / "kept" / name)  # as it said
    assert "steps 1 to 2 under ZeRO 3" in call(3, 2).stdout
    refused(3, 1, "ZeRO 3 with 2 ranks,")
    refused(2, 2, "ZeRO 3 with 2 ranks,")
