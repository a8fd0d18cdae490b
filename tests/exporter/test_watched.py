"""Which group a parameter belongs to, and what the start event can tell of a model and its checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import make, watch
from trainwarden.exporter.description import commit, moments_dtype
from trainwarden.exporter.groups import group_of
from trainwarden.exporter.watched import Watched

NAMES = {
    "transformer.wte.weight": "embedding",
    "transformer.h.0.ln_1.weight": "norm",
    "transformer.h.0.attn.c_attn.weight": "attention",
    "transformer.h.0.attn.c_proj.bias": "attention",
    "transformer.h.0.mlp.c_fc.weight": "mlp",
    "transformer.ln_f.weight": "norm",
    "lm_head.weight": "head",
    "model.embed_tokens.weight": "embedding",
    "model.layers.3.input_layernorm.weight": "norm",
    "model.layers.3.post_attention_layernorm.weight": "norm",
    "model.layers.3.self_attn.q_proj.weight": "attention",
    "model.layers.3.self_attn.o_proj.weight": "attention",
    "model.layers.3.self_attn.q_norm.weight": "norm",
    "model.layers.3.mlp.gate_proj.weight": "mlp",
    "model.layers.3.mlp.experts.7.down_proj.weight": "mlp",
    "tok_embeddings.weight": "embedding",
    "layers.0.attention.wq.weight": "attention",
    "layers.0.feed_forward.w1.weight": "mlp",
    "layers.0.attention_norm.weight": "norm",
    "layers.0.ffn_norm.weight": "norm",
    "norm.weight": "norm",
    "output.weight": "head",
    "gpt_neox.layers.0.attention.query_key_value.weight": "attention",
    "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": "mlp",
    "embed_out.weight": "head",
    "encoder.layers.0.linear1.weight": "mlp",
    "module._orig_mod.layers.0.attention.wo.weight": "attention",
    "encoder.layer.0.attention.output.dense.weight": "attention",
    "encoder.layer.0.output.dense.weight": "mlp",
    "conv.weight": "other",
    "0.weight": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_group_of_a_parameter_as_the_common_libraries_name_it(name: str) -> None:
    assert group_of(name, None) == NAMES[name]


def test_the_owning_module_decides_for_norms_embeddings_and_attention_whatever_they_are_called() -> None:
    assert group_of("a.weight", nn.LayerNorm(2)) == "norm"
    assert group_of("a.weight", nn.RMSNorm(2)) == "norm"
    assert group_of("a.weight", nn.Embedding(2, 2)) == "embedding"
    assert group_of("a.in_proj_weight", nn.MultiheadAttention(2, 1)) == "attention"


def test_a_tied_weight_counts_once_and_where_it_stands_first() -> None:
    model = make()
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach())
    model.lm_head.weight = model.wte.weight
    watched = Watched(model, [])
    assert [name for name in watched.names if name.startswith("lm_head")] == []
    assert len(watched) == len(list(model.parameters()))
    assert watched.vocabulary == 31


def test_a_run_over_several_ranks_without_a_process_group_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert "init_process_group" in exporter.notices[0]
    exporter.close()


def test_the_commit_is_read_from_gits_own_files_loose_packed_detached_or_in_a_worktree(tmp_path: Path) -> None:
    def git(*arguments: str, folder: Path = tmp_path) -> str:
        ran = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    git("init", "-q")
    assert commit(tmp_path) is None
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "one")
    head = git("rev-parse", "HEAD")
    (tmp_path / "inner").mkdir()
    assert commit(tmp_path / "inner") == head
    git("worktree", "add", "-q", str(tmp_path / "tree"), "-b", "side")
    assert commit(tmp_path / "tree") == head
    git("pack-refs", "--all")
    assert commit(tmp_path) == head
    git("checkout", "-q", "--detach")
    assert commit(tmp_path) == head


def test_the_precision_of_the_moments_is_told_before_and_after_the_first_step() -> None:
    coarse = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(coarse.parameters())
    assert moments_dtype([optimizer]) == "bfloat16"
    coarse(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert moments_dtype([optimizer]) == "bfloat16"
    assert moments_dtype([torch.optim.Adam(nn.Linear(2, 2).parameters())]) == "float32"


def test_a_moment_kept_in_full_precision_counts_and_not_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    assert moments_dtype([optimizer]) == "float32"


def test_an_optimizer_without_moments_or_of_another_kind_has_no_precision_of_them() -> None:
    class Mine(torch.optim.Adam):
        """Of another module: how it keeps its state is its own affair."""

    assert moments_dtype([torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)]) is None
    assert moments_dtype([Mine(nn.Linear(2, 2).parameters())]) is None
