"""Models as people train them: Hugging Face's GPT-2 with both kinds of attention, torch's own layers with their fast path, a Llama in
the way of torchtitan; and whoever else takes torch's attention for something of their own."""

from __future__ import annotations

import importlib
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from tests.exporter.gpt import Outputs, batch
from tests.exporter.runs import steps, watch
from trainwarden.exporter.hooks import attention
from trainwarden.record import Step


def trained(folder: Path, model: nn.Module, loss_of: Any, count: int = 2) -> list[Step]:
    """Train with an exporter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, folder, cadence=1)
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder)


def gpt2(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=31,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=kind,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def hf_loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = batch(step)[:, :12]
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    found: torch.Tensor = model(input_ids=ids, labels=ids, attention_mask=mask).loss
    return found


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_gpt2_of_hugging_face(tmp_path: Path, kind: str, checkpointing: bool | None) -> None:
    model: Any = gpt2(kind)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    outputs = Outputs(model, [f"transformer.h.{number}" for number in range(2)])
    first, _ = trained(tmp_path, model, hf_loss)
    for each in outputs.of.values():
        del each[1:]
    assert first.value("block_rms", "1") == pytest.approx(outputs.rms("transformer.h.1"), rel=1e-6)
    assert first.value("residual_rms") == first.value("block_rms", "1")
    assert set(first.signals["activation_rms"]) == {"all", "embedding", "attention", "mlp", "norm", "head"}  # type: ignore[arg-type]
    kinds = first.signals["attention_logit"]
    assert isinstance(kinds, dict)
    assert "sampled" in kinds
    # Of a forward that is checkpointed the kernel keeps nothing; scores that are multiplied by hand are seen themselves.
    assert ("lse" in kinds) == (kind == "sdpa" and checkpointing is None)
    assert ("bound" in kinds) == (kind == "sdpa" and checkpointing is not None)
    # What stands for minus infinity in a mask is no logit.
    assert all(isinstance(value, float) and abs(value) < 1e3 for value in kinds.values())


def test_generating_in_between_is_not_seen(tmp_path: Path) -> None:
    model: Any = gpt2("sdpa")

    def loss(model: Any, step: int) -> torch.Tensor:
        model.eval()
        model.generate(batch(9, rows=1)[:, :3], max_new_tokens=3, do_sample=False)
        model.train()
        return hf_loss(model, step)

    (found,) = trained(tmp_path / "with", model, loss, count=1)
    (want,) = trained(tmp_path / "without", gpt2("sdpa"), hf_loss, count=1)
    assert found.signals["activation_absmax"] == want.signals["activation_absmax"]
    assert found.signals["attention_logit"] == want.signals["attention_logit"]


class Classifier(nn.Module):
    """torch's own encoder below a head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encoder(x)[:, 0])
        return found


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_own_layers_are_seen_in_training_and_keep_their_fast_path_in_evaluation(
    tmp_path: Path, norm_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Classifier(norm_first)
    x = torch.randn(2, 5, 16)
    fast: list[int] = []
    original = torch._transformer_encoder_layer_fwd

    def counted(*arguments: Any) -> torch.Tensor:
        fast.append(1)
        found: torch.Tensor = original(*arguments)
        return found

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    model.eval()
    with torch.no_grad():
        want = model(x)
    taken = len(fast)
    assert taken == 2
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    outputs = Outputs(model, ["encoder"])
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        model.eval()
        outputs.remove()
        with torch.no_grad():
            assert torch.equal(model(x), want)
        model.train()
        exporter.step(1.0)
    assert len(fast) == taken + 4
    first, second = steps(exporter, tmp_path)
    assert first.value("block_rms", "1") == pytest.approx(outputs.rms("encoder"), rel=1e-6)
    assert first.signals["block_rms"] == second.signals["block_rms"]
    assert set(first.signals["attention_logit"]) == {"sampled", "lse"}  # type: ignore[arg-type]


def test_multihead_attention_that_returns_its_weights_is_seen_by_its_scores(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.attention(x, x, x, need_weights=True)[0]
            return found

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(1, 6, 8)
    inner = model.attention
    q, k, _ = (
        functional.linear(x, inner.in_proj_weight, inner.in_proj_bias).detach().double().view(1, 6, 3, 2, 4).unbind(2)
    )
    every = torch.einsum("blhe,bshe->bhls", q, k) / 2
    (record,) = trained(tmp_path, model, lambda model, step: model(x).square().mean(), count=1)
    assert record.signals["attention_logit"] == {"sampled": pytest.approx(float(every.max()), rel=1e-5)}


def test_the_softmax_of_a_router_or_over_a_vocabulary_is_not_taken_for_attention(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.router, self.head = nn.Linear(8, 3), nn.Linear(8, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x, x, x, need_weights=True)[0]
            routed = functional.softmax(1e3 * self.router(x), dim=-1).sum(-1, keepdim=True)
            return functional.softmax(1e3 * self.head(x * routed), dim=-1)

    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    (record,) = trained(tmp_path, Model(), lambda model, step: model(x).square().mean(), count=1)
    found = record.value("attention_logit", "sampled")
    assert found is not None
    assert found < 10


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class GroupedAttention(nn.Module):
    """Four heads of queries on two of keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(width, size, bias=False) for size in (width, width // 2, width // 2))
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q = self.wq(x).view(rows, length, 4, -1).transpose(1, 2)
        k, v = (part(x).view(rows, length, 2, -1).transpose(1, 2) for part in (self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: torch.Tensor = self.wo(mixed.transpose(1, 2).reshape(rows, length, width))
        return found


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*size, bias=False) for size in ((width, 24), (24, width), (width, 24)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return found


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = GroupedAttention(width), FeedForward(width)
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        found: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return found


class Llama(nn.Module):
    """Laid out and named as in torchtitan: layers in a dict by number."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(31, width)
        self.layers = nn.ModuleDict({str(number): TransformerBlock(width) for number in range(3)})
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, 31, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False)
        found: torch.Tensor = self.output(self.norm(x))
        return found


def test_a_llama_in_the_way_of_torchtitan_with_grouped_attention_and_checkpointing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama()
    outputs = Outputs(model, ["layers.2", "layers.0.attention", "layers.1.attention", "layers.2.attention"])

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        ids = batch(step)
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    (record,) = trained(tmp_path, model, loss, count=1)
    assert record.value("residual_rms") == pytest.approx(outputs.rms("layers.2"), rel=1e-6)
    assert record.value("activation_rms", "attention") == pytest.approx(
        outputs.rms(*(f"layers.{number}.attention" for number in range(3))), rel=1e-6
    )
    found, bound = record.value("attention_logit", "sampled"), record.value("attention_logit", "bound")
    assert found is not None
    assert bound is not None
    assert math.isfinite(found)
    assert found <= bound


def test_names_under_which_attention_was_imported_before_are_covered_and_given_back(tmp_path: Path) -> None:
    original = functional.scaled_dot_product_attention
    early = importlib.import_module("tests.exporter.early_names")
    assert early.scaled_dot_product_attention is original
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert early.scaled_dot_product_attention is functional.scaled_dot_product_attention is not original
    exporter.close()
    assert early.scaled_dot_product_attention is functional.scaled_dot_product_attention is original
    assert not attention._replaced


def test_a_mask_of_a_class_of_its_own_and_a_script_work_as_without_us(tmp_path: Path) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 4, 8)

    def plainly(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(
            torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), dim=-1
        )

    bias = causal_lower_right(4, 4)
    want = functional.scaled_dot_product_attention(query, query, query, attn_mask=bias)
    plain = plainly(query)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert torch.equal(functional.scaled_dot_product_attention(query, query, query, attn_mask=bias), want)
    assert torch.equal(torch.jit.script(plainly)(query), plain)
    exporter.close()
    assert exporter.notices == []
