"""Makes text of token ids: bytes, a tiktoken encoding, or a tokenizer of ``transformers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .records import DataError

#: Token ids to text. Ids that the tokenizer does not have become U+FFFD.
Decode: TypeAlias = Callable[[Sequence[int]], str]

_UNKNOWN = "\ufffd"


def open_tokenizer(name: str) -> Decode:
    """Return the decoder that is named: ``bytes``, ``tiktoken:NAME``, or a name or path that ``transformers`` loads.

    Raises:
        DataError: there is none of that name, or its library is not installed.
    """
    if name == "bytes":
        return of_bytes
    try:
        if name.startswith("tiktoken:"):
            import tiktoken  # type: ignore[import-not-found,unused-ignore]

            return _of_tiktoken(tiktoken.get_encoding(name.removeprefix("tiktoken:")))
        import transformers

        return _of_transformers(transformers.AutoTokenizer.from_pretrained(name))
    except ImportError as error:
        raise DataError(f"--tokenizer {name}: needs {error.name}, which is not installed here") from None
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"--tokenizer {name}: cannot be loaded: {first or type(error).__name__}") from None


def of_bytes(tokens: Sequence[int]) -> str:
    """Return the text of which each token is a byte. What is no UTF-8 stays as it is, byte by byte (PEP 383)."""
    text: list[str] = []
    run = bytearray()
    for token in (*tokens, None):
        if token is not None and 0 <= token < 256:
            run.append(token)
            continue
        text.append(run.decode("utf-8", "surrogateescape"))
        run.clear()
        if token is not None:
            text.append(_UNKNOWN)
    return "".join(text)


def _of_tiktoken(encoding: Any) -> Decode:
    def decode(tokens: Sequence[int]) -> str:
        known = [token for token in tokens if 0 <= token < encoding.n_vocab]
        try:
            return str(encoding.decode(known)) + _UNKNOWN * (len(tokens) > len(known))
        except KeyError:
            return "".join(_one(encoding, token) for token in tokens)

    return decode


def _one(encoding: Any, token: int) -> str:
    try:
        return bytes(encoding.decode_single_token_bytes(token)).decode("utf-8", "replace")
    except (KeyError, OverflowError):
        return _UNKNOWN


def _of_transformers(tokenizer: Any) -> Decode:
    size = len(tokenizer)

    def decode(tokens: Sequence[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token in (*tokens, -1):
            if 0 <= token < size:
                run.append(token)
                continue
            if run:
                parts.append(str(tokenizer.decode(run)))
            run = []
            parts.append(_UNKNOWN)
        return "".join(parts[:-1])

    return decode
