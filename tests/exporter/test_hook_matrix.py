"""{fused, foreach, for-loop} x {scaler, none} x {clipping, none} x {inf, finite}: right, absent or skipped, never scaled
or stale. Every value is compared with a float64 computation from a second model trained beside it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import Block, by_group, loss_of, make, norm64, steps, watch
from trainwarden.record import Step

KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False}}
CLIPS = ("none", "after_unscale", "before_unscale", "value")
BAD = 3  # the step with an infinite loss
STEPS = 6


def reference_norms(model: Block, step: int) -> dict[str, float]:
    """Gradient norms of a step before clipping and without any scale."""
    twin = Block()
    twin.load_state_dict(model.state_dict())
    loss_of(twin, step).backward()
    return {
        group: norm64([parameter.grad for parameter in parameters if parameter.grad is not None])
        for group, parameters in by_group(twin).items()
    }


@pytest.mark.parametrize(
    ("optimizer_class", "kind", "scaled", "clip", "bad"),
    [
        case
        for case in itertools.product((torch.optim.AdamW, torch.optim.SGD), KINDS, (True, False), CLIPS, (True, False))
        if case[2] or case[3] != "before_unscale"
    ],
)
def test_each_combination_gives_right_absent_or_skipped_values(
    tmp_path: Path, optimizer_class: type, kind: str, scaled: bool, clip: str, bad: bool
) -> None:
    model = make()
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **KINDS[kind])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    threshold = 0.5
    expected: list[dict[str, float]] = []
    scales: list[float] = []
    for step in range(1, STEPS + 1):
        expected.append(reference_norms(model, step))
        scales.append(scaler.get_scale() if scaled else 1.0)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if bad and step == BAD:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if clip in ("after_unscale", "value"):
            scaler.unscale_(optimizer)
        if clip in ("after_unscale", "before_unscale"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        exporter.step(loss)
        if bad and step == BAD and not scaled:
            break  # without a scaler the parameters are gone
    records = steps(exporter, tmp_path)
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    for record, want, scale in zip(records, expected, scales, strict=True):
        if bad and record.step == BAD:
            check_bad(record, scaled, scale)
            continue
        for group, value in want.items():
            assert record.value("grad_norm", group) == pytest.approx(value, rel=3e-6), (record.step, group)
        if clip in ("after_unscale", "before_unscale"):
            used = want["all"] * (scale if clip == "before_unscale" else 1.0)
            assert record.value("clip_ratio") == pytest.approx(used / threshold, rel=1e-5)
            assert record.value("clipped_steps") == (1.0 if used > threshold else 0.0)
        else:
            assert record.value("clip_ratio") is None
        assert record.value("nonfinite", "grad") == 0.0
        assert record.value("lr") == 1e-2
        ratio = record.value("update_ratio")
        assert ratio is not None
        assert ratio > 0
        # A tiny update is rounded by the parameters' own precision, which is what the second ratio is there to show.
        assert record.value("update_applied_ratio") == pytest.approx(ratio, rel=1e-4 if ratio > 1e-5 else 2e-2)
        if scaled:
            assert record.value("loss_scale") == scale
            assert record.value("skipped") == 0.0
        else:
            assert record.value("loss_scale") is None
            assert record.value("skipped") is None
    if scaled:
        backoffs = [record.value("loss_scale_backoffs") for record in records]
        assert backoffs == [1.0 if bad and record.step == BAD else 0.0 for record in records]
    if optimizer_class is torch.optim.AdamW and scaled:
        counts = [record.value("optimizer_step") for record in records if not (bad and record.step == BAD)]
        assert counts == [float(number + 1) for number in range(len(counts))]


def check_bad(record: Step, scaled: bool, scale: float) -> None:
    assert record.value("loss") == math.inf
    assert record.value("nonfinite", "loss") == 1.0
    assert record.value("lr") == 1e-2
    if not scaled:
        norm = record.value("grad_norm")
        assert norm is not None
        assert not math.isfinite(norm)
        assert record.value("nonfinite", "grad") == 1.0
        return
    assert record.value("skipped") == 1.0
    assert record.value("loss_scale") == scale
    assert record.value("grad_norm") is None
    assert record.value("clip_ratio") is None
    assert record.value("nonfinite", "grad") is None
    assert record.value("update_ratio") == 0.0
    assert record.value("update_applied_ratio") == 0.0


def test_a_backoff_is_counted_once_when_the_scaler_is_updated_after_the_step_was_closed(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = watch(model, optimizer, tmp_path)
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (math.inf if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        exporter.step(loss)
        scaler.update()
    records = steps(exporter, tmp_path)
    assert sum(record.value("loss_scale_backoffs") or 0 for record in records) == 1.0
    assert [record.value("skipped") for record in records] == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_a_skipped_step_has_the_rate_it_would_have_used_not_the_schedulers_next(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 / (step + 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = watch(model, optimizer, tmp_path)
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (math.inf if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        exporter.step(loss)
    records = steps(exporter, tmp_path)
    assert [record.value("lr") for record in records] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])


def test_a_step_with_a_closure_has_the_gradients_that_the_closure_made(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    expected = []
    for step in range(1, 4):
        expected.append(reference_norms(model, step)["all"])

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        exporter.step(optimizer.step(closure))
    records = steps(exporter, tmp_path)
    assert [record.value("grad_norm") for record in records] == pytest.approx(expected, rel=3e-6)
    ratios = [(record.value("update_ratio"), record.value("update_applied_ratio")) for record in records]
    assert all(applied == pytest.approx(intended, rel=0.05) for intended, applied in ratios), ratios


def test_a_closure_that_clips_has_the_norm_before_clipping_and_one_evaluated_often_the_first(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    expected = reference_norms(model, 1)["all"]
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), expected / 2)
        return loss

    exporter.step(optimizer.step(closure))
    (record,) = steps(exporter, tmp_path)
    assert len(calls) > 1
    assert record.value("grad_norm") == pytest.approx(expected, rel=3e-6)
    assert record.value("clip_ratio") == pytest.approx(2, rel=1e-5)
    assert record.value("update_applied_ratio")


def test_the_total_norm_that_the_trainer_gets_is_bit_for_bit_what_torch_returns(tmp_path: Path) -> None:
    model = make()
    loss_of(model, 1).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    plain = torch.nn.utils.get_total_norm(gradients)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    watched = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert torch.equal(plain, watched)
    exporter.close()
    assert torch.nn.utils.get_total_norm.__module__ == "torch.nn.utils.clip_grad"


def test_clipping_two_halves_apart_gives_each_groups_norm_and_the_whole(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    want = reference_norms(model, 1)
    loss = loss_of(model, 1)
    loss.backward()
    head = list(model.lm_head.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in head)]
    torch.nn.utils.clip_grad_norm_(head, 0.01)
    torch.nn.utils.clip_grad_norm_(rest, 1e9)
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert {group: record.value("grad_norm", group) for group in want} == pytest.approx(want, rel=3e-6)
    assert record.value("clip_ratio") == pytest.approx(want["head"] / 0.01, rel=1e-5)


def test_a_norm_taken_for_a_log_after_clipping_does_not_replace_the_one_before(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    want = reference_norms(model, 1)["all"]
    loss = loss_of(model, 1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") == pytest.approx(want, rel=3e-6)


def test_get_total_norm_with_the_trainers_own_scaling_counts_as_before_clipping(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    want = reference_norms(model, 1)["all"]
    loss = loss_of(model, 1)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, 0.5 / total)
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") == pytest.approx(want, rel=3e-6)


def test_a_norm_of_the_parameters_is_not_taken_for_one_of_the_gradients(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    want = reference_norms(model, 1)["all"]
    loss = loss_of(model, 1)
    loss.backward()
    torch.nn.utils.get_total_norm(list(model.parameters()))
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") == pytest.approx(want, rel=3e-6)


def test_two_optimizers_of_one_model_make_one_record(tmp_path: Path) -> None:
    model = make()
    heads = list(model.lm_head.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in heads)]
    both: list[torch.optim.Optimizer] = [torch.optim.SGD(heads, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]
    exporter = watch(model, both, tmp_path, cadence=1)
    want = reference_norms(model, 1)
    loss = loss_of(model, 1)
    loss.backward()
    for optimizer in both:
        optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert {group: record.value("grad_norm", group) for group in want} == pytest.approx(want, rel=3e-6)
    assert record.value("lr") == 1e-2
    assert record.value("lr", "1.0") == 1e-3
    assert set(record.signals["update_ratio"]) == set(want)  # type: ignore[arg-type]


def test_nothing_is_left_in_torch_after_closing(tmp_path: Path) -> None:
    before = (torch.nn.utils.clip_grad_value_, torch.nn.utils.get_total_norm, torch.amp.GradScaler.step)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    assert torch.nn.utils.get_total_norm is not before[1]
    exporter.close()
    assert (torch.nn.utils.clip_grad_value_, torch.nn.utils.get_total_norm, torch.amp.GradScaler.step) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
