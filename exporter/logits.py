"""How large attention logits are, seen from queries and keys, from their scores, or from what a kernel gives back.

None of these is *the maximum*, which a fused kernel never writes down: a bound from norms lies above it, the largest of some sampled
rows below it, and a log-sum-exp of a row above the row's maximum by at most the logarithm of its keys. Logits are those that
enter the softmax: scaled, with what a float mask adds. Everything stays on the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .measure import accumulation

#: Query rows that are sampled of each head, spread evenly; the last one, which sees the most keys, is among them.
ROWS = 8
#: Sequences of the batch that are sampled.
SEQUENCES = 2
#: Sampled logits at most: what is sampled is bounded, however long the sequences are.
SAMPLES = 2**22
#: Under which name the kernels of torch's attention keep the log-sum-exp of each row for the backward pass.
SAVED = ("_saved_logsumexp", "_saved_log_sumexp", "_saved_softmax_logsumexp")


def bound(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return the largest over heads and samples of max|q| max|k| scale, 0-D. No logit without a mask's addition is above it.

    ``query`` is (…, L, E), ``key`` (…, S, E); with fewer heads in ``key`` each serves several, as grouped attention has it.
    """
    dtype = accumulation(query)
    queries = torch.linalg.vector_norm(query, dim=-1, dtype=dtype).amax(-1)
    keys = torch.linalg.vector_norm(key, dim=-1, dtype=dtype).amax(-1)
    if queries.ndim and keys.ndim and queries.shape[-1] != keys.shape[-1]:
        queries = queries.unflatten(-1, (keys.shape[-1], -1))
        keys = keys.unsqueeze(-1)
    found: Tensor = (queries * keys).amax() * scale_of(query, scale)
    return found


def sampled(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None) -> Tensor:
    """Return the largest logit of about :data:`ROWS` query rows of each head of about :data:`SEQUENCES` sequences, 0-D.

    Each is taken against all keys that it may see.
    """
    if query.ndim > 3:  # some sequences of the batch, the last among them
        every = max(1, query.shape[0] // SEQUENCES)
        begin = (query.shape[0] - 1) % every
        mask = mask[begin::every] if mask is not None and mask.ndim == query.ndim and mask.shape[0] > 1 else mask
        query, key = query[begin::every], key[begin::every]
        if query.shape[-3] != key.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    length, keys = query.shape[-2], key.shape[-2]
    rows = max(1, min(ROWS, length, SAMPLES // max(1, query.shape[:-2].numel() * keys)))
    step = length // rows
    first = (length - 1) % step
    dtype = accumulation(query)
    some = query[..., first::step, :].to(dtype)
    logits = torch.matmul(some, key.to(dtype).transpose(-2, -1)) * scale_of(query, scale)
    if causal:
        place = torch.arange(first, length, step, device=query.device).unsqueeze(-1)
        logits = logits.masked_fill(torch.arange(keys, device=query.device) > place, -math.inf)
    if mask is not None:
        part = mask[..., first::step, :] if mask.ndim > 1 and mask.shape[-2] == length else mask
        logits = logits.masked_fill(~part, -math.inf) if part.dtype is torch.bool else logits + part
    return logits.amax()


def of_scores(scores: Tensor) -> Tensor:
    """Return the largest of up to :data:`ROWS` rows of each head of ``scores`` (…, L, S), 0-D."""
    length = scores.shape[-2]
    rows = max(1, min(ROWS, length, SAMPLES // max(1, scores.shape[:-2].numel() * scores.shape[-1])))
    step = length // rows
    return scores[..., (length - 1) % step :: step, :].amax()


def log_sum_exp(output: Tensor, length: int) -> Tensor | None:
    """Return the largest log-sum-exp over the rows of attention that just gave ``output``, 0-D, or None.

    It is what the kernel keeps for the backward pass, so it is there in training alone. Where saved tensors pass through
    hooks (checkpointing, offloading) it is let be: to ask for it would set them to work.
    """
    made = output.grad_fn
    if made is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    for name in SAVED:
        kept = getattr(made, name, None)
        if isinstance(kept, torch.Tensor) and kept.numel():
            rows = kept[..., :length] if kept.ndim > 1 and kept.shape[-1] >= length else kept
            return torch.where(torch.isposinf(rows), -math.inf, rows).amax()  # of padded rows
    return None


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return what products of queries and keys are multiplied by."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
