"""Where a model's blocks, and the attention, MLPs, norms, embeddings and head in and around them are.

Told from the structure: a list of like modules that hold attention, or several parts with parameters, is a stack of blocks. Within a
block, and around the blocks, a module belongs to the group that its name and class say (:mod:`exporter.groups`); the outermost
one counts. Looks at modules alone, and changes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from .groups import clean, group_of

#: Position of what stands before all blocks; what stands behind them has the number of blocks as its position.
BEFORE = -1
#: What has a way of its own through all of it, without calling its parts, as long as no part has a hook.
FAST = nn.TransformerEncoderLayer
#: Where wrappers keep what they wrap, and those whose ``module`` that is.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
PASSING_ON = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """A module whose output is looked at.

    ``name`` is its qualified name without wrappers, ``group`` one of :data:`trainwarden.signals.GROUPS`, where ``all`` is a block.
    ``block`` is the number of the block that it is or lies in, :data:`BEFORE`, or the number of blocks. ``label`` names a
    block in a record. ``fast``: torch takes another way through it without gradients, but only while nobody listens.
    """

    number: int
    module: nn.Module
    name: str
    group: str
    block: int
    label: str = ""
    fast: bool = False


@dataclass(slots=True, eq=False)
class Structure:
    """What was found. ``above`` are the modules that lead to the blocks, ``last_norm`` the one behind all of them.

    ``compiled`` names modules that were compiled already: nothing within them is looked at. ``labels`` are number and
    label of each block, by the id of its module.
    """

    spots: list[Spot] = field(default_factory=list)
    above: list[nn.Module] = field(default_factory=list)
    blocks: int = 0
    last_norm: Spot | None = None
    compiled: list[str] = field(default_factory=list)
    labels: dict[int, tuple[int, str]] = field(default_factory=dict)


def find(model: nn.Module) -> Structure:
    """Return the structure of ``model``."""
    found = Structure()
    stacks = list(_stacks(model, "", found))
    for path, stack in stacks:
        for key, child in stack.named_children():
            found.labels[id(child)] = (found.blocks, key if len(stacks) == 1 else f"{clean(path)}.{key}")
            found.blocks += 1
    if not is_compiled(model):
        _around(unwrapped(model), "", found, isinstance(unwrapped(model), FAST))
    places = [at for at, spot in enumerate(found.spots) if spot.group == "all"]
    behind = [spot for spot in found.spots[places[-1] + 1 :] if spot.group == "norm"] if places else []
    found.last_norm = behind[-1] if behind else None
    return found


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module was given to ``torch.compile``, or its ``compile`` was called."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _stacks(module: nn.Module, path: str, found: Structure) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost lists of blocks with their paths, and note what leads to them and what is compiled."""
    if is_compiled(module):
        found.compiled.append(clean(path) or "the model")
    elif _is_stack(module):
        found.compiled.extend(
            clean(f"{path}.{name}") for name, part in module.named_modules() if name and is_compiled(part)
        )
        yield path, module
    else:
        found.above.append(module)
        any_found = False
        for key, child in module.named_children():
            for one in _stacks(child, f"{path}.{key}" if path else key, found):
                any_found = True
                yield one
        if path and not any_found:
            found.above.remove(module)


def _is_stack(module: nn.Module) -> bool:
    """Say whether this is a list of blocks: like modules, each of several parts of which one is known."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    children = [unwrapped(child) for child in module.children()]
    alike = len({type(child) for child in children}) <= max(1, len(children) // 2)
    return bool(children) and alike and all(_is_block(child) for child in children)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    children = [
        part
        for child in module.children()
        for part in (child.children() if isinstance(child, nn.ModuleList) else [child])
    ]
    if sum(map(_has_parameters, children)) < 2 or not _groups_in(module) & {"attention", "mlp", "norm"}:
        return False
    # Several models in a list are no blocks: theirs are. Experts in a list within a block are no blocks.
    inner = (part for part in module.modules() if part is not module and _is_stack(part))
    return not any("attention" in _groups_in(child) for stack in inner for child in stack.children())


def _groups_in(module: nn.Module) -> set[str | None]:
    """Return the groups of what is below a module."""
    return {_group(name.rpartition(".")[2], part, True) for name, part in module.named_modules() if name}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what a wrapper that only passes on holds."""
    for name in WRAPPED:
        inner = module._modules.get(name)
        if inner is not None and (name != "module" or type(module).__name__ in PASSING_ON):
            return unwrapped(inner)
    return module


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _around(module: nn.Module, path: str, found: Structure, fast: bool) -> None:
    """Add the spots below a module that is in no block, the blocks among them."""
    for key, child in module.named_children():
        name = f"{path}.{key}" if path else key
        inner = unwrapped(child)
        if id(child) in found.labels:
            _block(child, name, found, fast)
        elif is_compiled(child) or is_compiled(inner):
            continue
        else:
            holds = any(id(part) in found.labels for part in child.modules())
            group = None if holds else _group(key, child, False)
            if group is None:
                _around(inner, name, found, fast or isinstance(inner, FAST))
            else:
                where = found.blocks if any(spot.group == "all" for spot in found.spots) else BEFORE
                _add(found, child, name, group, where, "", fast)


def _block(child: nn.Module, name: str, found: Structure, fast: bool) -> None:
    """Add a block's parts and then the block. A compiled one is looked at from outside, where that is possible."""
    block, label = found.labels[id(child)]
    inner = unwrapped(child)
    fast = fast or isinstance(inner, FAST)
    if not is_compiled(child) and not is_compiled(inner):
        _parts(inner, name, found, block, fast)
    if type(child).__name__ == "OptimizedModule" or not (is_compiled(child) or is_compiled(inner)):
        _add(found, child, name, "all", block, label, fast)


def _parts(module: nn.Module, path: str, found: Structure, block: int, fast: bool) -> None:
    """Add the parts of a block. Of a part that is spread over bare layers, the last counts: it is what the part gives back."""
    parts = [(f"{path}.{key}", child, _group(key, child, True)) for key, child in module.named_children()]
    for name, child, group in parts:
        if is_compiled(child):
            continue
        if group is None:
            _parts(unwrapped(child), name, found, block, fast)
            continue
        like = [other for _, other, same in parts if same == group]
        whole = [other for other in like if other._modules]
        if group == "norm" or child in whole or (not whole and child is like[-1]):
            _add(found, child, name, group, block, "", fast)


def _add(found: Structure, module: nn.Module, name: str, group: str, block: int, label: str, fast: bool) -> None:
    if all(module is not spot.module for spot in found.spots):
        found.spots.append(Spot(len(found.spots), module, clean(name), group, block, label, fast))


def _group(key: str, module: nn.Module, in_block: bool) -> str | None:
    """Return the group of a module by its own name and class, None where these tell none or it holds no parameter."""
    inner = unwrapped(module)
    if isinstance(inner, nn.ModuleList | nn.ModuleDict) or not _has_parameters(inner):
        return None
    if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    for word in (key, type(inner).__name__):
        found = group_of(f"0.{word.lower()}" if in_block else word.lower(), inner)
        if found == "embedding" and inner._modules:
            return None  # a room for several, as BERT has it: its tables count
        if found != "other":
            return found
    return None
