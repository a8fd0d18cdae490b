"""Megatron-core's own model, DDP, optimizers and schedules, in real processes over gloo, under the adapter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.ranks.harness import ROOT, close, records, run
from tests.exporter.runs import events

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: its adapter is NOT tested", allow_module_level=True)

BEGIN = """
from tests.exporter.adapters.megatron_loop import Loop, make, norms, on_cpu, sizes
on_cpu()
from trainwarden.exporter.adapters.megatron import attach

def watch(loop, run, **others):
    chosen = {"run": run, "dir": folder, "port": 0, "reader_seconds": 0.0, "cadence": 1, "micro_batch_size": 2, **others}
    return attach(loop.model, loop.optimizer, **chosen)
"""


def watched(body: str, folder: Path, world: int = 1, **others: Any) -> list[dict[str, Any]]:
    return [each.said for each in run(BEGIN + body, folder, world, **others)]


@pytest.mark.slow
def test_a_record_holds_what_megatron_found_out_and_norms_by_group_before_it_clips(tmp_path: Path) -> None:
    body = """
for precision, sharded in (("fp32", False), ("bf16", False), ("fp16", True)):
    loop = make(precision, sharded=sharded)
    exporter = watch(loop, precision)
    for _ in range(4):
        loop.step(exporter, norms)
        loop.steps[-1]["sizes"] = sizes(loop)
    exporter.close()
    say(**{precision: loop.steps, precision + "_notices": exporter.notices})
"""
    (said,) = watched(body, tmp_path)
    for precision in ("fp32", "bf16", "fp16"):
        found = records(tmp_path, run=precision)
        assert [record.step for record in found] == [1, 2, 3, 4]
        for record, wanted in zip(found, said[precision], strict=True):
            assert wanted["made"]
            assert record.value("loss") == pytest.approx(wanted["loss"], rel=1e-6)
            assert record.value("grad_norm", "all") == wanted["norm"]  # to the last bit
            assert close(record.signals["grad_norm"], wanted["norms"], 1e-5)
            assert record.value("clip_ratio") == pytest.approx(wanted["norm"] / 1.0, rel=1e-6)
            assert record.value("num_zeros") == wanted["zeros"]
            assert record.value("grad_zero_ratio", "all") == pytest.approx(wanted["zeros"] / 30080, rel=1e-6)
            assert record.value("lr", "all") == wanted["lr"]
            assert record.value("skipped") == (0.0 if precision == "fp16" else None)
            assert record.value("loss_scale") == (2.0**16 if precision == "fp16" else None)
            assert close(record.signals["weight_rms"], wanted["sizes"], 1e-6)
            assert record.value("optimizer_step") == record.step
        assert found[-1].value("update_ratio", "mlp") == pytest.approx(
            found[-1].value("update_applied_ratio", "mlp") or 0, rel=0.05
        )
        (start,) = events(tmp_path, "start", precision)
        told = ("model", "parameters", "precision", "loss_scaling", "clipping")
        assert [start.fields[name] for name in told] == [
            "GPTModel",
            30080,
            {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision],
            precision == "fp16",
            True,
        ]
        assert said[f"{precision}_notices"] == []
        assert events(tmp_path, "preflight", precision) == []


@pytest.mark.slow
def test_a_step_that_overflows_is_skipped_with_its_scale_and_rate_and_the_optimizer_is_given_back(
    tmp_path: Path,
) -> None:
    body = """
loop = make("fp16", loss_scale=2.0**40)
exporter = watch(loop, "run")
for _ in range(3):
    loop.step(exporter)
loop.optimizer.chained_optimizers[0].grad_scaler._scale.fill_(2.0**10)
for _ in range(2):
    loop.step(exporter)
exporter.close()
loop.step()
say(steps=loop.steps, mine=sorted(vars(loop.optimizer)), notices=exporter.notices)
"""
    (said,) = watched(body, tmp_path)
    found = records(tmp_path)
    assert [step["made"] for step in said["steps"]] == [False] * 3 + [True] * 3
    assert [record.value("skipped") for record in found] == [1, 1, 1, 0, 0]
    assert [record.value("loss_scale") for record in found] == [step["scale"] for step in said["steps"][:5]]
    assert [record.value("loss_scale_backoffs") for record in found][:3] == [1, 1, 1]
    assert [record.value("grad_norm", "all") for record in found] == [None] * 3 + [
        step["norm"] for step in said["steps"][3:5]
    ]
    assert [record.value("lr", "all") for record in found] == [step["lr"] for step in said["steps"][:5]]
    assert [record.value("nonfinite", "grad") for record in found] == [None] * 3 + [0, 0]
    assert [record.value("loss") for record in found] == pytest.approx([step["loss"] for step in said["steps"][:5]])
    assert [record.value("optimizer_step") for record in found] == [None] * 3 + [1, 2]
    assert [record.value("sample_position") for record in found] == [4, 8, 12, 16, 20]
    assert not {"step", "prepare_grads", "get_grad_norm", "clip_grad_norm"} & set(said["mine"])
    assert said["notices"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_tensor_and_data_parallelism_give_norms_and_sizes_of_the_whole_model_once(tmp_path: Path) -> None:
    body = """
for run, sharded in (("whole", False), ("parts", True)):
    loop = make(tensor=2, sharded=sharded)
    exporter = watch(loop, run)
    for _ in range(4):
        loop.step(exporter, None if sharded else norms)
        loop.steps[-1]["sizes"] = sizes(loop)
    exporter.close()
    say(**{run: loop.steps, run + "_notices": exporter.notices})
"""
    said = watched(body, tmp_path, 4, seconds=300)
    for name in ("whole", "parts"):
        for rank in range(4):
            found = records(tmp_path, rank, name)
            assert [record.step for record in found] == [1, 2, 3, 4]
            for at, record in enumerate(found):
                wanted, reference = said[rank][name][at], said[0]["whole"][at]
                assert record.value("grad_norm", "all") == wanted["norm"]
                assert close(record.signals["grad_norm"], reference["norms"], 1e-4), (name, rank, at)
                assert close(record.signals["weight_rms"], wanted["sizes"], 1e-5), (name, rank, at)
                losses = [said[other][name][at]["loss"] for other in (0, 2)]  # those of two tensor ranks are the same
                assert record.value("rank_loss") == pytest.approx(losses[rank // 2], rel=1e-6)
                assert record.value("loss") == pytest.approx(sum(losses) / 2, rel=1e-6)
                begin = 8 * at + 2 * (rank // 2)  # micro-batches of two go to two data ranks in turns
                assert record.samples == ([] if rank % 2 else [(begin, begin + 2), (begin + 4, begin + 6)])
                assert record.value("sample_position") == 8 * at + 8
                assert record.value("param_hash") is None
                assert (record.value("shard_grad_norm") or 9) < wanted["norm"]
            (start,) = events(tmp_path, "start", name, rank)
            assert start.fields["parallel"] == {
                "tensor": [rank % 2, 2],
                "pipeline": [0, 1],
                "context": [0, 1],
                "expert": [0, 1],
                "data": [rank // 2, 2],
            }
            assert said[rank][f"{name}_notices"] == []


@pytest.mark.slow
def test_the_last_stage_of_a_pipeline_owns_the_loss_and_a_tied_table_counts_once(tmp_path: Path) -> None:
    body = """
loop = make(pipeline=2, tied=True)
exporter = watch(loop, "run")
for _ in range(3):
    loop.step(exporter, norms)
exporter.close()
say(steps=loop.steps, notices=exporter.notices)
"""
    said = watched(body, tmp_path, 2)
    assert [step["loss"] for step in said[0]["steps"]] == [None] * 3
    for rank in (0, 1):
        assert said[rank]["notices"] == []
        for at, record in enumerate(records(tmp_path, rank)):
            wanted = said[rank]["steps"][at]
            assert record.value("grad_norm", "all") == wanted["norm"]
            assert close(record.signals["grad_norm"], wanted["norms"], 1e-5)
            assert record.value("loss") == pytest.approx(said[1]["steps"][at]["loss"], rel=1e-6)
            assert record.value("rank_loss") == (None if rank == 0 else record.value("loss"))
            assert record.ranks["loss"].n == 1
            assert record.samples == ([] if rank else [(4 * at, 4 * at + 4)])


@pytest.mark.slow
def test_plain_replicas_are_compared_and_weights_are_the_same_to_the_last_bit_without_an_exporter(
    tmp_path: Path,
) -> None:
    body = """
def train(run):
    loop = make("bf16")
    exporter = watch(loop, run)
    for _ in range(4):
        loop.step(exporter)
    exporter.close()
    return loop, exporter

loop, exporter = train("run")
os.environ["TRAINWARDEN_DISABLE"] = "1"
other, off = train("off")
same = all(torch.equal(one, two) for one, two in zip(loop.model[0].parameters(), other.model[0].parameters(), strict=True))
say(same=same, off=[off.global_step, off.start_id, "step" in vars(other.optimizer)], notices=exporter.notices)
"""
    said = watched(body, tmp_path, 2)
    assert [each["same"] for each in said] == [True, True]
    assert [each["off"] for each in said] == [[4, None, False]] * 2
    assert [each["notices"] for each in said] == [[], []]
    ranks = [records(tmp_path, rank) for rank in (0, 1)]
    assert not (tmp_path / "off").exists()
    for one, two in zip(*ranks, strict=True):
        assert one.value("param_hash") == two.value("param_hash") is not None
        assert one.value("grad_norm", "all") == two.value("grad_norm", "all") is not None
        assert one.value("shard_grad_norm") is None


@pytest.mark.slow
def test_losses_come_in_all_the_forms_that_megatron_has_and_what_is_of_no_use_is_said_at_once(tmp_path: Path) -> None:
    body = """
import math
loop = make("fp16", clip=0.0)
exporter = watch(loop, "run", micro_batch_size=None)
pair = lambda total, tokens: torch.tensor([total, tokens])
for given in (
    [{"lm loss": pair(6.0, 2.0), "mtp_1 loss": pair(8.0, 2.0)}, {"lm loss": pair(2.0, 2.0), "mtp_1 loss": pair(2.0, 8.0)}],
    [{"lm loss": (torch.tensor(6.0), torch.tensor(2))}, {"lm loss": (torch.tensor(2.0), torch.tensor(2))}],
    [{"lm loss": torch.tensor(3.0)}, {"lm loss": torch.tensor(4.0)}],
    {"lm loss": torch.tensor(5.0), "loss_scale": torch.tensor(7.0)},
    torch.tensor(6.0),
    [],
    [{"lm loss": pair(math.nan, 2.0)}],
    [{"lm loss": torch.zeros(3)}],
    "no loss",
):
    loop.step()
    exporter.step(given)
exporter.close()

def refused(*args, **others):
    try:
        attach(*args, **others)
    except (TypeError, ValueError) as error:
        return str(error)

said = [refused(loop.model, torch.optim.SGD(loop.model[0].parameters())), refused([], loop.optimizer),
        refused([loop.model], loop.optimizer), refused(loop.model, loop.optimizer, micro_batch_size=0)]
say(steps=loop.steps, notices=exporter.notices, refused=said)
"""
    (said,) = watched(body, tmp_path)
    found = records(tmp_path)
    assert [record.value("loss") for record in found[:6]] == [2.0, 2.0, 3.5, 5.0, 6.0, None]
    assert found[6].value("nonfinite", "loss") == 1.0
    assert [record.value("loss") for record in found[7:]] == [None, None]
    assert [record.value("mtp_1_loss") for record in found[:2]] == [1.0, None]
    assert found[3].value("log_loss_scale") == 7.0
    assert [record.value("sample_position") for record in found] == [None] * 9
    for record, step in zip(found, said["steps"], strict=True):  # a norm is taken without clipping, too
        assert record.value("grad_norm", "all") == step["norm"] is not None
        assert record.value("clip_ratio") is None
    assert len(said["notices"]) == 1
    assert "losses" in said["notices"][0]
    for sentence, begin in zip(
        said["refused"], ("optimizer: SGD", "model:", "model: list", "micro_batch_size: 0"), strict=True
    ):
        assert sentence.startswith(begin)


@pytest.mark.slow
def test_checkpoints_are_complete_when_megatron_says_so_and_a_plan_names_the_one_to_load(tmp_path: Path) -> None:
    body = """
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from trainwarden.exporter.adapters.megatron import checkpoint_path
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.runfolder import RunFolder

kept = folder / "kept"
tracker = kept / "latest_checkpointed_iteration.txt"

def write(iteration):
    checkpoint_path(kept, iteration).mkdir(parents=True)
    (checkpoint_path(kept, iteration) / "common.pt").write_bytes(b"state")

def train(count, loop, exporter):
    for _ in range(count):
        loop.step(exporter)

loop = make()
exporter = watch(loop, "run")
said = [exporter.iteration_to_load(kept)]
exporter.resumed(0, consumed_samples=0)
train(2, loop, exporter)
write(2)
tracker.write_text("2")
exporter.saved(2, kept)                    # written by now
train(1, loop, exporter)
write(3)
exporter.saved(3, kept)                    # the tracker file still names the one before
train(1, loop, exporter)
write(4)
request = AsyncRequest(None, (), [])
exporter.saved(4, kept, request)           # a request of dist_checkpointing.save that is not scheduled yet
train(2, loop, exporter)
tracker.write_text("3")
train(1, loop, exporter)
request.execute_sync()
write(7)
exporter.saved(7, kept)                    # never finished
exporter.close()

runs = RunFolder("run", folder)
plan = Plan(plan_id="p", run_uid=runs.identity().run_uid, for_attempt=1, target=Target(attempt=0, step=2, path=str(kept / "iter_0000002")),
            lr_factor=0.5, reset_optimizer=True, skip_samples=[(16, 20)], skip_epoch=0)
runs.write_plan(plan)
runs.write_ledger(Ledger(run_uid=plan.run_uid, entries=[
    LedgerEntry(plan_id="p", for_attempt=1, target_step=2, skip_samples=plan.skip_samples, skip_epoch=0)]))
again = make()
after = watch(again, "run")
said += [after.iteration_to_load(kept), after.iteration_to_load(folder / "elsewhere")]
again.consumed = 8
after.resumed(2, consumed_samples=8)
train(2, again, after)
after.close()
say(loaded=said, notices=[exporter.notices, after.notices])
"""
    (said,) = watched(body, tmp_path)
    assert said["loaded"] == [None, 2, None], said["notices"]
    reported = [(event.fields["path"].rpartition("/")[2], event.step) for event in events(tmp_path, "checkpoint")]
    assert reported == [("iter_0000002", 2), ("iter_0000003", 3), ("iter_0000004", 4)]
    assert all(event.fields["complete"] and event.fields["finite"] for event in events(tmp_path, "checkpoint"))
    assert [len(notices) for notices in said["notices"]] == [0, 1]
    assert "elsewhere" in said["notices"][1][0]
    found = records(tmp_path)
    assert [record.step for record in found] == [*range(1, 8), 3, 4]
    assert (
        [record.samples for record in found[-2:]]
        == [record.samples for record in found[2:4]]
        == [[(8, 12)], [(12, 16)]]
    )
    applied = events(tmp_path, "start")[1].fields["plan_applied"]
    assert (applied["start_step"], applied["lr_factor"], applied["reset_optimizer"]) == (3, 0.5, True)
    assert list(applied["not_applied"]) == ["skip_samples", "skip_mode"][: len(applied["not_applied"])]
    assert "Megatron's samplers" in applied["not_applied"]["skip_samples"]
    rate = found[1].value("lr", "all") or 0  # the schedule begins anew here; the second of ten steps of re-warm-up
    assert found[-1].value("lr", "all") == pytest.approx(rate * 0.5 * 2 / 10, rel=1e-6)


@pytest.mark.slow
def test_the_example_runs_on_two_ranks_and_goes_on_where_it_was_when_it_is_called_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"  # on GPUs it is called as it is; the writers of checkpoints are spawned from it
    script.write_text(
        "import runpy, sys\n"
        "import torch.distributed as dist\n"
        "if __name__ == '__main__':\n"
        "    from tests.exporter.adapters.megatron_loop import on_cpu\n"
        "    on_cpu()\n"
        "    dist.init_process_group('gloo')\n"
        "    runpy.run_path(sys.argv[1])['main'](5)\n"
        "    dist.destroy_process_group()\n"
    )
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node=2", str(script), str(ROOT / "examples/megatron_core.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for said in ("iterations 1 to 5 ", "iterations 6 to 10 "):
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert said in ran.stdout
    runs = tmp_path / ".trainwarden"
    found = records(runs, run="megatron-core")
    assert [record.step for record in found] == list(range(1, 11))
    assert [record.samples for record in found] == [[(8 * at, 8 * at + 8)] for at in range(10)]
    losses = [record.value("loss") or 0 for record in found]
    assert losses[9] < losses[5] < losses[0]
    assert [record.value("optimizer_step") for record in found] == list(range(1, 11))
    first, second = events(runs, "start", "megatron-core")
    assert second.fields["resumed_from"]["path"].endswith(".megatron-core/iter_0000005")
    assert [len(event.fields["notices"]) for event in (first, second)] == [0, 0]


@pytest.mark.slow
def test_the_training_thread_reads_no_value_of_a_tensor_that_megatron_does_not_read_itself(tmp_path: Path) -> None:
    body = """
from torch.utils._python_dispatch import TorchDispatchMode

class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

def reads(precision, sharded, scale, watched):
    loop = make(precision, sharded=sharded, loss_scale=scale)
    exporter = watch(loop, "run") if watched else None
    with Reads() as mode:
        for _ in range(3):
            loop.step(exporter)
    if exporter is not None:
        exporter.close()
    return mode.count

cases = (("fp32", False, 1.0), ("bf16", True, 1.0), ("fp16", False, 2.0**16), ("fp16", True, 2.0**60))
say(reads=[[reads(*case, watched) for watched in (False, True)] for case in cases])
"""
    (said,) = watched(body, tmp_path)
    assert all(alone == beside > 0 for alone, beside in said["reads"]), said["reads"]


@pytest.mark.slow
def test_a_guard_judges_by_the_norm_before_megatron_clips_and_leaves_weights_as_they_were(tmp_path: Path) -> None:
    body = """
from trainwarden.exporter.guard import Guard

limit = 1.45
loop = make("bf16", tensor=world, sharded=world > 1)
exporter = watch(loop, f"run-{world}")
guard = Guard(exporter, limit=limit, same_norm=True)
changed = []
for _ in range(8):
    before = [parameter.detach().clone() for parameter in loop.model[0].parameters()]
    loop.step(exporter)
    after = loop.model[0].parameters()
    changed.append(not all(torch.equal(one, two) for one, two in zip(before, after, strict=True)))
exporter.close()
say(steps=loop.steps, changed=changed)
"""
    for world in (1, 2):
        for rank, said in enumerate(watched(body, tmp_path, world)):
            found = records(tmp_path, rank, f"run-{world}")
            refused = [step["norm"] > 1.45 for step in said["steps"]]  # clipped, all of them are at most 1.0
            assert True in refused, said["steps"]
            assert False in refused, said["steps"]
            assert [record.value("grad_norm", "all") for record in found] == [step["norm"] for step in said["steps"]]
            assert [record.value("guard_skipped_steps", "limit") for record in found] == [float(one) for one in refused]
            moved = [step["lr"] > 0 and not no for step, no in zip(said["steps"], refused, strict=True)]
            assert said["changed"] == moved
