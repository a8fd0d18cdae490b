"""Which token ids are digits and which are padding: what an exporter is told, and how it is read off a tokenizer.

A dirty shard is often one of numbers, or one that is mostly padding; the loss alone tells neither from a hard one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from trainwarden.signals import TOKEN_CLASSES

#: What tokenizers put in front of a word's piece, or inside a word: byte-level BPE, SentencePiece, WordPiece.
_MARKS = ("Ġ", "▁", "##")
#: Largest table: a vocabulary beyond it is a mistake.
LARGEST = 1 << 24


@runtime_checkable
class _HasVocabulary(Protocol):
    """Tokenizers of ``transformers`` and of ``tokenizers``."""

    def get_vocab(self) -> Mapping[str, int]: ...


@runtime_checkable
class _HasTokenBytes(Protocol):
    """tiktoken's encodings."""

    @property
    def n_vocab(self) -> int: ...

    def decode_single_token_bytes(self, token: int, /) -> bytes: ...


@runtime_checkable
class _HasPieces(Protocol):
    """SentencePiece's processors."""

    def get_piece_size(self) -> int: ...

    def id_to_piece(self, id: int, /) -> str: ...

    def pad_id(self) -> int: ...


def token_classes(tokenizer: Any, padding: int | None = None) -> dict[str, list[int]]:
    """Return the ids of each class in a tokenizer: ``{"digit": […], "padding": […]}``, a class without ids left out.

    ``tokenizer`` is one of ``transformers`` or ``tokenizers``, a tiktoken encoding, a SentencePiece processor, the text
    ``"bytes"`` (256 bytes), a dict from text to id or from id to text, or the texts in the order of their ids (a list, or one string of
    characters). ``padding`` names the id of padding where the tokenizer does not. A token counts as digits where nothing
    but digits is in it, whatever stands in front of it.

    Raises:
        TypeError: it is none of these.
    """
    digits = sorted({number for number, text in _texts(tokenizer) if _is_digits(text)})
    pad = padding if padding is not None else _padding(tokenizer)
    found = {"digit": digits, "padding": [] if pad is None else [int(pad)]}
    return {name: ids for name, ids in found.items() if ids}


def _texts(tokenizer: Any) -> Iterator[tuple[int, str | bytes]]:
    if isinstance(tokenizer, str):
        if tokenizer == "bytes":
            yield from ((number, bytes([number])) for number in range(256))
        else:
            yield from enumerate(tokenizer)
    elif isinstance(tokenizer, (Mapping, _HasVocabulary)):
        vocabulary: Mapping[Any, Any] = tokenizer if isinstance(tokenizer, Mapping) else tokenizer.get_vocab()
        for one, other in vocabulary.items():
            number, text = (one, other) if isinstance(one, int) else (int(other), one)
            yield number, text
    elif isinstance(tokenizer, _HasTokenBytes):
        for number in range(tokenizer.n_vocab):
            try:
                yield number, tokenizer.decode_single_token_bytes(number)
            except KeyError:  # a hole in the numbering
                continue
    elif isinstance(tokenizer, _HasPieces):
        yield from ((number, tokenizer.id_to_piece(number)) for number in range(tokenizer.get_piece_size()))
    elif isinstance(tokenizer, Sequence) and not isinstance(tokenizer, bytes):
        yield from enumerate(tokenizer)
    else:
        raise TypeError(
            f"token_classes: {type(tokenizer).__name__} is no tokenizer that is known: give "
            '{"digit": ids, "padding": id} instead'
        )


def _padding(tokenizer: Any) -> int | None:
    if isinstance(tokenizer, _HasPieces):
        return tokenizer.pad_id() if tokenizer.pad_id() >= 0 else None
    if not isinstance(tokenizer, _HasVocabulary):
        return None
    found = getattr(tokenizer, "pad_token_id", None)
    if found is None:
        told = getattr(tokenizer, "padding", None)  # of ``tokenizers``: a dict once padding is enabled
        found = told.get("pad_id") if isinstance(told, dict) else None
    return found if isinstance(found, int) else None


def _is_digits(text: str | bytes) -> bool:
    if isinstance(text, bytes):
        return text.strip().isdigit()
    for mark in _MARKS:
        text = text.removeprefix(mark)
    return text.strip().isdecimal()


class TokenClasses:
    """The classes that an exporter is told, checked: ``names`` in the order of :data:`trainwarden.signals.TOKEN_CLASSES`.

    ``given`` maps names to one id, ids (any iterable of whole numbers, a tensor, an array), or one truth value an id of the
    vocabulary; or it is a tokenizer, as :func:`token_classes` takes them.

    Raises:
        TypeError, ValueError: a name is unknown, or what is said of it are no ids.
    """

    def __init__(self, given: Any) -> None:
        classes = given if isinstance(given, Mapping) else token_classes(given)
        unknown = [str(name) for name in classes if name not in TOKEN_CLASSES]
        if unknown:
            raise ValueError(
                f"token_classes: {unknown[0]!r} is none of {', '.join(TOKEN_CLASSES)}; of a dict that is a vocabulary, give "
                "trainwarden.exporter.token_classes(it)"
            )
        self.names = tuple(name for name in TOKEN_CLASSES if name in classes)
        self._ids = [_ids_of(name, classes[name]) for name in self.names]

    def table(self) -> Tensor:
        """Return what each id is, uint8 of shape (largest id + 3, classes): row 1 + id, first and last for all other ids."""
        largest = max((int(ids.max()) for ids in self._ids if ids.size), default=0)
        table = np.zeros((largest + 3, len(self.names)), dtype=np.uint8)
        for column, ids in enumerate(self._ids):
            table[ids + 1, column] = 1
        return torch.from_numpy(table)


def _ids_of(name: str, given: Any) -> np.ndarray:
    if isinstance(given, torch.Tensor):
        given = given.detach().numpy(force=True)  # at attach, when to wait for a device harms nobody
    elif isinstance(given, Iterable) and not isinstance(given, np.ndarray):
        given = list(given)
    ids = np.atleast_1d(np.asarray(given))
    if ids.dtype.kind == "b":
        ids = np.flatnonzero(ids)
    if not ids.size:
        return np.zeros(0, dtype=np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise TypeError(f"token_classes: {name}: ids are whole numbers, or one truth value an id of the vocabulary")
    if ids.min() < 0 or ids.max() >= LARGEST:
        raise ValueError(f"token_classes: {name}: ids {ids.min()} to {ids.max()} are not within 0 to {LARGEST - 1}")
    return np.unique(ids.astype(np.int64))
