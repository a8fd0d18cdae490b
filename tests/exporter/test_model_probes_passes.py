"""What counts as part of a step: checkpointing, evaluation in between, frozen and tied parts, several optimizers, captured graphs."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.exporter.gpt import GPT, Layer, Outputs, batch, gpt, loss_on
from tests.exporter.runs import steps, watch
from trainwarden.exporter import Exporter, observer
from trainwarden.record import Step

SIGNALS = ("activation_rms", "activation_absmax", "block_rms", "block_absmax", "residual_rms", "attention_logit")


def seen(record: Step, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a record says of the inside, without some kinds of attention logits."""
    found = {name: record.signals[name] for name in SIGNALS if name in record.signals}
    logits = found.get("attention_logit")
    if isinstance(logits, dict):
        found["attention_logit"] = {kind: value for kind, value in logits.items() if kind not in but}
    return found


def run(folder: Path, model: nn.Module, count: int = 3, between: Any = None, **settings: Any) -> list[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, folder, **{"cadence": 1, **settings})
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss = loss_on(model, batch(step))
        loss.backward()
        optimizer.step()
        if between is not None:
            between(exporter, model)
        exporter.step(loss)
    return steps(exporter, folder)


@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_what_checkpointing_computes_again_is_not_counted_twice(tmp_path: Path, kind: str) -> None:
    want = run(tmp_path / "without", gpt())
    found = run(tmp_path / "with", gpt(checkpointing=kind))
    kinds = ("lse", "bound")  # which of the two there is depends on what the kernel keeps
    assert [seen(record, but=kinds) for record in found] == [seen(record, but=kinds) for record in want]
    assert set(found[0].signals["attention_logit"]) == {"bound", "sampled"}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [None, "reentrant", "plain"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_bit_for_bit_those_without_the_exporter(
    tmp_path: Path, kind: str | None, accumulate: int, dtype: torch.dtype
) -> None:
    found = []
    for watched in (False, True):
        model = gpt(checkpointing=kind, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        exporter = watch(model, optimizer, tmp_path, cadence=2) if watched else None
        said = []
        for step in range(1, 5):
            optimizer.zero_grad()
            for part in range(accumulate):
                loss = loss_on(model, batch(10 * step + part))
                (loss / accumulate).backward()
                said.append(loss.detach())
            said += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            if exporter is not None:
                exporter.step(loss)
        if exporter is not None:
            steps(exporter, tmp_path)
        found.append(said)
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def products_are_kept(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList, torch.ops.aten.amax.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Scaled(Layer):
    """A block that multiplies: of its products there is one of a kind that the exporter's own measurements use as well."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x)) * self.scale
        found: torch.Tensor = x + self.mlp(self.ln_2(x)) * self.scale
        return found


class Selective(GPT):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.h[0] = Scaled(16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = checkpoint(
            self.h[0],
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(products_are_kept),
        )
        found: torch.Tensor = self.lm_head(self.ln_f(x))
        return found


def test_selective_checkpointing_gives_back_its_own_results_and_not_the_exporters(tmp_path: Path) -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Selective()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        exporter = watch(model, optimizer, tmp_path, cadence=1) if watched else None
        loss = loss_on(model, batch(1))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if exporter is not None:
            optimizer.step()
            exporter.step(loss)
            (record,) = steps(exporter, tmp_path)
            assert set(record.signals["block_rms"]) == {"0"}  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]


def evaluate_without_gradients(exporter: Exporter, model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        loss_on(model, batch(99, rows=5))
    model.train()


def evaluate_with_gradients(exporter: Exporter, model: nn.Module) -> None:
    model.eval()
    loss_on(model, batch(99, rows=5))
    model.train()


def evaluate_in_training_mode(exporter: Exporter, model: nn.Module) -> None:
    with torch.no_grad():
        loss_on(model, batch(99, rows=5))


def evaluate_in_a_phase(exporter: Exporter, model: nn.Module) -> None:
    with exporter.phase("evaluation"):
        loss_on(model, batch(99, rows=5))


def generate(exporter: Exporter, model: nn.Module) -> None:
    ids = batch(98, rows=1, length=3)
    with torch.inference_mode():
        for _ in range(4):
            ids = torch.cat([ids, model(ids).argmax(-1)[:, -1:]], 1)


def evaluate_another_model(exporter: Exporter, model: nn.Module) -> None:
    loss_on(gpt(seed=5, layers=1), batch(97)).backward()


@pytest.mark.parametrize(
    "between",
    [
        evaluate_without_gradients,
        evaluate_with_gradients,
        evaluate_in_training_mode,
        evaluate_in_a_phase,
        generate,
        evaluate_another_model,
    ],
)
def test_what_is_evaluated_in_between_does_not_leak_into_a_step(tmp_path: Path, between: Any) -> None:
    want = run(tmp_path / "without", gpt())
    found = run(tmp_path / "with", gpt(), between=between)
    assert [seen(record) for record in found] == [seen(record) for record in want]


def test_a_forward_in_evaluation_mode_counts_if_its_gradient_is_computed(tmp_path: Path) -> None:
    want = run(tmp_path / "training", gpt())
    model = gpt().eval()  # no dropout anywhere, so that both compute the same
    found = run(tmp_path / "evaluation", model)
    assert [seen(record) for record in found] == [seen(record) for record in want]


def test_frozen_blocks_and_embeddings_are_seen_and_no_gradient_is_asked_of_them(tmp_path: Path) -> None:
    model = gpt(tied=True)
    for part in (model.wpe, model.h[0], model.h[1].attn):
        part.requires_grad_(False)
    found = run(tmp_path, model, count=2)
    assert set(found[0].signals["block_rms"]) == {"0", "1", "2"}  # type: ignore[arg-type]
    assert set(found[1].signals["grad_row_max"]) == {"token"}  # type: ignore[arg-type]
    assert found[1].value("nonfinite", "activation") == 0.0


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_any_kind_of_update_leaves_the_inside_as_it_is(tmp_path: Path, kind: Any, options: dict[str, bool]) -> None:
    model = gpt()
    optimizer = kind(model.parameters(), lr=0.0, **options)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_on(model, batch(1))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    first, second = steps(exporter, tmp_path)
    assert seen(first) == seen(second)
    assert len(seen(first)) == len(SIGNALS)


def test_two_models_that_train_in_turn_make_one_record_of_both(tmp_path: Path) -> None:
    both = nn.ModuleDict({"maker": gpt(layers=2), "judge": gpt(seed=1, layers=1)})
    optimizers = [torch.optim.SGD(both[name].parameters(), lr=1e-3) for name in ("maker", "judge")]
    outputs = Outputs(both, ["maker.h.0", "maker.h.1", "judge.h.0"])
    exporter = watch(both, optimizers, tmp_path, cadence=1)
    for name, optimizer in zip(("judge", "maker"), reversed(optimizers), strict=True):
        optimizer.zero_grad()
        loss_on(both[name], batch(1)).backward()
        optimizer.step()
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    want = {"maker.h.0": "maker.h.0", "maker.h.1": "maker.h.1", "judge.h.0": "judge.h.0"}
    assert record.signals["block_rms"] == pytest.approx(
        {label: outputs.rms(name) for label, name in want.items()}, rel=1e-6
    )


def test_blocks_that_a_trainer_calls_by_hand_are_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Layer(8) for _ in range(2))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)
    outputs = Outputs(blocks, ["0", "1"])
    exporter = watch(blocks, optimizer, tmp_path, cadence=1)
    for _ in range(2):
        x = torch.randn(2, 3, 8)
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        with torch.no_grad():
            blocks[0](torch.full((2, 3, 8), 1e6))
    optimizer.step()
    outputs.of = {name: [each[0], each[1] if name == "1" else each[2]] for name, each in outputs.of.items()}
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    assert record.signals["block_rms"] == pytest.approx({"0": outputs.rms("0"), "1": outputs.rms("1")}, rel=1e-6)


def test_a_step_whose_forward_raised_does_not_spoil_the_next(tmp_path: Path) -> None:
    def stumble(exporter: Exporter, model: nn.Module) -> None:
        model.eval()
        with torch.no_grad(), pytest.raises(IndexError):
            model(torch.full((1, 3), 31))
        model.train()

    want = run(tmp_path / "without", gpt())
    found = run(tmp_path / "with", gpt(), between=stumble)
    assert [seen(record) for record in found] == [seen(record) for record in want]


def test_while_a_graph_is_captured_only_what_the_trainer_hands_in_is_recorded_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    monkeypatch.setattr(observer, "_capturing", lambda: True)
    for step in range(1, 4):
        loss = loss_on(model, batch(step))
        loss.backward()
        optimizer.step()
        exporter.step(loss.detach())
    exporter.close()
    assert len([one for one in exporter.notices if "CUDA graph is captured" in one]) == 1
    exporter._notices._said.clear()
    for record in steps(exporter, tmp_path):
        assert record.value("loss") is not None
        assert not set(record.signals) & {*SIGNALS, "grad_norm", "update_ratio", "weight_rms"}
        assert "activation" not in record.signals["nonfinite"]  # type: ignore[operator]


def test_a_graph_that_is_replayed_is_noticed_by_the_silence_of_the_modules(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    loss = loss_on(model, batch(1))
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    for _ in range(5):  # a replayed graph calls no Python: neither the model's nor the optimizer's
        exporter.step(torch.tensor(1.0))
    exporter.close()
    assert [one for one in exporter.notices if "in the last steps none was" in one] == exporter.notices
    assert len(exporter.notices) == 1


def test_copies_and_pickles_of_the_model_do_not_carry_the_exporter_along(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    average = torch.optim.swa_utils.AveragedModel(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"trainwarden" not in buffer.getvalue()
    buffer.seek(0)
    read = torch.load(buffer, weights_only=False)
    loss = loss_on(model, batch(1))
    for other in (average, read, copy.deepcopy(model)):
        loss_on(other, batch(2, rows=6)).backward()
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    (want,) = run(tmp_path / "alone", gpt(), count=1)
    assert seen(record) == seen(want)


def test_nothing_of_it_is_left_in_the_model_after_closing(tmp_path: Path) -> None:
    model = gpt()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert any(module._forward_hooks for module in model.modules())
    exporter.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_fault_in_it_ends_the_looking_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("cannot look")

    monkeypatch.setattr(torch, "aminmax", fail)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for step in range(1, 4):
        loss = loss_on(model, batch(step))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    assert [one.partition(":")[0] for one in exporter.notices] == ["looking into the model"]
    assert not any(module._forward_hooks for module in model.modules())


def test_autocast_does_not_change_what_is_measured_nor_is_it_changed(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outputs = Outputs(model, ["h.0", "h.1", "h.2", "h.1.attn"])
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_on(model, batch(1))
        assert torch.is_autocast_enabled("cpu")
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert outputs.of["h.1.attn"][0].dtype is torch.float64
    assert record.value("block_rms", "1") == pytest.approx(outputs.rms("h.1"), rel=1e-6)
    assert math.isfinite(record.value("attention_logit", "sampled") or math.nan)


def test_passes_without_end_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwarden.exporter import inside

    monkeypatch.setattr(inside, "PASSES", 3)
    model = gpt()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=1e-3), tmp_path)
    for step in range(6):
        loss = loss_on(model, batch(step))
    exporter.step(loss)
    exporter.close()
    (said,) = exporter.notices
    assert "more than 3 forward passes" in said


def test_no_more_gradients_of_outputs_are_kept_than_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwarden.exporter import inside

    monkeypatch.setattr(inside, "NUMBERS", 40)
    model = gpt()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=1e-3), tmp_path)
    for part in range(6):
        loss_on(model, batch(part)).backward()
    assert exporter._parts is not None
    (looking,) = exporter._parts.observer.beside
    assert isinstance(looking, inside.Inside)
    assert len(looking._grads) == 40
    exporter.close()
