"""All ranks skip the same updates, whoever's gradient is bad, and the guard adds no collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.ranks.harness import records, run

#: What the bodies share: a model on two ranks, trained on given batches, with or without a guard.
TRAINING = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from trainwarden.exporter.guard import Guard

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def train(kind, steps, poison, name=None, clipping="clip", fused=False, **bounds):
    model = make(width=16)
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    exporter = None
    if name is not None:
        exporter = watch(model, optimizer, folder, run=name, cadence=1, side_group=False)
        Guard(exporter, **bounds)
    counts = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        if step in poison and rank == 1:  # one number on one rank, after gradients were reduced
            gradient = next(p.grad for p in model.parameters() if getattr(p.grad, "_local_tensor", p.grad).numel())
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = poison[step]
        with CommDebugMode() as comms:
            if clipping == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            elif clipping == "parts":  # as torchtitan does
                total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                total = whole(total)
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
            elif clipping == "measure":
                torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()
        counts.append(sum(comms.get_comm_counts().values()))
        if exporter is not None:
            exporter.step(loss)
    if exporter is not None:
        exporter.close()
    state = [p.detach() for p in model.parameters()]
    state += [optimizer.state[p][n] for p in model.parameters() for n in ("step", "exp_avg", "exp_avg_sq")]
    return [whole(tensor) for tensor in state], counts, [] if exporter is None else exporter.notices

def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))
"""

NAN_ON_ONE = """
poison = {1: float("nan"), 4: float("inf")}
sound = [step for step in range(1, 8) if step not in poison]
for clipping in ("clip", "parts", "measure"):
    for fused in (False, True):
        key = f"{clipping}-{fused}"
        got, counts, notices = train("fsdp2", range(1, 8), poison, key, clipping, fused)
        wanted, bare, _ = train("fsdp2", sound, {}, None, clipping, fused)
        say(**{key: same(got, wanted), key + " adds": sorted(set(counts)) != sorted(set(bare)),
               key + " faults": [said for said in notices if "copies" not in said]})
"""

DDP = """
# Under DDP gradients are equal on all ranks once they are reduced: so is what is not finite in them.
sound = [1, 2, 4, 5]
for clipping in ("clip", "none"):
    for fused in (False, True):
        key = f"{clipping}-{fused}"
        original = loss_of
        def loss_of(model, number, original=original):
            loss = original(model, number)
            return loss * float("nan") if number == 31 else loss  # the third step of rank 1
        got, counts, notices = train("ddp", range(1, 6), {}, key, clipping, fused)
        loss_of = original
        wanted, bare, _ = train("ddp", sound, {}, None, clipping, fused)
        say(**{key: same(got, wanted), key + " adds": sorted(set(counts)) != sorted(set(bare)),
               key + " faults": [said for said in notices if "copies" not in said]})
"""


def script(*parts: str) -> str:
    return "\n".join(parts)


@pytest.mark.slow
def test_fsdp2_ranks_skip_what_one_shard_alone_shows(tmp_path: Path) -> None:
    ended = run(script(TRAINING, NAN_ON_ONE), tmp_path, world=2, seconds=180)
    keys = [f"{clipping}-{fused}" for clipping in ("clip", "parts", "measure") for fused in (False, True)]
    for each in ended:
        assert {key: each.said[key] for key in keys} == dict.fromkeys(keys, True)
        assert {key: each.said[f"{key} adds"] for key in keys} == dict.fromkeys(keys, False)
        assert {key: each.said[f"{key} faults"] for key in keys} == {key: [] for key in keys}
    for key in keys:
        for rank in (0, 1):
            skipped = [record.step for record in records(tmp_path, rank, key) if record.value("skipped") == 1]
            assert skipped == [1, 4], (key, rank)


@pytest.mark.slow
def test_ddp_ranks_skip_what_one_ranks_batch_brought(tmp_path: Path) -> None:
    ended = run(script(TRAINING, DDP), tmp_path, world=2, seconds=180)
    keys = [f"{clipping}-{fused}" for clipping in ("clip", "none") for fused in (False, True)]
    for each in ended:
        assert {key: each.said[key] for key in keys} == dict.fromkeys(keys, True)
        assert {key: each.said[f"{key} adds"] for key in keys} == dict.fromkeys(keys, False)
        assert {key: each.said[f"{key} faults"] for key in keys} == {key: [] for key in keys}
    for key in keys:
        for rank in (0, 1):
            skipped = [record.step for record in records(tmp_path, rank, key) if record.value("skipped") == 1]
            assert skipped == [3], (key, rank)


LIMITS = """
poison = {3: 1e6, 6: 1e6}
sound = [step for step in range(1, 8) if step not in poison]
got, counts, notices = train("fsdp2", range(1, 8), poison, "limit", "clip", True, factor=50.0, window=4)
wanted, *_ = train("fsdp2", sound, {}, None, "clip", True)
say(same=same(got, wanted))
"""


@pytest.mark.slow
def test_ranks_skip_a_surge_that_one_shard_alone_holds(tmp_path: Path) -> None:
    for each in run(script(TRAINING, LIMITS), tmp_path, world=2, seconds=120):
        assert each.said["same"] is True
    for rank in (0, 1):
        found = records(tmp_path, rank, "limit")
        assert [record.step for record in found if record.value("guard_skipped_steps", "surge") == 1] == [3, 6]


REFUSED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

def refusal(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"

def guard_of(model, name, **bounds):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    exporter = watch(model, optimizer, folder, run=name, side_group=False)
    return Guard(exporter, **bounds), optimizer, exporter

say(plain=refusal(lambda: guard_of(make(), "plain")))
say(promised=refusal(lambda: guard_of(make(), "promised", same_norm=True)))
say(unclipped=refusal(lambda: train("fsdp2", [1], {}, "unclipped", "none", True)))

def half():
    model = fully_shard(make())
    _, optimizer, exporter = guard_of(model, "half")
    loss_of(model, 1).backward()
    torch.nn.utils.clip_grad_norm_(list(model.parameters())[:3], 1.0)
    optimizer.step()

say(half=refusal(half))

def partial():
    model = fully_shard(make())
    _, optimizer, exporter = guard_of(model, "partial")
    loss_of(model, 1).backward()
    from torch.distributed.tensor import DTensor, Partial
    total = DTensor.from_local(torch.ones(()), model.wte.weight.device_mesh, [Partial("sum")])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)
    optimizer.step()

say(partial=refusal(partial))

def by_hand():
    model = make()
    _, optimizer, exporter = guard_of(model, "hand", same_norm=True)
    loss_of(model, 1).backward()
    optimizer.step()

say(by_hand=refusal(by_hand))
say(old=refusal(lambda: guard_of(FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu")), "old")))
"""


@pytest.mark.slow
def test_where_ranks_could_decide_differently_the_guard_refuses(tmp_path: Path) -> None:
    for each in run(script(TRAINING, REFUSED), tmp_path, world=2, seconds=120):
        said = each.said
        assert said["plain"].startswith("ValueError")
        assert "same_norm=True" in said["plain"]
        assert said["promised"] is None
        assert said["unclipped"].startswith("RuntimeError")
        assert "were not clipped before its step" in said["unclipped"]
        assert 'float("inf")' in said["unclipped"]
        assert "5 of the 8" in said["half"]
        assert "full_tensor()" in said["partial"]
        assert "not clipped" in said["by_hand"]
        assert "FullyShardedDataParallel" in said["old"]


EMBEDDINGS = """
for kind in ("ddp", "fsdp2"):
    found = []
    for alpha in (1.0, 0.1):
        model = make(width=16)
        if kind == "fsdp2":
            fully_shard(model.wte)
        model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        exporter = watch(model, optimizer, folder, run=f"{kind}-{alpha}", side_group=False)
        guard = Guard(exporter)
        names = guard.shrink_embeddings(alpha=alpha)
        loss_of(model, rank).backward()
        found.append({name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()})
        exporter.close()
    plain, shrunk = found
    table = torch.allclose(shrunk.pop("wte.weight"), plain.pop("wte.weight") * 0.1, rtol=1e-5, atol=1e-9)
    say(**{kind: [names, table, all(torch.equal(plain[name], shrunk[name]) for name in plain)]})
"""


@pytest.mark.slow
def test_the_shrink_holds_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    for each in run(script(TRAINING, EMBEDDINGS), tmp_path, world=2, seconds=120):
        for kind in ("ddp", "fsdp2"):
            names, table, rest = each.said[kind]
            assert [name.removeprefix("module.") for name in names] == ["wte"]
            assert table
            assert rest
