"""Which part of a transformer a parameter belongs to, told from its name and the module that owns it.

Names are matched as the common model libraries spell them (torch.nn, GPT-2, Llama, torchtitan, GPT-NeoX, T5, Megatron). A parameter
that matches nothing is ``other``; a weight that is tied to two places belongs to the first one.
"""

from __future__ import annotations

import re

from torch import nn

_PREFIXES = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
_NORM_NAME = re.compile(
    r"(^|\.|_)(norm\d*|ln|ln_?\w{1,3}|layer_?norm|rms_?norm|norm_\w+|layernorm_\w+|layer_norm_(weight|bias)|\w+_(layer)?norm)(\.|$)"
)
_EMBEDDING = re.compile(r"(^|\.)(wte|wpe|\w*embed(ding)?s?|embed_\w+|shared)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|head|output|output_layer|embed_out|classifier|score|\w+_head)(\.|$)")
_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")
_ATTENTION = re.compile(r"(^|\.)(attn|\w*attention|\w+_attn|attn_\w+|[qkvo]_proj|qkv\w*|c_attn|w[qkvo])(\.|$)")
_MLP = re.compile(
    r"(^|\.)(\w*mlp|ffn?|feed_?forward|fc_?\w*|c_fc|experts?|gate_proj|up_proj|down_proj|w[123]|linear[12]|intermediate|output)(\.|$)"
)


def clean(name: str) -> str:
    """Return a qualified name without what wrappers (DDP, compile, FSDP, checkpointing) put into it."""
    return _PREFIXES.sub("", f"{name}.").strip(".")


def group_of(name: str, owner: nn.Module | None) -> str:
    """Return the group (one of :data:`trainwarden.signals.GROUPS` but ``all``) of the parameter ``name``.

    ``owner`` is the module that holds it: its class decides for norms and embeddings, whatever they are called.
    """
    path = _PREFIXES.sub("", name).lstrip(".")
    kind = type(owner).__name__.lower() if owner is not None else ""
    if "norm" in kind or _NORM_NAME.search(path):
        return "norm"
    if _HEAD.search(path) and not _NUMBERED.search(path):  # "output" inside a numbered block is that block's own
        return "head"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or _EMBEDDING.search(path):
        return "embedding"
    if isinstance(owner, nn.MultiheadAttention) or _ATTENTION.search(path):
        return "attention"
    if _MLP.search(path):
        return "mlp"
    return "other"
