"""DeepSpeed's engine under the adapter: the real library on CPUs, one and two processes over gloo, every stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exporter.ranks.harness import close, records, run
from tests.exporter.runs import events

STAGES = (0, 1, 2, 3)

EVERY_STAGE = """
torch.set_num_threads(1)
from tests.exporter.adapters.engines import engine_of, reference, settle, train, watched
from tests.exporter.runs import by_group, norm64

told = {}
for run, stage, precision, others in (
    ("fp32-0", 0, "fp32", {}), ("fp32-1", 1, "fp32", {}), ("fp32-2", 2, "fp32", {}), ("fp32-3", 3, "fp32", {}),
    ("bf16-0", 0, "bf16", {}), ("bf16-2", 2, "bf16", {}), ("bf16-3", 3, "bf16", {}),
    ("bf16-1", 1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
):
    engine = engine_of(stage, precision, **others)
    exporter = watched(engine, folder, run)
    norms = train(engine, 4)
    told[run] = {"norms": norms, "notices": settle(exporter), "kind": type(engine.optimizer).__name__}
    left = {"backward", "step", "save_checkpoint", "load_checkpoint", "clip_fp32_gradients"} & set(vars(engine))
    assert not left and not engine._forward_pre_hooks, left
wanted = [(loss, {group: norm64([one.grad for one in own]) for group, own in by_group(model).items()})
          for loss, model in reference(4, world)]
say(told=told, wanted=wanted)
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stages")
    return folder, run(EVERY_STAGE, folder, world=2)[0].said


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_loss_and_norms_by_group_are_those_of_one_process_at_every_stage(
    stages: tuple[Path, dict[str, Any]], stage: int
) -> None:
    folder, said = stages
    told = said["told"][f"fp32-{stage}"]
    assert told["notices"] == []
    own = [records(folder, rank, f"fp32-{stage}") for rank in (0, 1)]
    assert [[record.step for record in found] for found in own] == [[1, 2, 3, 4]] * 2
    for at, (loss, norms) in enumerate(said["wanted"]):
        for found in own:
            signals = found[at].signals
            assert close(signals["loss"], loss), (at, signals["loss"], loss)
            assert close(signals["grad_norm"], norms), (at, signals["grad_norm"], norms)
            assert close(signals["clip_ratio"], norms["all"] / 0.3)
            assert signals["lr"] == {"all": 0.01, "0": 0.01, "1": 0.01}
            assert signals["optimizer_step"] == at + 1
        mean = sum(found[at].value("rank_loss") or 0.0 for found in own) / 2
        assert mean == pytest.approx(loss, rel=1e-5)
    if stage:
        assert [record.value("grad_norm") for record in own[0]] == pytest.approx(told["norms"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES[1:])
def test_weights_moments_and_updates_of_partitions_are_those_of_a_run_without_zero(
    stages: tuple[Path, dict[str, Any]], stage: int
) -> None:
    folder, _ = stages
    for rank in (0, 1):
        for plain, cut in zip(records(folder, rank, "fp32-0"), records(folder, rank, f"fp32-{stage}"), strict=True):
            for signal in ("weight_rms", "moment_rms", "update_ratio", "update_applied_ratio", "grad_zero_ratio"):
                assert close(cut.signals[signal], plain.signals[signal], 2e-4), (signal, cut.signals[signal])
            hashes = (plain.value("param_hash"), cut.value("param_hash"))
            assert (hashes[1] is None) == (stage == 3)  # nobody holds the whole of it there


@pytest.mark.slow
def test_replicas_that_zero_gathers_hash_alike_on_both_ranks(stages: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = stages
    for name in ("fp32-1", "bf16-2", "bf16-0"):
        one, other = ([record.value("param_hash") for record in records(folder, rank, name)] for rank in (0, 1))
        assert one == other
        assert len(set(one)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bf16-0", "FP16_UnfusedOptimizer"),
        ("bf16-1", "BF16_Optimizer"),
        ("bf16-2", "DeepSpeedZeroOptimizer"),
        ("bf16-3", "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_in_bfloat16_norms_are_the_engines_and_its_groups_add_up_to_them(
    stages: tuple[Path, dict[str, Any]], name: str, kind: str
) -> None:
    folder, said = stages
    told = said["told"][name]
    assert (told["kind"], told["notices"]) == (kind, [])
    for rank in (0, 1):
        found = records(folder, rank, name)
        assert [record.value("grad_norm") for record in found] == pytest.approx(told["norms"], rel=1e-6)
        for record, (loss, norms) in zip(found, said["wanted"], strict=True):
            assert record.value("loss") == pytest.approx(loss, rel=1e-2)
            groups = record.signals["grad_norm"]
            assert isinstance(groups, dict)
            assert groups.keys() == norms.keys()
            squares = sum(float(str(value)) ** 2 for group, value in groups.items() if group != "all")
            assert squares**0.5 == pytest.approx(groups["all"], rel=1e-5)
    (start,) = events(folder, "start", name)
    assert (start.fields["precision"], start.fields["optimizer_state_dtype"]) == ("bfloat16", "float32")
    assert (start.fields["parameters"], start.fields["deepspeed"]["zero_stage"]) == (656, int(name[-1]))


ONE_PROCESS = """
torch.set_num_threads(1)
import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from tests.exporter.adapters.engines import engine_of, loss_on, micro_batch, settle, train, watched
from trainwarden.exporter.adapters.deepspeed import attach
from trainwarden.exporter.guard import Guard
from trainwarden.plan import Plan
from trainwarden.runfolder import RunFolder

def poisoned(engine, steps, bad):
    for number in range(2 * steps):
        loss = loss_on(engine, micro_batch(number, 0, 1))
        engine.backward(loss * float("inf") if number // 2 + 1 == bad else loss)
        engine.step()

told = {}
for run, stage, precision, others in (
    ("fp16-0", 0, "fp16", {}), ("fp16-2", 2, "fp16", {}), ("fp16-3", 3, "fp16", {}),
    ("bf16-2", 2, "bf16", {}), ("fp32-1", 1, "fp32", {}), ("fp32-3", 3, "fp32", {}),
):
    engine = engine_of(stage, precision, **others)
    exporter = watched(engine, folder, run)
    poisoned(engine, 4, bad=3)
    told[run] = {"skipped": engine.skipped_steps, "notices": settle(exporter)}

half = {"enabled": True, "initial_scale_power": 8, "min_loss_scale": 256, "hysteresis": 1}
engine = engine_of(2, "fp16", fp16=half)
exporter = watched(engine, folder, "minimum")
with pytest.raises(Exception, match="minimum"):
    poisoned(engine, 4, bad=2)
settle(exporter)

# Losses that the script has divided itself, and an end of the step that the script sets.
engine = engine_of(1)
exporter = watched(engine, folder, "divided")
for number in range(6):
    engine.set_gradient_accumulation_boundary(number % 3 == 2)
    loss = loss_on(engine, micro_batch(number, 0, 1))
    engine.backward(loss / 2, scale_wrt_gas=False)
    if number % 3 == 2:
        engine.step()
    told.setdefault("losses", []).append(float(loss.detach()))
told["divided"] = settle(exporter)

# The script ends the steps by calling step() alone, of as many micro-batches as it likes.
engine = engine_of(2, managed_gradient_accumulation=False)
exporter = watched(engine, folder, "unmanaged")
for number in range(4):
    loss = loss_on(engine, micro_batch(number, 0, 1))
    engine.backward(loss)
    if number in (0, 3):
        engine.step()
told["unmanaged"] = [engine.global_steps, settle(exporter)]

# The engine's own loader, and its batches as they were.
engine = engine_of(1, training_data=list(tokens(7, rows=24)))
exporter = watched(engine, folder, "own")
loader = exporter.wrap(engine.training_dataloader, seed=1, reserve=0)
for batch in loader:
    engine.backward(loss_on(engine, batch))
    engine.step()
told["own"] = [len(loader), tuple(batch.shape), settle(exporter)]

# What is offloaded is not measured, and not reset.
engine = engine_of(1, "bf16")
exporter = watched(engine, folder, "offloaded")
train(engine, 1)
settle(exporter)
where = RunFolder("offloaded", folder)
where.write_plan(Plan(plan_id="p1", run_uid=where.identity().run_uid, for_attempt=1, target=None, reset_optimizer=True))
engine = engine_of(1, "bf16", lr=(3e-3, 1e-3))
engine.zero_nvme_offload_optimizer = lambda: True
exporter = watched(engine, folder, "offloaded")
told["norms"] = train(engine, 2)
told["offloaded"] = settle(exporter)

class Reads(TorchDispatchMode):
    # How often the training thread reads a value of a tensor: each is a wait, where that is on a device.
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

def reads(stage, precision, watch):
    engine = engine_of(stage, precision)
    exporter = watched(engine, folder, "reads") if watch else None
    train(engine, 2)
    with Reads() as mode:
        train(engine, 2, first=2)
    if watch:
        settle(exporter)
    return mode.count

told["reads"] = [[reads(*case, watch) for watch in (False, True)] for case in ((2, "bf16"), (3, "fp16"), (0, "bf16"))]

for stage, precision in ((1, "fp32"), (0, "bf16")):
    exporter = watched(engine_of(stage, precision), folder, "guarded")
    with pytest.raises(ValueError, match="DeepSpeed"):
        Guard(exporter)
    settle(exporter)

def weights(watch):
    engine = engine_of(2, "bf16")
    exporter = watched(engine, folder / "again", "run") if watch else None
    train(engine, 3)
    if watch:
        told["off"] = [exporter.global_step, settle(exporter)]
    return [one.detach().clone() for one in engine.module.parameters()]

plain, seen = weights(False), weights(True)
assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
os.environ["TRAINWARDEN_DISABLE"] = "1"
off = weights(True)
assert all(torch.equal(one, other) for one, other in zip(plain, off, strict=True))

refusals = []
for given in (engine.module, None):
    with pytest.raises(TypeError) as error:
        attach(given)
    refusals.append(str(error.value))
say(told=told, refusals=refusals)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(ONE_PROCESS, folder, world=1)[0].said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16-0", "fp16-2", "fp16-3", "bf16-2", "fp32-1", "fp32-3"])
def test_a_step_that_the_engine_skips_is_a_record_without_a_norm_that_says_so(
    alone: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, said = alone
    assert said["told"][name] == {"skipped": 1, "notices": []}
    found = records(folder, 0, name)
    assert [record.value("skipped") for record in found] == [0, 0, 1, 0]
    assert [record.value("grad_norm") is None for record in found] == [False, False, True, False]
    ahead = 1 if name == "fp16-0" else 0  # DeepSpeed steps that optimizer once to make its state
    assert [record.value("optimizer_step") for record in found] == [1 + ahead, 2 + ahead, None, 3 + ahead]
    assert [record.value("update_ratio") == 0 for record in found] == [False, False, True, False]
    assert [record.value("lr") for record in found] == [0.01] * 4
    scaled = name.startswith("fp16")
    assert [record.value("loss_scale") for record in found] == ([256, 256, 256, 128] if scaled else [None] * 4)
    assert [record.value("loss_scale_backoffs") for record in found] == ([0, 0, 1, 0] if scaled else [None] * 4)
    assert found[2].value("nonfinite", "grad") == (None if scaled else 1)
    if name == "fp16-0":  # this optimizer takes off a scale that nobody put on, and its norms are of what it gets
        zero = records(folder, 0, "fp16-2")
        assert found[0].value("grad_norm") == pytest.approx((zero[0].value("grad_norm") or 0) / 256, rel=2e-3)


@pytest.mark.slow
def test_where_deepspeed_gives_up_its_last_step_is_recorded(alone: tuple[Path, dict[str, Any]]) -> None:
    found = records(alone[0], 0, "minimum")
    assert [(record.step, record.value("skipped")) for record in found] == [(1, 0), (2, 1)]


@pytest.mark.slow
def test_the_script_may_divide_its_losses_and_end_the_step_itself(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, said = alone
    assert said["told"]["divided"] == []
    losses = said["told"]["losses"]
    assert [record.value("loss") for record in records(folder, 0, "divided")] == pytest.approx(
        [sum(losses[:3]) / 3, sum(losses[3:]) / 3], rel=1e-6
    )


@pytest.mark.slow
def test_steps_of_any_number_of_micro_batches_are_steps(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, said = alone
    assert said["told"]["unmanaged"] == [2, []]
    found = records(folder, 0, "unmanaged")
    assert [record.step for record in found] == [1, 2]
    assert all(record.value("loss") and record.value("grad_norm") for record in found)


@pytest.mark.slow
def test_the_engines_own_loader_has_positions(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, said = alone
    assert said["told"]["own"] == [6, [4, 12], []]
    assert [record.samples for record in records(folder, 0, "own")] == [[(0, 8)], [(8, 16)], [(16, 24)]]
    (start,) = events(folder, "start", "own")
    assert (start.fields["replayable"], start.fields["dataset_size"]) == (True, 24)


@pytest.mark.slow
def test_of_what_is_offloaded_the_engines_own_numbers_remain_and_a_reset_is_reported_as_not_done(
    alone: tuple[Path, dict[str, Any]],
) -> None:
    folder, said = alone
    assert [sentence.partition(":")[0] for sentence in said["told"]["offloaded"]] == [
        "norms and updates by group are left out"
    ]
    found = records(folder, 0, "offloaded")[1:]
    assert [record.signals["grad_norm"] for record in found] == [
        {"all": pytest.approx(norm, rel=1e-6)} for norm in said["told"]["norms"]
    ]
    assert [record.signals["lr"] for record in found] == [{"all": 3e-3, "0": 3e-3, "1": 1e-3}] * 2
    assert [record.value("optimizer_step") for record in found] == [1, 2]
    assert [record.value("clip_ratio") for record in found] == pytest.approx([n / 0.3 for n in said["told"]["norms"]])
    assert "weight_rms" not in found[0].signals
    applied = events(folder, "start", "offloaded")[1].fields["plan_applied"]
    assert applied["reset_optimizer"] is False
    assert "Swapped" in applied["not_applied"]["reset_optimizer"]


@pytest.mark.slow
def test_no_value_is_read_on_the_training_thread_but_by_deepspeed_itself(alone: tuple[Path, dict[str, Any]]) -> None:
    for plain, watched in alone[1]["told"]["reads"]:
        assert plain == watched > 0


@pytest.mark.slow
def test_it_changes_no_weight_and_switched_off_it_writes_nothing(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, said = alone
    assert said["told"]["off"] == [3, []]
    assert len(records(folder / "again")) == 3
    assert len(events(folder / "again", "start")) == 1


@pytest.mark.slow
def test_what_is_no_engine_is_refused_by_name(alone: tuple[Path, dict[str, Any]]) -> None:
    assert "Block is no DeepSpeedEngine" in alone[1]["refusals"][0]
