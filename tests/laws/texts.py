"""Laws about files as files: their length, their words, the links that make the package."""

from __future__ import annotations

import re
from pathlib import Path

from tests.source_tree import PACKAGE, ROOMS, project_files

MAX_LINES = 500


def files_are_short(root: Path) -> list[str]:
    """No Python file is longer than 500 lines."""
    wrong = []
    for path in project_files(root):
        lines = path.read_bytes().count(b"\n") if path.suffix == ".py" else 0
        if lines > MAX_LINES:
            name = path.relative_to(root).as_posix()
            wrong.append(
                f"{name}:{MAX_LINES + 1}: {lines} lines, more than {MAX_LINES}: there are two things in it; part them"
            )
    return wrong


# Spelled in pieces, or this file would be the first to break its own law.
_FOREIGN_WORDS = re.compile(
    "|".join(
        (
            r"(?<![\w.~-])/wo" r"rk/",
            r"\.\./sha" r"red\b",
            r"\b[Ss]ub" r"agents?\b",
            r"\b(?:[Dd]evelopers?|[Cc]oding|[Aa]gent)'?s? sess" r"ions?\b",
            r"\b(?:AI|[Cc]oding) age" r"nts?\b",
            r"\b[Ii]ssue #?\d",
            r"\b(?:pypi|npmjs)\.org\b|files\.python" r"hosted\.org|deb\.debian\.org",
            r"\bTO" r"DO\b|\bFIX" r"ME\b",
        )
    )
)
_TEXT = frozenset({".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".cfg", ".service", ".json", ".svg", ""})


def texts_speak_of_the_product(root: Path) -> list[str]:
    """No committed text speaks of how or where the project was made, or says that it is unfinished."""
    wrong = []
    for path in project_files(root):
        if path.suffix not in _TEXT:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            found = _FOREIGN_WORDS.search(line)
            if found:
                name = path.relative_to(root).as_posix()
                wrong.append(
                    f"{name}:{number}: {found.group()!r}: write about the product, for its reader; finish or leave out"
                )
    return wrong


def rooms_are_links(root: Path) -> list[str]:
    """The rooms appear in the import package as committed relative links."""
    wrong = []
    for room, folder in ROOMS.items():
        link = root / PACKAGE / room.removeprefix("trainwarden.")
        want = f"../../{folder}"
        if not link.is_symlink():
            wrong.append(
                f"{link.relative_to(root).as_posix()}:1: is no link: ln -s {want} there, and check core.symlinks"
            )
        elif link.readlink().as_posix() != want:
            wrong.append(f"{link.relative_to(root).as_posix()}:1: points to {link.readlink()}, not to {want}")
    return wrong
