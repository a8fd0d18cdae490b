"""A skipped update is one that never was: parameters, state and step counters, for every optimizer and every way to step it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.exporter.guard.runs import POISON, STEPS, bits, equal, one, run, state_of
from tests.exporter.runs import events, lines, loss_of, make, watch
from trainwarden.exporter.guard import Guard
from trainwarden.record import Step

ALL = range(1, STEPS + 1)
SOUND = [step for step in ALL if step not in POISON]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adam amsgrad maximize": (torch.optim.Adam, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    "Adam fused amsgrad maximize": (torch.optim.Adam, {"amsgrad": True, "maximize": True, "fused": True}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1}),
    "SGD fused": (torch.optim.SGD, {"fused": True}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD loop nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    "SGD fused momentum": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def records(folder: Path) -> list[Step]:
    return [line for line in lines(folder) if isinstance(line, Step)]


def skipped(folder: Path) -> list[int]:
    return [record.step for record in records(folder) if record.value("skipped") == 1]


def faults(exporter: Any) -> list[str]:
    return [said for said in exporter.notices if "Error" in said or "not guarded" in said]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_poisoned_batches_is_bit_for_bit_one_that_never_saw_them(
    tmp_path: Path, name: str, clip: float | None
) -> None:
    kind, options = OPTIMIZERS[name]
    model, optimizers, exporter = run(one(kind, **options), tmp_path, ALL, POISON, clip=clip)
    exporter.close()
    spared = run(one(kind, **options), None, SOUND, {}, clip=clip)
    assert equal(state_of(model, optimizers), state_of(*spared[:2]))
    assert skipped(tmp_path) == sorted(POISON)
    assert faults(exporter) == []


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused", "SGD fused momentum", "NAdam"])
def test_a_clean_run_with_a_guard_is_bit_for_bit_one_without(tmp_path: Path, name: str) -> None:
    kind, options = OPTIMIZERS[name]
    guarded = run(one(kind, **options), tmp_path, ALL, {}, clip=0.5, limit=1e6, factor=100.0)
    guarded[2].close()
    bare = run(one(kind, **options), None, ALL, {}, clip=0.5)
    assert bits(state_of(*guarded[:2])) == bits(state_of(*bare[:2]))
    assert skipped(tmp_path) == []
    assert all(
        record.signals["guard_skipped_steps"] == {"nonfinite": 0, "limit": 0, "surge": 0}
        for record in records(tmp_path)
    )


@pytest.mark.parametrize("name", ["Muon", "AdamW capturable"])
def test_matrices_and_capturable_state_are_put_back_too(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "Muon":

        def build(model: nn.Module) -> list[torch.optim.Optimizer]:
            flat = [parameter for parameter in model.parameters() if parameter.ndim != 2]
            whole = [parameter for parameter in model.parameters() if parameter.ndim == 2]
            return [torch.optim.Muon(whole, lr=0.02), torch.optim.AdamW(flat, lr=0.02)]

    else:
        module = __import__("torch.optim.adam", fromlist=["adam"])
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda supports_xla=True: ["cpu"])
        build = one(torch.optim.AdamW, capturable=True)
    model, optimizers, exporter = run(build, tmp_path, ALL, POISON, clip=0.5)
    exporter.close()
    spared = run(build, None, SOUND, {}, clip=0.5)
    assert equal(state_of(model, optimizers), state_of(*spared[:2]))
    assert skipped(tmp_path) == sorted(POISON)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("micro", [1, 3])
def test_one_poisoned_micro_batch_costs_the_whole_step_and_no_more(
    tmp_path: Path, fused: bool, clip: float | None, micro: int
) -> None:
    build = one(torch.optim.AdamW, fused=fused)
    model, optimizers, exporter = run(build, tmp_path, ALL, POISON, clip=clip, micro=micro)
    exporter.close()
    spared = run(build, None, SOUND, {}, clip=clip, micro=micro)
    assert equal(state_of(model, optimizers), state_of(*spared[:2]))
    assert skipped(tmp_path) == sorted(POISON)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_grad_scaler_skips_what_overflows_and_the_guard_what_is_too_large(
    tmp_path: Path, fused: bool, clip: float | None
) -> None:
    poison = {3: float("inf"), 6: 1e6}
    build = one(torch.optim.AdamW, fused=fused)

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0)

    model, optimizers, exporter = run(build, tmp_path, ALL, poison, clip=clip, scaler=scaler(), limit=1e4)
    exporter.close()
    # The scaler halves its scale at what overflows: powers of two, which change no bit of what is unscaled.
    spared = run(build, None, [step for step in ALL if step not in poison], {}, clip=clip, scaler=scaler())
    assert equal(state_of(model, optimizers), state_of(*spared[:2]))
    found = records(tmp_path)
    assert skipped(tmp_path) == [3, 6]
    assert [record.step for record in found if record.value("guard_skipped_steps", "limit") == 1] == [6]
    assert [record.value("guard_skipped_steps", "nonfinite") for record in found] == [0.0] * len(found)
    assert [record.value("loss_scale") for record in found] == [8.0] * 3 + [4.0] * 5
    assert found[5].value("loss_scale_backoffs") == 0
    assert not hasattr(optimizers[0], "found_inf")
    assert faults(exporter) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_norm_is_compared_with_its_limit_without_the_loss_scale(
    tmp_path: Path, fused: bool, clip: float | None
) -> None:
    """The scaled norms are above 1e4 throughout."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    *_, exporter = run(one(torch.optim.AdamW, fused=fused), tmp_path, ALL, {}, clip=clip, scaler=scaler, limit=1e3)
    exporter.close()
    assert skipped(tmp_path) == []


def test_clipping_scaled_gradients_before_they_are_unscaled_is_judged_by_what_they_are(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    Guard(exporter, limit=1e3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(1, 4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        exporter.step()
    exporter.close()
    assert skipped(tmp_path) == []


def test_one_batch_is_kept_from_all_optimizers(tmp_path: Path) -> None:
    """Each has a norm of its own, and the poison is in the gradient of the first alone."""

    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        *first, head = list(model.parameters())
        return [torch.optim.AdamW(first, lr=0.05, fused=True), torch.optim.SGD([head], lr=0.05, momentum=0.9)]

    def spoil(step: int, model: nn.Module) -> None:
        if step == 4:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]

    model, optimizers, exporter = run(build, tmp_path, ALL, {}, each=spoil)
    exporter.close()
    spared = run(build, None, [step for step in ALL if step != 4], {})
    assert equal(state_of(model, optimizers), state_of(*spared[:2]))
    assert records(tmp_path)[3].signals["guard_skipped_steps"] == {"nonfinite": 1, "limit": 0, "surge": 0}


def test_the_schedule_goes_by_steps_also_over_a_skipped_one(tmp_path: Path) -> None:
    _, optimizers, exporter = run(one(torch.optim.AdamW), tmp_path, ALL, {4: float("nan")}, scheduler=True)
    exporter.close()
    rates = [record.value("lr") for record in records(tmp_path)]
    assert rates == pytest.approx([0.05 * 0.9**step for step in range(STEPS)])
    assert optimizers[0].param_groups[1]["lr"] == pytest.approx(0.02 * 0.9**STEPS)


def test_an_optimizer_that_is_stepped_with_a_closure_is_guarded(tmp_path: Path) -> None:
    found = []
    for folder, steps, poison in ((tmp_path, ALL, POISON), (None, SOUND, {})):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        exporter = None if folder is None else watch(model, optimizer, folder)
        if exporter is not None:
            Guard(exporter)
        for step in steps:

            def closure(
                step: int = step,
                model: nn.Module = model,
                optimizer: torch.optim.Optimizer = optimizer,
                poison: dict[int, float] = poison,
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step) * poison.get(step, 1.0)
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            if exporter is not None:
                exporter.step()
        if exporter is not None:
            exporter.close()
        found.append(state_of(model, [optimizer]))
    assert equal(*found)


def test_several_updates_between_two_records_are_each_judged_by_their_own_norm(tmp_path: Path) -> None:
    found = []
    for folder, steps in ((tmp_path, range(1, 7)), (None, [1, 2, 3, 5, 6])):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        exporter = None if folder is None else watch(model, optimizer, folder)
        if exporter is not None:
            Guard(exporter)
        for step in steps:
            optimizer.zero_grad()
            (loss_of(model, step) * (float("nan") if step == 4 else 1.0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if exporter is not None and step % 3 == 0:
                exporter.step()
        if exporter is not None:
            exporter.close()
        found.append(state_of(model, [optimizer]))
    assert equal(*found)


def test_a_norm_that_was_used_is_not_used_again(tmp_path: Path) -> None:
    """Clipped in the first of two updates alone: the second is judged by its own gradient."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter = watch(model, optimizer, tmp_path)
    Guard(exporter)
    for step in (1, 2):
        optimizer.zero_grad()
        (loss_of(model, step) * (float("nan") if step == 2 else 1.0)).backward()
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        exporter.step()
    exporter.close()
    assert skipped(tmp_path) == [2]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_breaks_off_leaves_nothing_behind(
    tmp_path: Path, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    exporter = watch(model, optimizer, tmp_path)
    Guard(exporter)
    loss_of(model, 1).backward()
    for parameter in model.parameters():
        parameter.grad.fill_(float("nan"))  # type: ignore[union-attr]
    with monkeypatch.context() as broken:
        broken.setattr(torch.optim.AdamW, "_init_group", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    optimizer.zero_grad()
    before = state_of(model, [optimizer])
    loss_of(model, 1).backward()
    optimizer.step()
    exporter.step()
    exporter.close()
    assert not equal(before, state_of(model, [optimizer])[: len(before)])
    assert records(tmp_path)[0].signals["guard_skipped_steps"] == {"nonfinite": 0, "limit": 0, "surge": 0}
    assert not hasattr(optimizer, "found_inf")


def test_a_probe_sees_what_the_guard_left_and_not_what_it_undid(tmp_path: Path) -> None:
    for fused in (False, True):
        folder = tmp_path / str(fused)
        *_, exporter = run(one(torch.optim.AdamW, fused=fused), folder, ALL, {4: float("nan")}, clip=0.5)
        exporter.close()
        third, fourth, fifth = records(folder)[2:5]
        assert fourth.value("weight_rms") == third.value("weight_rms")
        assert fourth.value("moment_rms", "exp_avg") == third.value("moment_rms", "exp_avg")
        assert fourth.value("update_ratio") == fourth.value("update_applied_ratio") == 0
        assert (third.value("optimizer_step"), fourth.value("optimizer_step"), fifth.value("optimizer_step")) == (
            3,
            3,
            4,
        )
        assert (fourth.value("nonfinite", "param"), fourth.value("nonfinite", "optimizer")) == (0, 0)
        assert fourth.value("nonfinite", "grad") == 1


def test_without_the_guard_the_same_batch_spoils_the_model(tmp_path: Path) -> None:
    """What the guard is for; and that the other tests of this file could fail."""
    model, *_ = run(one(torch.optim.AdamW), None, ALL, POISON)
    assert not all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_gradient_is_a_skipped_update_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    kind, options = OPTIMIZERS[data.draw(st.sampled_from(list(OPTIMIZERS)))]
    poison = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    which, place = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 10**6))
    begin = data.draw(st.integers(0, 3))
    clip = data.draw(st.sampled_from([None, 0.1, float("inf")]))
    model = make()
    (optimizer,) = one(kind, **options)(model)
    exporter = watch(model, optimizer, tmp_path_factory.mktemp("run"))
    Guard(exporter)
    before: list[bytes] = []
    for step in range(begin + 1):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == begin:
            params = list(model.parameters())
            gradient = params[which % len(params)].grad
            assert gradient is not None
            gradient.view(-1)[place % gradient.numel()] = poison
            before = bits(state_of(model, [optimizer]))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        exporter.step()
    exporter.close()
    after = bits(state_of(model, [optimizer]))
    if begin or len(before) == len(after):
        assert after == before
    else:  # the state was made in the step that is skipped
        assert after[: len(list(model.parameters()))] == before


def test_the_memory_that_copies_take_is_said(tmp_path: Path) -> None:
    model, optimizers, exporter = run(one(torch.optim.AdamW), tmp_path / "a", ALL, {})
    exporter.close()
    size = sum(tensor.numel() * tensor.element_size() for tensor in state_of(model, optimizers))
    (said,) = [said for said in exporter.notices if "copies" in said]
    assert f"{size} bytes" in said
    assert "fused=True" in said
    *_, exporter = run(one(torch.optim.AdamW, fused=True), tmp_path / "b", ALL, {})
    exporter.close()
    assert exporter.notices == []


def test_the_start_event_says_what_is_guarded_and_how(tmp_path: Path) -> None:
    *_, exporter = run(one(torch.optim.AdamW, fused=True), tmp_path, ALL, {}, limit=7.0, patience=3)
    exporter.close()
    assert events(tmp_path, "start")[0].fields["guard"] == {
        "limit": 7.0,
        "factor": None,
        "window": 128,
        "patience": 3,
        "how": {"AdamW": "found_inf"},
        "embedding_alpha": {},
    }
