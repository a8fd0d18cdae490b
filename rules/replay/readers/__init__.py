"""The formats that replay reads, one a file, and the choice between them.

A file's format is the one whose reader is the surest of its first lines and its name.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from trainwarden.rules.replay.rows import Notices, Reader

from . import (
    csv,
    deepspeed,
    huggingface,
    jsonl,
    lightning,
    llmc,
    megatron,
    nanogpt,
    tensorboard,
    text,
    torchtitan,
    wandb,
)

#: Modules of formats by the name that ``--format`` takes.
FORMATS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "csv": csv,
        "jsonl": jsonl,
        "huggingface": huggingface,
        "lightning": lightning,
        "tensorboard": tensorboard,
        "wandb": wandb,
        "megatron": megatron,
        "deepspeed": deepspeed,
        "llmc": llmc,
        "nanogpt": nanogpt,
        "torchtitan": torchtitan,
        "text": text,
    }
)
#: What is looked at of a file to tell its format: programs print much before their first step.
HEAD_BYTES = 1024 * 1024


def recognise(head: bytes, name: str) -> str | None:
    """Return the format of a file that begins with ``head``, or None for what is no log that is known."""
    lines = head.splitlines(keepends=True)
    sure, best = max((module.recognises(lines, name), format) for format, module in FORMATS.items())
    return best if sure > 0 else None


def make_reader(format: str, notices: Notices) -> Reader:
    """Return a reader of the format, at the beginning of a file."""
    made: Reader = FORMATS[format].reader(notices)
    return made


def read_whole(format: str) -> bool:
    """Say whether files of the format are replaced rather than appended to."""
    return bool(getattr(FORMATS[format], "WHOLE", False))


__all__ = ["FORMATS", "HEAD_BYTES", "make_reader", "read_whole", "recognise"]
