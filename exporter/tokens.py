"""Finds the token ids in whatever a loader hands out, and what is said along with them. Reads shapes and types alone.

Nothing here looks at a value on a device or copies one from it. Lists and numpy arrays, which are the host's own, become tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .watched import local

#: What trainers call them.
INPUT_NAMES = ("input_ids", "tokens", "input", "inputs", "x", "ids")
LABEL_NAMES = ("labels", "targets", "target", "label", "y")
MASK_NAMES = ("attention_mask",)
LOSS_MASK_NAMES = ("loss_mask",)
POSITION_NAMES = ("position_ids", "positions")
DOCUMENT_NAMES = ("seq_idx", "document_ids", "doc_ids", "segment_ids", "sequence_ids")
OFFSET_NAMES = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q")
#: Names under which one dimension of ids is meant as tokens; under others it may be one number a sample.
_FLAT = frozenset(("input_ids", "tokens", "ids"))
#: Types that torch stores and hardly computes with, as token files have them.
_WITHOUT_OPERATIONS = frozenset((torch.uint16, torch.uint32, torch.uint64))
#: How deep tokens are looked for in mappings within mappings, and samples of a batch that was not collated.
_DEPTH, _SAMPLES = 3, 4096


@dataclass(slots=True)
class Tokens:
    """The tokens of one batch. ``ids`` are whole numbers, (…, tokens), on the device that they were found on.

    ``labels`` are whole numbers of any shape, ``loss_mask`` what is non-zero where a token carries a loss, ``mask`` (as
    ``ids``) what is zero at padding. ``joined`` (rows, tokens - 1) is True where a token belongs to the same document as the one
    before it; None where a row is one document. Each is None where it was not said.
    """

    ids: Tensor
    labels: Tensor | None = None
    mask: Tensor | None = None
    loss_mask: Tensor | None = None
    joined: Tensor | None = None


def find_tokens(batch: Any) -> Tokens | None:
    """Return the tokens of a batch, or None where nothing in it looks like sequences of token ids.

    A batch is a tensor, a mapping (a ``BatchEncoding`` is one), a dataclass or named tuple, a pair (inputs, labels), a list of
    samples that are mappings, or a mapping that holds one of these.
    """
    named = named_parts(batch)
    if named is not None:
        return _in_mapping(named, _DEPTH)
    if isinstance(batch, torch.Tensor | np.ndarray):
        ids = _whole(batch)
        return None if ids is None or ids.ndim < 2 else Tokens(ids)
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or not batch:
        return None
    if all(isinstance(sample, Mapping) for sample in islice(batch, _SAMPLES)):
        return _in_samples(batch)
    found = find_tokens(batch[0])
    if found is not None and found.labels is None and len(batch) > 1:
        labels = _whole(batch[1])
        if labels is not None and _goes_with(labels, found.ids):
            found.labels = labels
    return found


def named_parts(batch: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a batch by name, None where it has no names."""
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, SimpleNamespace):
        return vars(batch)
    names = getattr(type(batch), "_fields", None)
    if isinstance(batch, tuple) and names:  # a named tuple
        return dict(zip(names, batch, strict=True))
    return None


def _in_mapping(named: Mapping[Any, Any], depth: int) -> Tokens | None:
    for name in INPUT_NAMES:
        given = named.get(name)
        inner = named_parts(given)
        if inner is not None:
            found = _in_mapping(inner, depth - 1) if depth else None
            if found is not None:
                return _with_what_is_said(found, named)
            continue
        ids, joined = _ids(given)
        if ids is None and isinstance(given, list | tuple) and depth:  # a pair (inputs, labels) handed in as the batch
            found = find_tokens(given)
            if found is not None:
                return _with_what_is_said(found, named)
        if ids is None or (ids.ndim < 2 and name not in _FLAT):
            continue
        return _with_what_is_said(Tokens(ids, joined=joined), named)
    if depth:
        for given in islice(named.values(), _SAMPLES):
            inner = named_parts(given)
            found = None if inner is None else _in_mapping(inner, depth - 1)
            if found is not None:
                return found
    return None


def _with_what_is_said(found: Tokens, named: Mapping[Any, Any]) -> Tokens:
    """Add labels, masks and documents, as far as they belong to these ids and lie on their device."""
    if found.labels is None:
        found.labels = next((labels for labels, _ in _each(named, LABEL_NAMES)), None)
    if found.mask is None:
        found.mask = _like(named, MASK_NAMES, found.ids)
    if found.loss_mask is None:
        given = next((named[name] for name in LOSS_MASK_NAMES if named.get(name) is not None), None)
        found.loss_mask = local(given) if isinstance(given, torch.Tensor) else None
    if found.joined is None and found.ids.shape[-1] > 1:
        found.joined = _joined(named, found.ids)
    return found


def _joined(named: Mapping[Any, Any], ids: Tensor) -> Tensor | None:
    documents = _like(named, DOCUMENT_NAMES, ids)
    if documents is None:
        offsets = next((offsets for offsets, _ in _each(named, OFFSET_NAMES)), None)
        if offsets is not None and offsets.ndim == 1 and offsets.device == ids.device:
            # How many offsets lie at or before a token is the number of its document: nothing is indexed by what they say.
            places = torch.arange(ids.numel(), device=ids.device)
            documents = torch.searchsorted(offsets.to(torch.int64), places, right=True)
    if documents is not None:
        rows = documents.reshape(-1, ids.shape[-1])
        return rows[:, 1:] == rows[:, :-1]
    positions = _like(named, POSITION_NAMES, ids)
    if positions is None:
        return None
    rows = positions.reshape(-1, ids.shape[-1])
    return rows[:, 1:] == rows[:, :-1] + 1


def _in_samples(samples: Sequence[Mapping[Any, Any]]) -> Tokens | None:
    """Return the tokens of a list of samples that nobody has collated: rows one behind the other, of any lengths."""
    first = samples[0]
    columns: dict[str, list[Any]] = {}
    for names in (INPUT_NAMES, LABEL_NAMES, MASK_NAMES):
        name = next((name for name in names if first.get(name) is not None), None)
        if name is not None and all(name in sample for sample in samples):
            columns[name] = [sample[name] for sample in samples]
    return _in_mapping(columns, 0)


def _each(named: Mapping[Any, Any], names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor | None]]:
    for name in names:
        ids, joined = _ids(named.get(name))
        if ids is not None:
            yield ids, joined


def _like(named: Mapping[Any, Any], names: Sequence[str], ids: Tensor) -> Tensor | None:
    """Return the first part of these names that says one number a token, in the shape of ``ids``."""
    for found, _ in _each(named, names):
        if found.device == ids.device:
            if found.shape == ids.shape:
                return found
            if found.ndim == ids.ndim and found.shape[-1] == ids.shape[-1] and set(found.shape[:-1]) == {1}:
                return found.expand_as(ids)
    return None


def _goes_with(labels: Tensor, ids: Tensor) -> bool:
    """Say whether these can be the labels of those ids: of their shape, flattened, or shifted by one."""
    rows = ids.numel() // ids.shape[-1]
    return labels.shape == ids.shape or labels.numel() in (ids.numel(), ids.numel() - rows)


def _ids(value: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return whole numbers as a tensor, and which of them go on a row where the rows are of several lengths."""
    if not isinstance(value, list | tuple):
        return _whole(value), None
    if not value:
        return None, None
    if isinstance(value[0], int | np.integer) and not isinstance(value[0], bool):
        return _of_numbers(value), None
    if not isinstance(value[0], list | tuple | torch.Tensor | np.ndarray):
        return None, None
    rows = [row if isinstance(row, torch.Tensor | np.ndarray) else _of_numbers(row) for row in value]
    tensors = [_whole(row) for row in rows]
    if any(tensor is None or tensor.ndim != 1 for tensor in tensors):
        return None, None
    known = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if not known or len({tensor.device for tensor in known}) > 1:
        return None, None
    if len({tensor.numel() for tensor in known}) == 1:
        return torch.stack(known), None
    lengths = np.array([tensor.numel() for tensor in known])
    goes_on = np.ones(int(lengths.sum()), dtype=np.bool_)
    goes_on[np.cumsum(lengths)[:-1]] = False
    together = torch.cat(known)
    if together.device.type != "cpu":
        return together, None  # where a row ends is known here alone, and to tell the device would be to wait for it
    return together, torch.from_numpy(goes_on[None, 1:])


def _of_numbers(row: Any) -> Tensor | None:
    try:
        return _whole(np.asarray(row))
    except (TypeError, ValueError, OverflowError):
        return None


def _whole(value: Any) -> Tensor | None:
    """Return a non-empty tensor of whole numbers, or None."""
    if isinstance(value, torch.Tensor):
        value = local(value)
        of_numbers = not (value.is_floating_point() or value.is_complex())
        if not of_numbers or value.layout is not torch.strided or not value.ndim or not value.numel():
            return None
        wide: Tensor = value.to(torch.int64) if value.dtype in _WITHOUT_OPERATIONS else value
        return wide
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.ndim and value.size:
        return torch.from_numpy(value.astype(np.int64))
    return None
