"""The shrink of an embedding's gradient: a tenth of it, the head's part whole, the forward pass untouched."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.exporter.runs import Block, events, loss_of, make, tokens, watch
from trainwarden.exporter.guard import Guard
from trainwarden.exporter.guard.embeddings import shrink, unshrink


class Tied(Block):
    """The head is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.wte.weight


class Recomputed(Block):
    """Its embedding and first block run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def first(dummy: torch.Tensor) -> torch.Tensor:
            x = self.wte(ids)
            made: torch.Tensor = x + self.attn(self.ln_1(x)).tanh() + 0 * dummy
            return made

        dummy = torch.zeros((), requires_grad=True)  # reentrant checkpointing wants an input that has a gradient
        x: Any = checkpoint(first, dummy, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.lm_head(x + self.mlp(x).relu())
        return logits


def gradients(model: nn.Module, run: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of one batch."""
    model.zero_grad()
    ids = tokens(1)
    logits = (model if run is None else run)(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build()
    return model


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.0])
@pytest.mark.parametrize(
    "build", [Block, lambda: Recomputed(True), lambda: Recomputed(False)], ids=["plain", "reentrant", "recomputed"]
)
def test_the_tables_gradient_is_alpha_times_what_it_was_and_nothing_else_changes(build: Any, alpha: float) -> None:
    model = seeded(build)
    loss, whole = gradients(model)
    assert shrink(model, alpha, None) == {"wte": alpha}
    shrunk_loss, shrunk = gradients(model)
    assert torch.equal(loss, shrunk_loss)
    torch.testing.assert_close(shrunk.pop("wte.weight"), whole.pop("wte.weight") * alpha, rtol=1e-5, atol=1e-9)
    assert all(torch.equal(whole[name], shrunk[name]) for name in whole)


def test_it_is_the_gradient_of_the_formula_of_glm_130b() -> None:
    model = make(dtype=torch.float64)
    shrink(model, 0.1, None)
    _, found = gradients(model)
    unshrink(model)
    model.wte.register_forward_hook(lambda module, inputs, output: output * 0.1 + output.detach() * 0.9)
    _, wanted = gradients(model)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-12)


def test_a_tied_heads_part_of_the_gradient_is_whole() -> None:
    model = seeded(Tied)
    # The part through the head: the same model with the embedding's output cut off.
    handle = model.wte.register_forward_hook(lambda module, inputs, output: output.detach().requires_grad_())
    _, cut = gradients(model)
    handle.remove()
    _, whole = gradients(model)
    shrink(model, 0.1, None)
    _, shrunk = gradients(model)
    through_head = cut["wte.weight"]
    torch.testing.assert_close(
        shrunk["wte.weight"], through_head + 0.1 * (whole["wte.weight"] - through_head), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_shrinks_alike_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    model = make()
    _, whole = gradients(model)
    shrink(model, 0.1, None)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    _, shrunk = gradients(model, compiled)
    torch.testing.assert_close(shrunk["wte.weight"], whole["wte.weight"] * 0.1, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(shrunk["lm_head.weight"], whole["lm_head.weight"], rtol=1e-5, atol=1e-8)


def test_said_twice_it_holds_once_and_one_takes_it_off() -> None:
    model = make()
    _, whole = gradients(model)
    for alpha in (0.1, 0.1, 0.5):
        shrink(model, alpha, None)
    _, half = gradients(model)
    torch.testing.assert_close(half["wte.weight"], whole["wte.weight"] * 0.5)
    shrink(model, 1.0, None)
    assert not model.wte._forward_hooks
    _, again = gradients(model)
    assert torch.equal(again["wte.weight"], whole["wte.weight"])


def test_a_copied_or_pickled_model_keeps_it_once() -> None:
    model = make()
    shrink(model, 0.1, None)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        shrink(other, 0.1, None)
        assert len(other.wte._forward_hooks) == 1


def test_other_tables_can_be_named_and_what_is_none_is_refused() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(50, 4), "places": nn.Embedding(12, 4), "out": nn.Linear(4, 50)})
    assert list(shrink(model, 0.1, None)) == ["words"]
    assert list(shrink(model, 0.1, [model["places"]])) == ["places"]
    with pytest.raises(ValueError, match="no module of the model"):
        shrink(model, 0.1, [nn.Embedding(3, 3)])
    with pytest.raises(ValueError, match=r"has no torch\.nn\.Embedding"):
        shrink(nn.Linear(2, 2), 0.1, None)
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            shrink(model, alpha, None)


def test_generating_without_gradients_is_left_alone() -> None:
    model = make()
    shrink(model, 0.1, None)
    with torch.no_grad():
        assert model(tokens(1)).grad_fn is None


@pytest.mark.parametrize("started", [False, True])
def test_a_start_that_shrinks_says_so_and_one_that_lost_it_does_not(tmp_path: Path, started: bool) -> None:
    said = []
    for shrinks in (True, False):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        exporter = watch(model, optimizer, tmp_path / str(shrinks))
        guard = Guard(exporter)
        if started:
            exporter.resumed(0)
        if shrinks:
            assert guard.shrink_embeddings() == ["wte"]
        loss_of(model, 1).backward()
        optimizer.step()
        exporter.step()
        exporter.close()
        kind = "guard" if started and shrinks else "start"
        fields = events(tmp_path / str(shrinks), kind)[0].fields
        said.append((fields["guard"] if kind == "start" else fields)["embedding_alpha"])
    assert said == [{"wte": 0.1}, {}]


def test_removing_the_guard_takes_the_shrink_off_too(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters()), tmp_path)
    guard = Guard(exporter)
    guard.shrink_embeddings(alpha=0.2)
    guard.remove()
    assert not model.wte._forward_hooks or all(
        type(hook).__name__ != "_Shrink" for hook in model.wte._forward_hooks.values()
    )
    exporter.close()


def test_switched_off_the_exporter_still_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is arithmetic of the model: a run must not train another one because nobody watches it."""
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    model = make()
    _, whole = gradients(model)
    exporter = watch(model, torch.optim.SGD(model.parameters()), tmp_path)
    Guard(exporter).shrink_embeddings()
    _, shrunk = gradients(model)
    torch.testing.assert_close(shrunk["wte.weight"], whole["wte.weight"] * 0.1)


@pytest.mark.parametrize("given", [0.5, 1, "wte"])
def test_a_share_in_the_place_of_the_model_is_one_sentence_that_says_how_it_is_written(
    tmp_path: Path, given: object
) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters()), tmp_path)
    said = rf"^model: {re.escape(repr(given))} is no torch\.nn\.Module"
    with pytest.raises(TypeError, match=said + ("" if given == "wte" else rf".*shrink_embeddings\(alpha={given}\)$")):
        Guard(exporter).shrink_embeddings(given)  # type: ignore[arg-type]
    exporter.close()
