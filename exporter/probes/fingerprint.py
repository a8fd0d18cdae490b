"""What dirty data looks like: supervised tokens, distinct tokens, the longest repeat, ids beyond the vocabulary, and a hash.

Computed on the device the batch is on, in tensor operations alone. No token id is ever used as an index: an id out of
range would be a fault of the device and end the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import local
from trainwarden.record import Value

#: What trainers call them.
INPUT_NAMES = ("input_ids", "tokens", "input", "inputs", "x", "ids")
LABEL_NAMES = ("labels", "targets", "target", "label", "y")
MASK_NAMES = ("attention_mask",)
#: Label of a token that carries no loss (torch.nn.CrossEntropyLoss' ignore_index).
IGNORED = -100

Tokens = tuple[Tensor, "Tensor | None", "Tensor | None"]


def find_tokens(batch: Any) -> Tokens | None:
    """Return (input ids, labels, mask) of a batch, or None where nothing in it looks like sequences of token ids."""
    inputs: Any = None
    labels: Any = None
    mask: Any = None
    if isinstance(batch, torch.Tensor):
        inputs = batch
    elif isinstance(batch, Mapping):
        inputs = next((batch[name] for name in INPUT_NAMES if name in batch), None)
        labels = next((batch[name] for name in LABEL_NAMES if name in batch), None)
        mask = next((batch[name] for name in MASK_NAMES if name in batch), None)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and batch:
        inputs = batch[0]
        labels = batch[1] if len(batch) > 1 else None
        if isinstance(inputs, Mapping):
            found = find_tokens(inputs)
            return found if found is None or labels is None else (found[0], _same_shape(labels, found[0]), found[2])
    if not _whole_numbers(inputs) or inputs.ndim < 2 or not inputs.numel():
        return None
    return local(inputs), _same_shape(labels, inputs), _same_shape(mask, inputs)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _same_shape(value: Any, like: Tensor) -> Tensor | None:
    return local(value) if isinstance(value, torch.Tensor) and value.shape == like.shape else None


def longest_repeat(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the longest run of one id along the last dimension, masked positions left out. ``ids`` is (…, tokens)."""
    rows = ids.reshape(-1, ids.shape[-1])
    place = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    if mask is not None:
        real = mask.reshape(rows.shape) != 0
        begins = begins | ~real
        begins[:, 1:] |= ~real[:, :-1]
    last = torch.where(begins, place, 0).cummax(dim=1).values
    length = place - last + 1
    if mask is not None:
        length = torch.where(mask.reshape(rows.shape) != 0, length, 0)
    return length.max()


def distinct(ids: Tensor) -> Tensor:
    """Return how many different ids there are."""
    ordered = ids.reshape(-1).sort().values
    return (ordered[1:] != ordered[:-1]).sum() + 1


def out_of_range(ids: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    """Return how many ids are none of ``0 … vocabulary - 1``, masked positions left out."""
    found = (ids < 0) | (ids >= vocabulary)
    if mask is not None:
        found = found & (mask != 0)
    return found.sum()


#: An odd multiplier that spreads neighbouring numbers over 32 bits (2^32 over the golden ratio), and what numbers are taken modulo.
SPREAD, MODULUS = 2654435769, 2**32


def hash_of(flat: Tensor) -> Tensor:
    """Return a hash below 2^32 of ids in their order, int64: each id is multiplied by an odd number of its place."""
    place = torch.arange(1, 2 * flat.numel(), 2, device=flat.device)
    return (((flat.to(torch.int64) + 1) * ((place * SPREAD) % MODULUS)) % MODULUS).sum() % MODULUS


class Fingerprint(Probe):
    """Signals ``batch_supervised_tokens``, ``batch_unique_token_ratio``, ``batch_longest_repeat_tokens``,
    ``batch_ids_out_of_range``, ``batch_hash``; counts tokens.
    """

    name = "fingerprint"

    def close(self, closing: Closing) -> None:
        """Compute the fingerprint of all batches of the step, micro-batches together."""
        found = [tokens for tokens in map(find_tokens, closing.batches) if tokens is not None]
        if not found:
            return
        sheet = closing.sheet
        count = sum(ids.numel() for ids, _, _ in found)
        sheet.host["tokens"] = count
        sheet.host["distinct_bound"] = min(count, closing.watched.vocabulary or count)
        for ids, labels, mask in found:
            if labels is not None:
                sheet.add("batch.supervised", (labels != IGNORED).sum())
            elif mask is not None:
                sheet.add("batch.supervised", (mask != 0).sum())
            sheet.add("batch.repeat", longest_repeat(ids, mask))
            if closing.watched.vocabulary:
                sheet.add("batch.beyond", out_of_range(ids, mask, closing.watched.vocabulary))
        if len({ids.device for ids, _, _ in found}) == 1:
            flat = [ids.reshape(-1) for ids, _, _ in found]
            whole = flat[0] if len(flat) == 1 else torch.cat(flat)
            sheet.add("batch.distinct", distinct(whole))
            sheet.add("batch.hash", hash_of(whole))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the fingerprint."""
        found: dict[str, Value] = {}
        repeats = [float(values[0]) for _, values in reading.pieces("batch.repeat")]
        if not repeats:
            return found
        supervised = [float(values[0]) for _, values in reading.pieces("batch.supervised")]
        found["batch_supervised_tokens"] = sum(supervised) if supervised else float(reading.host["tokens"])
        found["batch_longest_repeat_tokens"] = max(repeats)
        beyond = [float(values[0]) for _, values in reading.pieces("batch.beyond")]
        if beyond:
            found["batch_ids_out_of_range"] = sum(beyond)
        number = reading.number("batch.hash")
        if number is not None:
            found["batch_hash"] = number
        number = reading.number("batch.distinct")
        if number is not None:
            found["batch_unique_token_ratio"] = number / reading.host["distinct_bound"]
        return found
