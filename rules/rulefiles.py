"""Rule packs by name or path: the shipped ones lie in ``rules/packs``, an operator's own anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainwarden.rules.annotations import check as check_template
from trainwarden.rules.core.language import Pack, RuleErrors, load_packs
from trainwarden.rules.yamltext import Document, Problem, YamlError, load
from trainwarden.rules.yamltext import Path as Place


class RuleFileError(ValueError):
    """Rules that cannot be used; ``errors`` holds every fault of every file, with file, line and column.

    ``problems`` holds those that have a place in a file.
    """

    def __init__(self, errors: list[str], problems: Iterable[Problem] = ()) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors
        self.problems = tuple(problems)


def shipped() -> list[str]:
    """Return the names of the shipped packs."""
    folder = files("trainwarden.rules") / "packs"
    names = [item.name for item in folder.iterdir() if item.name.endswith(".yml")]
    return sorted(name.removesuffix(".yml") for name in names if not name.endswith(".test.yml"))


def read_packs(names: list[str], base: Path = Path()) -> Pack:
    """Read packs as one: shipped ones by name, files by path relative to ``base``. Names differ over all of them.

    Raises:
        RuleFileError: there is no such pack, or one has errors; with all errors of all of them.
    """
    errors: list[str] = [] if names else ["rules: name at least one pack or file"]
    texts = []
    for name in names:
        try:
            texts.append(text_of(name, base))
        except RuleFileError as error:
            errors += error.errors
    try:
        pack = check_packs(texts)
    except RuleFileError as error:
        errors += error.errors
    if errors:
        raise RuleFileError(errors)
    return pack


def text_of(name: str, base: Path = Path()) -> tuple[str, str]:
    """Return a pack's text and how errors name it.

    Raises:
        RuleFileError: there is no such pack or file, or it cannot be read.
    """
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


def check_packs(texts: list[tuple[str, str]]) -> Pack:
    """Read packs from their texts, each ``(text, source)``, with the annotations' templates.

    Raises:
        RuleFileError: they have errors; ``errors`` holds all of them as one text.
    """
    problems = [problem for text, source in texts for problem in _templates(text, source)]
    try:
        pack = load_packs(texts)
    except RuleErrors as error:
        problems += error.problems
    if problems:
        found = RuleErrors(problems)
        raise RuleFileError([str(found)], found.problems)
    return pack


def rules_in(document: Document) -> Iterator[tuple[Place, dict[Any, Any]]]:
    """Yield each rule of a file with its place in it, as far as the file has the shape of one."""
    top = document.value
    groups = top.get("groups") if isinstance(top, dict) else None
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        rules = group.get("rules") if isinstance(group, dict) else None
        for place, rule in enumerate(rules if isinstance(rules, list) else []):
            if isinstance(rule, dict):
                yield ("groups", index, "rules", place), rule


def _templates(text: str, source: str) -> Iterator[Problem]:
    """Yield what is wrong with the templates of a file."""
    try:
        document = load(text, source, [])
    except YamlError:
        return  # said, as a doubled key is, by whoever reads the rules
    for path, rule in rules_in(document):
        given, labels = rule.get("annotations"), rule.get("labels")
        known = {str(key): str(value) for key, value in labels.items()} if isinstance(labels, dict) else {}
        for name, template in given.items() if isinstance(given, dict) else ():
            fault = check_template(template, known) if isinstance(template, str) else None
            if fault is not None:
                offset = max(0, template.find(fault.word))
                place = document.locate((*path, "annotations", name), offset)
                yield document.problem(place, f"annotation {name}: {fault.says}")
