"""What an operator sets for the receiver, from flags or from ``receiver.yml``. Reading the YAML is the command line's part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class SettingsError(ValueError):
    """A setting that is wrong. ``path`` names it (keys and indices); the message says what to do."""

    def __init__(self, path: tuple[str | int, ...], says: str) -> None:
        super().__init__(f"{'.'.join(map(str, path))}: {says}" if path else says)
        self.path = path


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one receiver.

    ``listen``: address and port; port 0 takes a free one and says which. ``secret_file``: one ``whsec_…`` a line.
    ``roots``: folders of runs. ``checkpoints``: folders that targets may lie in, besides the roots. ``db``: the
    ledger, on a local disk. ``tls_certificate`` and ``tls_key``: PEM files, both or neither.
    """

    secret_file: str
    roots: list[str]
    listen: str = "127.0.0.1:17090"
    checkpoints: list[str] = msgspec.field(default_factory=list)
    db: str = "trainwarden-receiver.db"
    tls_certificate: str | None = None
    tls_key: str | None = None

    def address(self) -> tuple[str, int]:
        """Return host and port of ``listen``.

        Raises:
            SettingsError: it is not ``HOST:PORT``.
        """
        host, colon, port = self.listen.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise SettingsError(("listen",), f"{self.listen!r} is not HOST:PORT, such as 127.0.0.1:17090")
        return host.strip("[]"), int(port)

    def root_folders(self) -> list[Path]:
        """Return ``roots`` as absolute paths.

        Raises:
            SettingsError: there is none, or one is no folder.
        """
        if not self.roots:
            raise SettingsError(("roots",), "name at least one folder of runs, such as ./.trainwarden")
        return [self._folder("roots", index, name) for index, name in enumerate(self.roots)]

    def checkpoint_folders(self) -> list[Path]:
        """Return the roots and ``checkpoints`` as absolute paths.

        Raises:
            SettingsError: as :meth:`root_folders`.
        """
        return self.root_folders() + [self._folder("checkpoints", i, name) for i, name in enumerate(self.checkpoints)]

    @staticmethod
    def _folder(field: str, index: int, name: str) -> Path:
        path = Path(name).absolute()
        if not path.is_dir():
            raise SettingsError((field, index), f"{path} is no folder; make it, or correct the name")
        return path


def settings_from(mapping: Any) -> Settings:
    """Return settings from a plain mapping, as a YAML file or flags give it.

    Raises:
        SettingsError: a field is unknown, missing or of the wrong type; ``path`` says which.
    """
    try:
        settings = msgspec.convert(mapping, Settings)
    except msgspec.ValidationError as error:
        says, _, where = str(error).partition(" - at `$")
        path = tuple(
            int(part) if part.isdigit() else part
            for part in where.rstrip("`").replace("[", ".").replace("]", "").split(".")
            if part
        )
        raise SettingsError(path, says) from None
    settings.address()
    if (settings.tls_certificate is None) != (settings.tls_key is None):
        raise SettingsError(("tls_certificate",), "tls_certificate and tls_key go together")
    return settings
