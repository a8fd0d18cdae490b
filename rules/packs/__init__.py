"""The packs that are shipped: rule files beside this module, read as data. They are ordinary rule files, to copy and edit."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from trainwarden.rules.core.language import Pack, load_packs


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped packs."""
    found = (Path(item.name) for item in files(__package__).iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".yml"))


def text_of(name: str) -> str:
    """Return the text of a shipped pack.

    Raises:
        FileNotFoundError: there is no such pack.
    """
    if name not in shipped():
        raise FileNotFoundError(f"no shipped pack {name!r}: there are {', '.join(shipped())}")
    return files(__package__).joinpath(f"{name}.yml").read_text(encoding="utf-8")


def load(rules: list[str] | tuple[str, ...] = ("default",), folder: Path = Path()) -> Pack:
    """Read shipped packs by name and rule files by path (relative ones from ``folder``) into one pack.

    Raises:
        FileNotFoundError: an entry is neither a shipped pack nor a file.
        RuleErrors: a file cannot be used; all problems of all files.
    """
    read: list[tuple[str, str]] = []
    for entry in rules:
        if entry in shipped():
            read.append((text_of(entry), f"{entry}.yml"))
            continue
        path = folder / entry
        if not path.is_file():
            raise FileNotFoundError(f"rules: {entry!r} is neither a file nor a shipped pack ({', '.join(shipped())})")
        read.append((path.read_text(encoding="utf-8"), str(path)))
    return load_packs(read)
