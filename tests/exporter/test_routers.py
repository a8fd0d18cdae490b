"""Mixtures of experts: how tokens are spread, against float64, on routers as people write them and as transformers and torchtitan have them."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.exporter.runs import lines, steps, watch
from trainwarden.exporter.blocks import find
from trainwarden.exporter.experts import find_routers
from trainwarden.exporter.routers import DEAD_AFTER
from trainwarden.record import Step

torch.set_num_threads(1)


class Experts(nn.Module):
    """A layer with a plain linear router named ``router`` beside ``experts``."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            found = found + weight * expert(x)
        return found


class Layer(nn.Module):
    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, width)
        self.moe = Experts(width, experts, top_k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x)).tanh()
        found: torch.Tensor = x + self.moe(x)
        return found


class Model(nn.Module):
    def __init__(self, experts: int = 4, top_k: int = 2, checkpointing: str | None = None) -> None:
        super().__init__()
        self.wte = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(Layer(8, experts, top_k) for _ in range(2))
        self.head = nn.Linear(8, 31)
        self.checkpointing = checkpointing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


def ids_of(step: int, rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 31, (rows, length), generator=torch.Generator().manual_seed(step))


def loss_on(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


class Kept:
    """What routers gave, kept by the test's own hooks; those of what checkpointing computes again are left out."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.of: dict[str, list[Any]] = {name: [] for name in names}
        for name in names:
            model.get_submodule(name).register_forward_hook(self._keeper(name))

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                self.of[name].append(output)

        return keep

    def clear(self) -> None:
        for kept in self.of.values():
            kept.clear()


def reference(logits: torch.Tensor, chosen: torch.Tensor, sigmoid: bool = False) -> dict[str, float]:
    """Return what records should say of a layer, in float64."""
    logits = logits.detach().double().reshape(-1, logits.shape[-1])
    experts = logits.shape[-1]
    counts = torch.bincount(chosen.reshape(-1), minlength=experts).double()
    shares = counts / counts.sum()
    probs = logits.softmax(-1)
    if sigmoid:
        probs = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    positive = shares[shares > 0]
    return {
        "expert_share_max": experts * float(shares.max()),
        "expert_share_min": experts * float(shares.min()),
        "expert_entropy": float(-(positive * positive.log()).sum()) / math.log(experts),
        "router_z": float(logits.logsumexp(-1).abs().max()),
        "router_aux_loss": experts * float((shares * probs.mean(0)).sum()),
    }


def agree(record: Step, label: str, want: dict[str, float], rel: float = 1e-5) -> None:
    found = {name: record.value(name, label) for name in want}
    assert found == pytest.approx(want, rel=rel, abs=1e-6)


def trained(
    folder: Path, model: nn.Module, count: int = 1, accumulate: int = 1, loss_of: Any = loss_on, **arguments: Any
) -> list[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, folder, **{"cadence": 1, **arguments})
    for step in range(1, count + 1):
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = loss_of(model, ids_of(100 * step + micro))
            loss.backward()
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "plain"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_linear_router_beside_experts_is_found_and_summed_over_micro_batches_once(
    tmp_path: Path, checkpointing: str | None, accumulate: int
) -> None:
    torch.manual_seed(0)
    model = Model(checkpointing=checkpointing)
    kept = Kept(model, ["layers.0.moe.router", "layers.1.moe.router"])
    (record,) = trained(tmp_path, model, accumulate=accumulate)
    wanted = []
    for label, outputs in zip("01", kept.of.values(), strict=True):
        assert len(outputs) == accumulate
        logits = torch.cat([output.flatten(0, 1) for output in outputs])
        wanted.append(reference(logits, logits.topk(2, dim=-1).indices))
        agree(record, label, wanted[-1])
        assert record.value("dead_experts", label) == 0
    over_all = {
        "expert_share_max": max(one["expert_share_max"] for one in wanted),
        "expert_share_min": min(one["expert_share_min"] for one in wanted),
        "expert_entropy": min(one["expert_entropy"] for one in wanted),
        "router_z": max(one["router_z"] for one in wanted),
        "router_aux_loss": sum(one["router_aux_loss"] for one in wanted) / 2,
    }
    agree(record, "all", over_all)
    assert "expert_dropped_ratio" not in record.signals


def test_evaluation_generation_and_steps_that_are_not_due_are_not_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path, cadence=4)
    kept = Kept(model, ["layers.0.moe.router"])
    wanted = []
    for step in range(1, 5):
        with torch.no_grad():
            model(ids_of(900 + step, rows=7))
        with exporter.phase("evaluation"):
            model(ids_of(950 + step, rows=7))
        kept.clear()
        loss = loss_on(model, ids_of(step))
        loss.backward()
        (logits,) = kept.of["layers.0.moe.router"]
        wanted.append(reference(logits, logits.topk(2, dim=-1).indices))
        optimizer.step()
        exporter.step(loss)
    found = steps(exporter, tmp_path)
    assert [record.step for record in found if "router_z" in record.signals] == [1, 4]
    agree(found[0], "0", wanted[0])
    agree(found[3], "0", wanted[3])


def test_an_expert_is_dead_once_ten_steps_gave_it_nothing_and_lives_again_with_one_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    router = model.layers[0].get_submodule("moe.router")
    closed = torch.zeros(4)

    def close(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + closed

    router.register_forward_hook(close)  # before the exporter's own, which sees what comes out of it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for step in range(1, 40):
        closed[:] = torch.tensor([0.0, 0.0, -50.0, -50.0]) if 10 <= step < 30 else 0.0
        loss = loss_on(model, ids_of(step, rows=4))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    dead = [record.value("dead_experts", "0") for record in steps(exporter, tmp_path)]
    first = 10 + DEAD_AFTER - 1
    assert dead == [0.0] * (first - 1) + [2.0] * (30 - first) + [0.0] * 10


def small(kind: str, layers: int = 2) -> tuple[Any, str, bool]:
    """Return a small model of transformers, the name of its routers, and whether their scores are sigmoids."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    own: dict[str, tuple[dict[str, Any], str, bool]] = {
        "Mixtral": ({"num_local_experts": 6, "num_experts_per_tok": 2}, "mlp.gate", False),
        "Qwen2Moe": (
            {
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 8,
            },
            "mlp.gate",
            False,
        ),
        "Qwen3Moe": ({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, "mlp.gate", False),
        "Olmoe": ({"num_experts": 6, "num_experts_per_tok": 2}, "mlp.gate", False),
        "DeepseekV3": (
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 8,
                "first_k_dense_replace": 0,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 8,
            },
            "mlp.gate",
            True,
        ),
        "GptOss": (
            {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
            "mlp.router",
            False,
        ),
    }
    extra, router, sigmoid = own[kind]
    config = getattr(transformers, f"{kind}Config")(**common, **extra)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train(), router, sigmoid


def test_probabilities_of_sigmoids_are_those_over_their_sum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.moe = Titan(8, 4, 2)
        del layer.moe.expert_bias
        layer.moe.expert_bias = None
    kept = Kept(model, ["layers.1.moe.router", "layers.1.moe.router.gate"])
    (record,) = trained(tmp_path, model)
    ((_, chosen, _),), (logits,) = kept.of.values()
    agree(record, "1", reference(logits, chosen, sigmoid=True))


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_routers_of_transformers_are_found(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    model, router, sigmoid = small(kind)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    names = [f"model.layers.{number}.{router}" for number in range(2)]
    kept = Kept(model, names)
    (record,) = trained(tmp_path, model, loss_of=lambda model, ids: model(input_ids=ids, labels=ids).loss)
    for label, name in zip("01", names, strict=True):
        ((logits, _, indices),) = kept.of[name]
        want = reference(logits, indices, sigmoid)
        if kind == "DeepseekV3":  # a bias chooses: no floor holds for the balance
            assert "router_aux_loss" not in record.signals
            del want["router_aux_loss"]
        agree(record, label, want)
    assert set(record.signals["router_z"]) == {"all", "0", "1"}  # type: ignore[arg-type]


def test_the_balance_loss_is_that_of_transformers(tmp_path: Path) -> None:
    model, _, _ = small("Mixtral", layers=1)  # theirs takes all layers for one
    model.config.output_router_logits = True
    kept: list[torch.Tensor] = []

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        found = model(input_ids=ids, labels=ids)
        kept.append(found.aux_loss.detach())
        loss: torch.Tensor = found.loss
        return loss

    (record,) = trained(tmp_path, model, loss_of=loss)
    assert record.value("router_aux_loss") == pytest.approx(
        float(kept[0]) / 2, rel=1e-5
    )  # it adds both choices of a token up


class Titan(nn.Module):
    """Named as in torchtitan: a router that holds a ``gate``, gives scores, choices and a histogram, and adds a bias to choose by."""

    class Router(nn.Module):
        def __init__(self, width: int, experts: int, top_k: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.num_experts, self.top_k, self.score_func = experts, top_k, "sigmoid"

        def forward(
            self, x: torch.Tensor, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores = self.gate(x).float().sigmoid()
            chosen = (scores if bias is None else scores + bias).topk(self.top_k, dim=1).indices
            counts = torch.histc(chosen.float(), bins=self.num_experts, min=0, max=self.num_experts)
            return scores.gather(1, chosen), chosen, counts

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.experts = self.Router(width, experts, top_k), nn.Linear(width, width * experts)
        self.register_buffer("expert_bias", torch.linspace(0, 0.5, experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        scores, chosen, _ = self.router(flat, self.expert_bias)
        every = self.experts(flat).unflatten(-1, (-1, flat.shape[-1]))
        taken = every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
        return (scores.unsqueeze(-1) * taken).sum(1).view_as(x)


def test_torchtitans_naming_with_a_bias_that_chooses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.moe = Titan(8, 4, 2)
    kept = Kept(model, ["layers.1.moe.router", "layers.1.moe.router.gate"])
    (record,) = trained(tmp_path, model)
    ((_, chosen, _),), (logits,) = kept.of.values()
    want = reference(logits, chosen, sigmoid=True)
    del want["router_aux_loss"]
    agree(record, "1", want)
    assert "router_aux_loss" not in record.signals
    plain = reference(logits, logits.topk(2, dim=-1).indices, sigmoid=True)
    assert record.value("expert_share_max", "1") != pytest.approx(plain["expert_share_max"])


def test_a_switch_with_room_for_few_drops_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    module: Any = importlib.import_module("transformers.models.switch_transformers.modeling_switch_transformers")
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(d_model=8, num_experts=4, expert_capacity=2)

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.router, self.head = (
                nn.Embedding(31, 8),
                module.SwitchTransformersTop1Router(config),
                nn.Linear(8, 31),
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            mask, probs, _ = self.router(x)
            kept.append(mask)
            return self.head(x * probs + x)

    kept: list[torch.Tensor] = []
    (record,) = trained(tmp_path, Switched())
    (mask,) = kept
    dropped = 1 - float(mask.sum()) / (mask.shape[0] * mask.shape[1])
    assert dropped > 0.1
    assert record.value("expert_dropped_ratio", "router") == pytest.approx(dropped)
    assert record.value("expert_share_max", "router") == pytest.approx(4 * float(mask.sum((0, 1)).max() / mask.sum()))


def test_a_compiled_model_is_seen_by_its_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path, cadence=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    kept = []
    for step in range(1, 5):
        ids = ids_of(step)
        loss = loss_on(compiled, ids)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
        with torch.no_grad():
            x = model.wte(ids[:, :-1])
            first = model.layers[0]
            kept.append(functional.linear(x + first.attention(first.norm(x)).tanh(), first.moe.router.weight))
    found = steps(exporter, tmp_path)
    assert [record.step for record in found if "router_z" in record.signals] == [1, 2, 4]
    for place in (0, 1, 3):
        agree(found[place], "0", reference(kept[place], kept[place].topk(2, dim=-1).indices))


def test_what_looks_like_a_router_and_is_none_is_left_alone() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    model = nn.ModuleDict({"mlp": Gated(), "shared_expert_gate": nn.Linear(8, 1)})
    assert find_routers(model, find(model)) == []


def test_a_module_that_answers_oddly_costs_its_routers_alone(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        @property
        def num_experts(self) -> int:
            raise RuntimeError("not built yet")

    model = Model()
    model.layers[1].moe.router = Odd(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    loss = loss_on(model, ids_of(1))
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    exporter.close()
    (notice,) = exporter.notices
    assert "finding routers" in notice
    (record,) = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert "router_z" not in record.signals
    assert record.value("block_rms", "1") is not None


def test_on_meta_no_value_is_read(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter = watch(model, optimizer, tmp_path, cadence=1)
        for _ in range(2):
            ids = torch.zeros(2, 12, dtype=torch.int64)
            x = model.wte(ids)
            for layer in model.layers:
                x = layer(x)
            loss = model.head(x).sum()
            loss.backward()
            exporter.router("told", x, indices=ids.unsqueeze(-1), loss=loss)
            optimizer.step()
            exporter.step(loss)
    found = steps(exporter, tmp_path)
    assert len(found) == 2
    assert "router_z" not in found[0].signals
