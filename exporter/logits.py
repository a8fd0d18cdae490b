"""How large attention logits are, seen from queries and keys, from their scores, or from what a kernel gives back.

None of these is *the maximum*, which a fused kernel never writes down: a bound from norms lies above it, the largest of some sampled
rows below it, and a log-sum-exp of a row above the row's maximum by at most the logarithm of its keys. Logits are those that
enter the softmax: scaled, with what a float mask adds. Everything stays on the device.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .measure import accumulation

#: Query rows that are sampled of each head, spread evenly; the last one, which sees the most keys, is among them.
ROWS = 8
#: Sequences of the batch that are sampled.
SEQUENCES = 2
#: Elements of keys that are copied at once, and scores that are looked at.
COPIED, SAMPLES = 2**22, 2**22
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

    Each is taken against all keys that it may see, some keys after the others: what is copied is bounded, however long and many the
    sequences are.
    """
    if query.ndim > 3:  # some sequences of the batch, the last among them
        every = max(1, query.shape[0] // SEQUENCES)
        begin = (query.shape[0] - 1) % every
        mask = mask[begin::every] if mask is not None and mask.ndim == query.ndim and mask.shape[0] > 1 else mask
        query, key = query[begin::every], key[begin::every]
    length, keys, dtype = query.shape[-2], key.shape[-2], accumulation(query)
    step = length // min(ROWS, length)
    first = (length - 1) % step
    some = query[..., first::step, :].to(dtype) * scale_of(query, scale)
    if mask is not None and mask.ndim > 1 and mask.shape[-2] == length:
        mask = mask[..., first::step, :]
    together = max(1, COPIED // (query.shape[:-2].numel() * query.shape[-1]))
    found: Tensor | None = None
    for begin in range(0, keys, together):
        part = key[..., begin : begin + together, :]
        if query.ndim > 3 and query.shape[-3] != key.shape[-3]:
            part = part.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        logits = torch.matmul(some, part.to(dtype, memory_format=torch.contiguous_format).transpose(-2, -1))
        if causal:
            unseen = _unseen(first, length, step, begin, begin + part.shape[-2], query.device)
            logits.masked_fill_(unseen, -math.inf)
        if mask is not None:
            of_these = mask[..., begin : begin + together] if mask.shape[-1] == keys else mask
            logits = logits.masked_fill(~of_these, -math.inf) if mask.dtype is torch.bool else logits + of_these
        largest = logits.amax()
        found = largest if found is None else torch.maximum(found, largest)
    assert found is not None  # nobody attends to no key
    return found


@lru_cache(maxsize=16)
def _unseen(first: int, length: int, step: int, begin: int, end: int, device: torch.device) -> Tensor:
    """Return which keys ``begin … end - 1`` come after each sampled row: the same in all layers and steps."""
    rows = torch.arange(first, length, step, device=device).unsqueeze(-1)
    return torch.arange(begin, end, device=device) > rows


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
