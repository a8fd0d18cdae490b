"""A rank's own gradient norm before it is reduced, under DDP in its many settings and under FSDP2; training goes on bit by bit the same."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.exporter.ranks.harness import records, run

#: Trains the same model twice, unwatched and watched, and says what the gradient of a copy without DDP has for a norm.
BODY = """
import contextlib, copy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
STEPS, MICRO = 4, 2

class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = make()
        self.spare = nn.Linear(4, 4)
    def forward(self, ids):
        return self.block(ids)

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), make(), nn.Linear(31, 31)
    def forward(self, ids):
        x = self.block(ids)
        return self.last(checkpoint(lambda y: y + self.block.lm_head(self.first(self.block.wte(ids))), x, use_reentrant=True))

def powersgd(ddp):
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)

def compress(ddp):
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)

def train(case, watched):
    torch.manual_seed(3)
    options = dict(case.get("ddp", {}))
    module = case.get("model", make)().to(case.get("dtype", torch.float32))
    ddp = DDP(module, **options)
    if case.get("hook") and not case.get("late"):
        case["hook"](ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if case.get("scaler") else None
    exporter = watch(ddp if not case.get("inner") else module, optimizer, folder, run=case["name"], **{"cadence": 1, **case.get("watch", {})}) if watched else None
    if case.get("hook") and case.get("late"):
        case["hook"](ddp)
    wanted = []
    for step in range(STEPS):
        reference = copy.deepcopy(module).double()
        for micro in range(case.get("micro", 1)):
            seed = 100 * step + 10 * micro + rank
            loss_of(reference, seed).backward()
            last = micro == case.get("micro", 1) - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = loss_of(ddp, seed)
                (scaler.scale(loss) if scaler else loss).backward()
        wanted.append(float(torch.stack([p.grad.double().norm() for p in reference.parameters() if p.grad is not None]).norm()))
        if scaler:
            scaler.step(optimizer); scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=not case.get("keep"))
        if exporter:
            exporter.step(loss)
    if exporter:
        exporter.close()
    return [p.detach().clone() for p in module.parameters()], wanted, exporter

CASES = [
    dict(name="plain"),
    dict(name="views", ddp=dict(gradient_as_bucket_view=True)),
    dict(name="kept-views", ddp=dict(gradient_as_bucket_view=True), keep=True),
    dict(name="small-buckets", ddp=dict(bucket_cap_mb=0.0005)),
    dict(name="accumulated", micro=3),
    dict(name="accumulated-views", micro=3, ddp=dict(gradient_as_bucket_view=True)),
    dict(name="static", ddp=dict(static_graph=True), model=Partly),
    dict(name="unused", ddp=dict(find_unused_parameters=True), model=Partly),
    dict(name="bf16", dtype=torch.bfloat16),
    dict(name="scaled", scaler=True),
    dict(name="compressed", hook=compress),
    dict(name="compressed-later", hook=compress, late=True),
    dict(name="powersgd", hook=powersgd, late=True),
    dict(name="off", watch=dict(own_gradients=False)),
    dict(name="inner", inner=True),
    dict(name="nested", model=Checkpointed, ddp=dict(static_graph=True)),
    dict(name="seldom-views", ddp=dict(gradient_as_bucket_view=True), watch=dict(cadence=3, watch_steps=0)),
]
for case in CASES:
    plain, _, _ = train(case, False)
    seen, wanted, exporter = train(case, True)
    say(**{case["name"]: {"same": all(torch.equal(a, b) for a, b in zip(plain, seen)), "wanted": wanted, "notices": exporter.notices}})
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank says of each case, with the norms that its records hold."""
    folder = tmp_path_factory.mktemp("own")
    told: dict[str, list[dict[str, Any]]] = {}
    for ended in run(BODY, folder, world=3):
        for name, values in ended.said.items():
            own = [step.value("rank_grad_norm") for step in records(folder, ended.rank, name)]
            seconds = [step.value("rank_compute_seconds") for step in records(folder, ended.rank, name)]
            told.setdefault(name, []).append(values | {"found": own, "seconds": seconds})
    return told


MEASURED = (
    "plain",
    "views",
    "kept-views",
    "small-buckets",
    "accumulated",
    "accumulated-views",
    "unused",
    "bf16",
    "scaled",
    "compressed",
    "compressed-later",
    "powersgd",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_each_rank_records_the_norm_of_its_own_gradient_before_ddp_reduces_it(
    case: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    near = 0.02 if case == "bf16" else 1e-5
    for rank in found[case]:
        assert rank["found"] == pytest.approx(rank["wanted"], rel=near)
        assert rank["notices"] == []
    assert len({rank["found"][0] for rank in found[case]}) == 3


@pytest.mark.slow
def test_what_ddp_trains_is_bit_by_bit_what_it_is_unwatched(found: dict[str, list[dict[str, Any]]]) -> None:
    assert len(found) == 17
    assert [name for name, ranks in found.items() if not all(rank["same"] for rank in ranks)] == []


@pytest.mark.slow
def test_the_first_pass_of_a_static_graph_is_reduced_before_it_can_be_seen(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in found["static"]:
        assert rank["found"][0] is None
        assert rank["found"][1:] == pytest.approx(rank["wanted"][1:], rel=1e-5)


@pytest.mark.slow
def test_views_of_buckets_are_looked_at_in_the_steps_that_are_due(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["seldom-views"]:
        assert [value is not None for value in rank["found"]] == [True, False, True, False]


@pytest.mark.slow
def test_the_norm_is_absent_where_it_is_turned_off_or_no_ddp_is_to_be_seen(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for case in ("off", "inner"):
        for rank in found[case]:
            assert rank["found"] == rank["seconds"] == [None] * 4


@pytest.mark.slow
def test_reentrant_checkpointing_leaves_the_norm_out_and_says_so_once(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["nested"]:
        assert all(
            value is None or math.isclose(value, want, rel_tol=1e-5)
            for value, want in zip(rank["found"], rank["wanted"], strict=True)
        )
        assert len(rank["notices"]) <= 1


@pytest.mark.slow
def test_the_time_of_a_ranks_own_work_is_recorded_and_within_the_step(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in found["plain"]:
        assert all(0 < seconds < 60 for seconds in rank["seconds"])
