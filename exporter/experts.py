"""Where the routers of a mixture of experts are, how many experts each has, and what it gives back.

Told from names and classes: a ``router`` or ``gate`` beside ``experts``, or a module whose class is called a router (Mixtral, Qwen-MoE,
OLMoE, DeepSeek, GPT-OSS, Switch and others of transformers; torchtitan's ``MoE``). Looks at modules alone, and changes none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Structure, is_compiled, unwrapped
from .groups import clean
from .watched import local

#: How a router is called beside ``experts``, and how its class is.
KEYS = ("router", "gate", "gating", "wg")
_CLASS = re.compile(r"(router|top_?k_?gat(e|ing)|moe\w*gate)$", re.IGNORECASE)
#: A class that says that a token takes one.
_FIRST = re.compile(r"top_?1(?!\d)", re.IGNORECASE)
#: Under which names modules and configurations say how many experts there are, and how many of them a token takes.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = (
    "top_k",
    "topk",
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "k",
)
#: Where it is said that scores are sigmoids, and what a router, or the module around it, holds to choose by and so even its load out
#: without a loss (DeepSeek-V3, and torchtitan's name for it).
SCORES = ("score_func", "scoring_func", "score_function", "score_fn", "scoring_function")
BIASES = ("e_score_correction_bias", "expert_bias")
#: Routers of one model that are looked at: as many as blocks have numbers of their own.
ROUTERS = 256
#: How deep tensors are looked for in what a router gives back.
DEPTH = 3


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A router: ``experts`` it has, of which each token takes ``chosen``.

    ``name`` is its qualified name without wrappers, ``label`` its block in a record. ``gate`` is the linear layer within it that
    makes the logits; None where it makes them itself. ``sigmoid``: its scores are sigmoids of them and not their softmax.
    ``biased``: it chooses by more than its scores, so that choices need not follow probabilities, and no floor holds for their balance.
    ``counted`` is False where nothing says how many experts a token takes: the first is looked at then.
    """

    number: int
    module: nn.Module
    name: str
    label: str
    experts: int
    chosen: int
    gate: nn.Module | None = None
    sigmoid: bool = False
    counted: bool = True
    biased: bool = False


@dataclass(slots=True)
class Given:
    """What a router gave back. ``logits`` (…, experts). ``chosen``: numbers of experts (…, k), or with ``mask`` 0 and 1 of each (…, experts)."""

    logits: Tensor | None = None
    chosen: Tensor | None = None
    mask: bool = False


def find_routers(model: nn.Module, structure: Structure) -> list[Router]:
    """Return the routers of ``model`` in its order, :data:`ROUTERS` at most. What is compiled already is left out."""
    found: list[Router] = []
    blocks = {
        name: structure.labels[id(module)][1]
        for name, module in model.named_modules()
        if id(module) in structure.labels
    }
    used: dict[str, int] = {}
    for path, module, parent in _candidates(model):
        experts = _experts(module, parent)
        if experts is None or experts < 2 or len(found) >= ROUTERS:
            continue
        told = _number(CHOSEN, module, parent, getattr(parent, "config", None))
        if told is None and _FIRST.search(type(module).__name__):
            told = 1
        chosen = 1 if told is None or not 1 <= told <= experts else told
        label = _label(path, blocks)
        used[label] = used.get(label, 0) + 1
        label = label if used[label] == 1 else f"{label}.{used[label]}"
        gates = [] if isinstance(module, nn.Linear) else _gates(module, experts)
        found.append(
            Router(
                number=len(found),
                module=module,
                name=clean(path),
                label=label,
                experts=experts,
                chosen=chosen,
                gate=gates[-1] if gates else None,
                sigmoid=_sigmoid(module),
                counted=told is not None,
                biased=any(getattr(owner, name, None) is not None for owner in (module, parent) for name in BIASES),
            )
        )
    return found


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield modules that may be routers with path and parent, the outermost of each."""
    inside: list[str] = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if is_compiled(module):
            if not path:
                return
            inside.append(path)  # a graph that is there already runs without hooks
            continue
        key, above = path.rpartition(".")[2], path.rpartition(".")[0]
        while key and clean(f"{key}.x") == "x" and above:  # a wrapper's room: what it is called stands above
            key, above = above.rpartition(".")[2], above.rpartition(".")[0]
        if not path or any(path.startswith(f"{one}.") for one in inside):
            continue
        parent = modules[above]
        beside = key in KEYS and "experts" in parent._modules
        inner = unwrapped(module)
        if inner is module and (beside or _CLASS.search(type(module).__name__)):
            inside.append(path)
            yield path, module, parent


def _label(path: str, blocks: Mapping[str, str]) -> str:
    """Return the label of the block that holds ``path``, else the path itself."""
    above = path
    while above:
        above = above.rpartition(".")[0]
        if above in blocks:
            return blocks[above]
    return clean(path)


def _experts(module: nn.Module, parent: nn.Module) -> int | None:
    found = _number(EXPERTS, module)
    if found is None and isinstance(module, nn.Linear):
        found = module.out_features
    weight = getattr(module, "weight", None)
    if found is None and isinstance(weight, torch.Tensor) and weight.ndim == 2:
        found = weight.shape[0]
    if found is None:
        found = _number(EXPERTS, parent, getattr(parent, "config", None))
    several = parent._modules.get("experts")
    if found is None and isinstance(several, nn.ModuleList | nn.ModuleDict):
        found = len(several)
    return found


def _number(names: tuple[str, ...], *owners: Any) -> int | None:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _gates(module: nn.Module, experts: int) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.Linear) and part.out_features == experts]


def _sigmoid(module: nn.Module) -> bool:
    told = next((value for name in SCORES if isinstance(value := getattr(module, name, None), str)), None)
    return "sigmoid" in told if told is not None else hasattr(module, BIASES[0])


def read(router: Router, output: Any) -> Given:
    """Return what a router's output tells; tensors of other shapes than its own tell nothing.

    Whole numbers of ``router.chosen`` a token are choices, of ``router.experts`` a mask. Numbers of ``router.experts`` a token are logits,
    the last of several: transformers' routers give logits first and then scores of the chosen alone, Llama 4 and NLLB scores of all and then logits.
    """
    given = Given()
    floats: list[Tensor] = []
    for tensor in _tensors(output):
        width = tensor.shape[-1] if tensor.ndim > 1 and tensor.numel() else 0
        if tensor.is_floating_point():
            if width == router.experts:
                floats.append(tensor)
        elif width == router.chosen and tensor.dtype is not torch.bool:
            given.chosen, given.mask = tensor, False
        elif width == router.experts and given.chosen is None:
            given.chosen, given.mask = tensor, True
    if floats:
        given.logits = floats[0] if router.experts == router.chosen else floats[-1]
    return given


def _tensors(output: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    if isinstance(output, torch.Tensor):
        yield local(output).detach()
    elif depth and isinstance(output, tuple | list | Mapping):
        for one in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(one, depth - 1)
