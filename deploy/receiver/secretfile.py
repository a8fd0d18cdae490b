"""The file that holds the webhook secret: made, and read with the care that it needs."""

from __future__ import annotations

import base64
import os
import secrets
import stat
from pathlib import Path

from trainwarden.webhook import WebhookError, decode_secret


class SecretFileError(ValueError):
    """A secret file that must not be used as it is; the message names the file and says what to do."""


def new_secret() -> str:
    """Return a fresh ``whsec_…`` secret of 32 random bytes (Standard Webhooks wants 24 to 64)."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def write_new_secret(path: Path) -> None:
    """Write a fresh secret to a new file of mode 0600.

    Raises:
        SecretFileError: the file exists; it is never overwritten.
        OSError: it cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SecretFileError(f"{path}: exists already; delete it, or choose another name") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(new_secret() + "\n")


def read_secrets(path: Path) -> list[str]:
    """Return the secrets of a file, one a line; several while keys are rotated.

    Raises:
        SecretFileError: it is missing, empty, readable by others, or a line is no secret.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        says = error.strerror if isinstance(error, OSError) else "not text"
        raise SecretFileError(f"{path}: {says}; make one with `trainwarden receiver new-secret {path}`") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretFileError(f"{path}: other users can read it; chmod 600 it")
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        secret = line.strip()
        if not secret or secret.startswith("#"):
            continue
        try:
            decode_secret(secret)
        except WebhookError as error:
            raise SecretFileError(f"{path}:{number}: {error}") from None
        found.append(secret)
    if not found:
        raise SecretFileError(f"{path}: holds no secret; make one with `trainwarden receiver new-secret`")
    return found
