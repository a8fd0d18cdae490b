"""Where blocks and their parts are found: by structure, in the models of common libraries, under wrappers, half compiled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.exporter.gpt import gpt
from trainwarden.exporter.blocks import Structure, find

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}


def made(name: str, **config: Any) -> nn.Module:
    """Return a tiny random model of transformers."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kind = {"GPT2LMHeadModel": "GPT2Config", "T5ForConditionalGeneration": "T5Config"}.get(name)
    kind = kind or name.replace("ForCausalLM", "Config").replace("ForMaskedLM", "Config")
    model: nn.Module = getattr(transformers, name)(getattr(transformers, kind)(**config))
    return model


def names(found: Structure, block: int) -> dict[str, list[str]]:
    by_group: dict[str, list[str]] = {}
    for spot in found.spots:
        if spot.block == block:
            by_group.setdefault(spot.group, []).append(spot.name)
    return by_group


def test_gpt2() -> None:
    found = find(made("GPT2LMHeadModel", n_layer=2, n_head=2, n_embd=16, vocab_size=40, bos_token_id=0, eos_token_id=0))
    assert found.blocks == 2
    assert names(found, -1) == {"embedding": ["transformer.wte", "transformer.wpe"]}
    assert names(found, 1) == {
        "norm": ["transformer.h.1.ln_1", "transformer.h.1.ln_2"],
        "attention": ["transformer.h.1.attn"],
        "mlp": ["transformer.h.1.mlp"],
        "all": ["transformer.h.1"],
    }
    assert names(found, 2) == {"norm": ["transformer.ln_f"], "head": ["lm_head"]}
    assert found.last_norm is not None
    assert found.last_norm.name == "transformer.ln_f"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_llama_and_its_like(name: str) -> None:
    found = find(made(name, **SIZES, num_key_value_heads=2))
    assert found.blocks == 2
    assert names(found, 0) == {
        "attention": ["model.layers.0.self_attn"],
        "mlp": ["model.layers.0.mlp"],
        "norm": ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"],
        "all": ["model.layers.0"],
    }
    assert names(found, 2) == {"norm": ["model.norm"], "head": ["lm_head"]}


def test_experts_within_a_block_are_no_blocks() -> None:
    found = find(made("MixtralForCausalLM", **SIZES, num_key_value_heads=2, num_local_experts=2))
    assert found.blocks == 2
    assert names(found, 0)["mlp"] == ["model.layers.0.mlp"]


def test_two_stacks_are_told_apart_by_their_labels() -> None:
    found = find(
        made("T5ForConditionalGeneration", d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=40)
    )
    labels = [spot.label for spot in found.spots if spot.group == "all"]
    assert labels == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_several_models_in_a_list_are_no_blocks_theirs_are() -> None:
    found = find(nn.ModuleDict({"maker": gpt(layers=2), "judge": gpt(layers=1)}))
    assert [spot.label for spot in found.spots if spot.group == "all"] == ["maker.h.0", "maker.h.1", "judge.h.0"]


def test_of_torchs_own_layers_what_gives_back_counts_and_hooks_wait_for_gradients() -> None:
    found = find(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    assert names(found, 0) == {
        "attention": ["layers.0.self_attn"],
        "mlp": ["layers.0.linear2"],
        "norm": ["layers.0.norm1", "layers.0.norm2"],
        "all": ["layers.0"],
    }
    assert all(spot.fast for spot in found.spots)


def test_names_are_those_without_wrappers() -> None:
    model = gpt()
    for number, layer in enumerate(model.h):
        model.h[number] = checkpoint_wrapper(layer)  # type: ignore[no-untyped-call]
    wrapped = nn.Module()
    wrapped.add_module("module", model)
    found = find(wrapped)
    assert names(found, 1) == {
        "norm": ["h.1.ln_1", "h.1.ln_2"],
        "attention": ["h.1.attn"],
        "mlp": ["h.1.mlp"],
        "all": ["h.1"],
    }


def test_nothing_within_what_is_compiled_already_is_looked_at() -> None:
    assert find(torch.compile(gpt())).spots == []  # type: ignore[arg-type]
    model = gpt()
    model.compile()
    assert find(model).spots == []
    model = gpt()
    model.h[0].compile()
    model.h[1] = torch.compile(model.h[1])  # type: ignore[assignment]
    found = find(model)
    assert found.compiled == ["h.0", "h.1"]
    assert names(found, 0) == {}
    assert names(found, 1) == {"all": ["h.1"]}  # from outside
    assert set(names(found, 2)) == {"norm", "attention", "mlp", "all"}


def test_a_model_that_is_no_transformer_has_what_it_has() -> None:
    assert find(nn.Linear(2, 2)).spots == []
    assert find(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))).spots == []
    convolutions = nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)) for _ in range(2)))
    assert [spot.label for spot in find(convolutions).spots if spot.group == "all"] == ["0", "1"]
