"""Target files: which exporters there are, from folders that hold Prometheus file_sd lists.

An exporter writes ``RUN/targets/rank-R.json`` once its port is bound and removes it when it ends cleanly.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainwarden.rules.config import SourceConfig, check_address

_LARGEST_FILE = 1024 * 1024


class Target(msgspec.Struct, frozen=True):
    """One exporter: ``host:port``, where its token lies, whether its run may be acted upon.

    ``run_folder`` is the run's own folder where the target file lay in one.
    """

    address: str
    token_file: Path | None = None
    act: bool = True
    run_folder: Path | None = None


class _Group(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str] = {}


def find_targets(sources: list[SourceConfig], base: Path) -> tuple[list[Target], list[str]]:
    """Return the targets that the configuration names now, and one sentence for each file that cannot be used.

    The first mention of an address wins.
    """
    found: dict[str, Target] = {}
    problems: list[str] = []
    for source in sources:
        token = None if source.token_file is None else base / Path(source.token_file).expanduser()
        for address in source.targets:
            found.setdefault(address, Target(address, token, source.act))
        if source.folder is None:
            continue
        for file in _files(base / Path(source.folder).expanduser()):
            run_folder = file.parent.parent
            try:
                addresses = _read(file)
            except (OSError, ValueError) as error:
                problems.append(f"{file}: {error}")
                continue
            for address in addresses:
                found.setdefault(address, Target(address, token or run_folder / "token", source.act, run_folder))
    return list(found.values()), problems


def find_run_folders(sources: list[SourceConfig], base: Path) -> dict[Path, Path]:
    """Return the folders of all runs in the folders that the configuration names, each with where its token lies.

    A run whose target files are gone, because it ended, still has its folder.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        if source.folder is None:
            continue
        pattern = base / Path(source.folder).expanduser()
        if pattern.suffix == ".json":  # the files themselves are named
            pattern = pattern.parent
        anchor = Path(pattern.anchor)
        token = None if source.token_file is None else base / Path(source.token_file).expanduser()
        for path in sorted(anchor.glob(str(pattern.relative_to(anchor)))):
            if path.is_dir():
                found.setdefault(path.parent, token or path.parent / "token")
    return found


def _files(pattern: Path) -> list[Path]:
    files: list[Path] = []
    anchor = Path(pattern.anchor)
    for path in sorted(anchor.glob(str(pattern.relative_to(anchor)))):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [file for file in files if not file.name.startswith(".")]


def _read(file: Path) -> list[str]:
    with file.open("rb") as opened:
        data = opened.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ValueError(f"has more than {_LARGEST_FILE} bytes")
    try:
        groups = msgspec.json.decode(data, type=list[_Group])
    except msgspec.DecodeError as error:
        raise ValueError(f"is no Prometheus file_sd list: {error}") from None
    addresses = [address for group in groups for address in group.targets]
    for address in addresses:
        check_address(address)
    return addresses
