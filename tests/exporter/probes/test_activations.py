"""activations, attention_logit and grad_row_max against float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.gpt import GPT, Outputs, batch, gpt, loss_on
from tests.exporter.runs import steps, watch
from trainwarden.exporter.logits import ROWS, bound, log_sum_exp, of_scores, sampled
from trainwarden.record import Step

NAMES = ["wte", "wpe", "ln_f", "lm_head"]
PARTS = {"attention": "attn", "mlp": "mlp"}


def names_of(model: GPT) -> dict[str, list[str]]:
    """Return the modules of each group by name."""
    layers = [f"h.{number}" for number in range(len(model.h))]
    return {
        "all": layers,
        "embedding": ["wte", "wpe"],
        "attention": [f"{layer}.attn" for layer in layers],
        "mlp": [f"{layer}.mlp" for layer in layers],
        "norm": [f"{layer}.ln_{number}" for layer in layers for number in (1, 2)] + ["ln_f"],
        "head": ["lm_head"],
    }


def check(record: Step, outputs: Outputs, groups: dict[str, list[str]], tolerance: float = 1e-6) -> None:
    rms = {group: outputs.rms(*names) for group, names in groups.items()}
    absmax = {group: outputs.absmax(*names) for group, names in groups.items()}
    assert record.signals["activation_rms"] == pytest.approx(rms, rel=tolerance)
    assert record.signals["activation_absmax"] == pytest.approx(absmax, rel=0)
    blocks = groups["all"]
    assert record.signals["block_rms"] == pytest.approx(
        {str(number): outputs.rms(name) for number, name in enumerate(blocks)}, rel=tolerance
    )
    assert record.signals["block_absmax"] == {str(number): outputs.absmax(name) for number, name in enumerate(blocks)}
    assert record.value("residual_rms") == pytest.approx(outputs.rms(blocks[-1]), rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_sizes_by_group_and_block_are_those_of_all_elements_of_all_micro_batches_in_float64(
    tmp_path: Path, dtype: torch.dtype, accumulate: int
) -> None:
    model = gpt(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    groups = names_of(model)
    outputs = Outputs(model, [name for names in groups.values() for name in names])
    exporter = watch(model, optimizer, tmp_path)
    for part in range(accumulate):
        loss = loss_on(model, batch(part, rows=1 + part))
        (loss / accumulate).backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    check(record, outputs, groups)


def test_of_many_micro_batches_the_numbers_are_put_together_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwarden.exporter import inside

    monkeypatch.setattr(inside, "NUMBERS", 120)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    groups = names_of(model)
    outputs = Outputs(model, [name for names in groups.values() for name in names])
    exporter = watch(model, optimizer, tmp_path)
    for part in range(7):
        loss = loss_on(model, batch(part, rows=1 + part % 3))
        loss.backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    check(record, outputs, groups)


def test_a_model_without_blocks_has_the_sizes_of_its_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "lm_head": nn.Linear(4, 7)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    hidden = model["embed"](torch.arange(7))
    logits = model["lm_head"](hidden)
    logits.sum().backward()
    optimizer.step()
    exporter.step(0.0)
    (record,) = steps(exporter, tmp_path)
    want = {"embedding": float(hidden.detach().abs().max()), "head": float(logits.detach().abs().max())}
    assert record.signals["activation_absmax"] == pytest.approx(want, rel=0)
    assert "block_rms" not in record.signals
    assert "residual_rms" not in record.signals


def logits64(query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return all logits in float64, those that are masked minus infinity."""
    if query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    found = query.double() @ key.double().transpose(-2, -1) / math.sqrt(query.shape[-1])
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:]).triu(1).bool(), -math.inf)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 5, 8, 23])
@pytest.mark.parametrize("causal", [True, False])
def test_sampled_rows_are_true_logits_and_the_bound_is_above_all(
    dtype: torch.dtype, heads: int, length: int, causal: bool
) -> None:
    torch.manual_seed(length)
    query, key = torch.randn(2, 4, length, 8).to(dtype), torch.randn(2, heads, length, 8).to(dtype)
    every = logits64(query, key, causal)
    largest = float(sampled(query, key, None, causal))
    step = length // min(ROWS, length)
    rows = list(range((length - 1) % step, length, step))
    assert length - 1 in rows
    assert largest == pytest.approx(float(every[..., rows, :].max()), rel=1e-6)
    norms = query.double().norm(dim=-1).amax(-1).view(2, heads, -1) * key.double().norm(dim=-1).amax(-1).view(
        2, heads, 1
    )
    assert float(bound(query, key)) == pytest.approx(float(norms.max()) / math.sqrt(8), rel=1e-6)
    assert float(bound(query, key)) >= float(every.max()) >= largest * (1 - 1e-6)


def test_masks_are_respected_true_means_seen_and_a_float_is_added() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    seen = torch.rand(8, 8) < 0.4
    seen[:, 0] = True
    every = logits64(query, key, False)
    want = float(every.masked_fill(~seen, -math.inf).max())
    assert float(sampled(query, key, seen, False)) == pytest.approx(want, rel=1e-6)
    bias = torch.randn(1, 2, 8, 8)
    assert float(sampled(query, key, bias, False)) == pytest.approx(float((every + bias).max()), rel=1e-6)
    padding = torch.zeros(1, 1, 1, 8)
    padding[..., 5:] = torch.finfo(torch.float32).min
    assert float(sampled(query, key, padding, False)) == pytest.approx(float(every[..., :5].max()), rel=1e-6)


def test_what_is_sampled_is_bounded_however_long_the_sequences_and_large_the_batch_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainwarden.exporter import logits

    query, key = torch.randn(9, 2, 16, 4), torch.randn(9, 2, 16, 4)
    every = logits64(query, key, True)
    found = float(sampled(query, key, torch.zeros(9, 1, 16, 16), True))
    assert found == pytest.approx(float(every[0::4, :, 1::2].max()), rel=1e-6)  # the first, the middle and the last
    monkeypatch.setattr(logits, "SAMPLES", 64)
    assert float(of_scores(every)) == pytest.approx(float(every[..., -1, :].max()))


def test_the_log_sum_exp_of_torchs_kernel_is_that_of_the_rows() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 9, 8, requires_grad=True), torch.randn(2, 2, 9, 8, requires_grad=True)
    output = nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    found = log_sum_exp(output, 9)
    assert found is not None
    assert float(found) == pytest.approx(
        float(logits64(query.detach(), key.detach(), True).logsumexp(-1).max()), rel=1e-6
    )
    with torch.no_grad():
        assert log_sum_exp(nn.functional.scaled_dot_product_attention(query, key, key), 9) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: 1 / 0):
        assert log_sum_exp(nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True), 9) is None


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_attention_of_a_trained_model_is_seen_by_each_kind_that_it_allows(tmp_path: Path, by_hand: bool) -> None:
    model = gpt(by_hand=by_hand)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outputs = Outputs(model, [f"h.{number}.attn.qkv" for number in range(3)])
    exporter = watch(model, optimizer, tmp_path)
    loss = loss_on(model, batch(1))
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    every = []
    for (qkv,) in outputs.of.values():
        query, key, _ = qkv.view(2, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        every.append(logits64(query, key, True))
    largest = max(float(one.max()) for one in every)  # with so few rows each is sampled
    assert record.value("attention_logit", "sampled") == pytest.approx(largest, rel=1e-5)
    if by_hand:
        assert set(record.signals["attention_logit"]) == {"sampled"}  # type: ignore[arg-type]
    else:
        want = max(float(one.logsumexp(-1).max()) for one in every)
        assert record.value("attention_logit", "lse") == pytest.approx(want, rel=1e-5)
        assert want >= largest
        assert (
            record.value("attention_logit", "bound") is None
        )  # it would lie further above, and cost a reading of queries and keys


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [None, 1e-3, 1e9])
def test_the_largest_row_of_each_table_is_that_of_the_gradient_before_clipping(
    tmp_path: Path, tied: bool, clip: float | None
) -> None:
    model = gpt(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path)
    loss = loss_on(model, batch(1))
    loss.backward()
    gradients = {"token": model.wte.weight.grad, "position": model.wpe.weight.grad}
    want = {name: float(grad.double().norm(dim=1).max()) for name, grad in gradients.items() if grad is not None}
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.signals["grad_row_max"] == pytest.approx(want, rel=1e-5)
