"""The gradient shrink of an embedding: what flows back into it from its outputs is multiplied by alpha.

GLM-130B (arXiv 2210.02414, section 2.2) found that its spikes began with the gradients of the embedding layer, and that shrinking
them to a tenth avoids most of them: ``emb = emb * alpha + emb.detach() * (1 - alpha)``. The same gradient comes of an identity whose
backward pass multiplies, and that leaves the forward pass as it is, to the bit; the sum rounds it. It acts on the *output* of
the module: where the head is tied to the embedding, the part of the weight's gradient that comes through the head is not shrunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwarden.exporter.groups import clean


class _Identity(torch.autograd.Function):
    """Gives back what it is given, and multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.alpha, None


class _Shrink:
    """The forward hook. A class of the module's, so that a model can still be copied and pickled."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        return _Identity.apply(output, self.alpha)  # type: ignore[no-untyped-call]


def shrink(model: nn.Module, alpha: float, modules: Sequence[nn.Module] | None) -> dict[str, float]:
    """Shrink the gradients of ``modules``, by default the ``nn.Embedding`` with most rows, the vocabulary's; return their names.

    A module that has the hook already is given the new ``alpha``; 1 takes it off.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``alpha`` is not within 0 to 1, nothing of ``model`` is an embedding, or a module is not its own.
    """
    if not isinstance(model, nn.Module):
        meant = isinstance(model, int | float) and not isinstance(model, bool)
        hint = f": the share has a name, shrink_embeddings(alpha={model!r})" if meant else ""
        raise TypeError(f"model: {model!r} is no torch.nn.Module{hint}")
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha: {alpha!r} is not from 0 to 1")
    names = {id(module): clean(name) for name, module in model.named_modules()}
    if modules is None:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        if not tables:
            raise ValueError(
                f"{type(model).__name__} has no torch.nn.Embedding: name the modules (modules=[model.tokens])"
            )
        most = max(table.num_embeddings for table in tables)
        modules = [table for table in tables if table.num_embeddings == most]
    found: dict[str, float] = {}
    for module in modules:
        if id(module) not in names:
            raise ValueError(f"modules: a {type(module).__name__} is no module of the model")
        _hook(module, float(alpha))
        found[names[id(module)]] = float(alpha)
    return found


def unshrink(model: nn.Module) -> None:
    """Take the hooks off all modules of a model."""
    for module in model.modules():
        _hook(module, 1.0)


def _hook(module: nn.Module, alpha: float) -> None:
    for number, hook in list(module._forward_hooks.items()):
        if isinstance(hook, _Shrink):  # found again also in a model that was copied, where no handle would be
            del module._forward_hooks[number]
    if alpha != 1.0:
        module.register_forward_hook(_Shrink(alpha))
