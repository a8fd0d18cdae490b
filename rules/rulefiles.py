"""Rule packs by name or path: the shipped ones lie in ``rules/packs``, an operator's own anywhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from trainwarden.rules.core.language import Pack, RuleErrors, load_pack, load_packs


class RuleFileError(ValueError):
    """Rules that cannot be used; ``errors`` holds every fault of every file, with file, line and column."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


def shipped() -> list[str]:
    """Return the names of the shipped packs."""
    folder = files("trainwarden.rules") / "packs"
    return sorted(item.name.removesuffix(".yml") for item in folder.iterdir() if item.name.endswith(".yml"))


def read_packs(names: list[str], base: Path = Path()) -> Pack:
    """Read packs as one: shipped ones by name, files by path relative to ``base``. Names differ over all of them.

    Raises:
        RuleFileError: there is no such pack, or one has errors; with all errors of all of them.
    """
    errors: list[str] = [] if names else ["rules: name at least one pack or file"]
    texts = []
    for name in names:
        try:
            texts.append(_text_of(name, base))
        except RuleFileError as error:
            errors += error.errors
    try:
        pack = load_packs(texts)
    except RuleErrors as error:
        errors.append(str(error))
    if errors:
        raise RuleFileError(errors)
    return pack


def _text_of(name: str, base: Path) -> tuple[str, str]:
    """Return a pack's text and how errors name it."""
    if "/" not in name and "." not in name:
        names = shipped()
        if name not in names:
            raise RuleFileError([f"{name}: no such pack; shipped are {', '.join(names)}; for a file give its path"])
        return (files("trainwarden.rules") / "packs" / f"{name}.yml").read_text("utf-8"), f"{name}.yml"
    path = base / Path(name).expanduser()
    try:
        return path.read_text("utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RuleFileError([f"{path}: cannot be read: {error}"]) from None


def check_pack(text: str, source: str) -> Pack:
    """Read a pack from its text.

    Raises:
        RuleFileError: it has errors.
    """
    try:
        return load_pack(text, source)
    except RuleErrors as error:
        raise RuleFileError([str(error)]) from None
