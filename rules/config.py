"""The daemon's configuration: ``trainwarden.yml``, its defaults, what is checked and where secrets come from.

Precedence is flags, then environment (both handed in by the command line as ``overrides``), then the file, then the
defaults. Relative paths are relative to the file. Every error names file, line, column and field, all of a file's
errors at once. A secret never stands in the file: it lies in a file of its own that nobody else can read.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from trainwarden.rules.core.language.errors import did_you_mean
from trainwarden.rules.core.planned import KINDS
from trainwarden.rules.core.settings import PlannedChange, Settings
from trainwarden.rules.fields import Model, Seconds, convert, where
from trainwarden.rules.fields import Path as FieldPath
from trainwarden.rules.windows import Maintenance
from trainwarden.rules.yamltext import Document, Problem, YamlError, load
from trainwarden.webhook import WebhookError, decode_secret

#: A name, an IPv4 address, or an IPv6 address with or without its brackets.
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[0-9A-Fa-f:.]+")


class ConfigError(ValueError):
    """A configuration that cannot be used. ``errors`` holds one line per fault: ``file:line:col: field: what``."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where exporters are: a static list ``targets`` of host:port, or a ``folder`` (glob) of file_sd target files.

    ``token_file`` holds the bearer token of the exporters' API; with ``folder`` it defaults to ``../token`` beside the
    folder, where a run keeps it. ``act: false`` makes the source observe-only, whatever the policy says.
    """

    targets: list[str] = []
    folder: str | None = None
    token_file: str | None = None
    act: bool = True

    def __post_init__(self) -> None:
        if bool(self.targets) == (self.folder is not None):
            raise ValueError("give either targets or folder")
        for target in self.targets:
            check_address(target)


class ReceiverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver that carries actions out. ``status_url`` defaults to ``/api/v1/requests`` on the same host.

    ``timeout`` bounds one delivery as a whole. ``ca_file`` holds the certificates to trust over https in place of the
    public ones.
    """

    url: str
    secret_file: str
    status_url: str | None = None
    ca_file: str | None = None
    timeout: Seconds = Seconds(15.0)

    def __post_init__(self) -> None:
        for name, url in (("url", self.url), ("status_url", self.status_url)):
            if url is not None and not _is_web_address(url):
                raise ValueError(f"{name}: {url!r} is not an http:// or https:// address")


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is none
        return False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one poll may cost, so that a broken or lying peer costs no more than its turn."""

    connect_timeout: Seconds = Seconds(3.0)
    response_timeout: Seconds = Seconds(10.0)
    response_bytes: int = 32 * 1024 * 1024
    page_lines: int = 2000
    pages_per_poll: int = 5

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("response_bytes", self.response_bytes, 4096, 1 << 30),
            ("page_lines", self.page_lines, 1, 100_000),
            ("pages_per_poll", self.pages_per_poll, 1, 10_000),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}: {value} is not between {least} and {most}")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon writes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["logfmt", "json"] = "logfmt"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Observe-only by default: acting is ``policy: {mode: act}``.

    ``snapshot_interval`` is the longest time between two transactions; an effect never waits for it. Finished outbox
    rows and closed journal rows are kept for ``retention``. ``act_token_file`` holds the bearer token that commands to the
    API (approve, acknowledge, dismiss) must carry; without it the API only reads. ``planned_changes`` says at which steps of
    which runs something is known to change, ``maintenance`` when nothing is done to them.
    """

    sources: list[SourceConfig]
    listen: str = "127.0.0.1:17080"
    state: str = "trainwarden.db"
    poll_interval: Seconds = Seconds(2.0)
    poll_threads: int = 8
    tick_interval: Seconds = Seconds(1.0)
    snapshot_interval: Seconds = Seconds(3.0)
    queue_size: int = 1000
    retention: Seconds = Seconds(30 * 86400.0)
    rules: list[str] = msgspec.field(default_factory=lambda: ["default"])
    policy: Settings = Settings()
    planned_changes: list[PlannedChange] = []
    maintenance: list[Maintenance] = []
    receiver: ReceiverConfig | None = None
    act_token_file: str | None = None
    limits: Limits = Limits()
    log: LogConfig = LogConfig()
    #: Folder that relative paths are relative to; not a field of the file.
    base: str = "."

    def __post_init__(self) -> None:
        check_address(self.listen)
        if not self.sources:
            raise ValueError("sources: give at least one, or the daemon has nothing to watch")
        for name, value in (("poll_threads", self.poll_threads), ("queue_size", self.queue_size)):
            if not 1 <= value <= 100_000:
                raise ValueError(f"{name}: {value} is not between 1 and 100000")

    @property
    def settings(self) -> Settings:
        """The numbers of the judgement, with what is planned for the runs."""
        return msgspec.structs.replace(self.policy, planned_changes=tuple(self.planned_changes))

    def warnings(self) -> list[str]:
        """Return what can be used but will hardly do what was meant, a sentence each."""
        found = []
        if self.policy.mode != "observe" and self.receiver is None:
            found.append(
                f"policy.mode: {self.policy.mode} without a receiver: nothing can be acted upon; configure receiver"
            )
        if self.policy.quarantine and self.receiver is None:
            found.append(
                "policy.quarantine: true without a receiver: no trainer can be asked for its state; configure receiver"
            )
        if self.policy.mode == "approve" and self.act_token_file is None:
            found.append("policy.mode: approve without act_token_file: nobody can approve; configure act_token_file")
        return found

    def path(self, text: str) -> Path:
        """Return a path of the file as it lies on disk."""
        return Path(self.base) / Path(text).expanduser()


def check_address(text: str) -> tuple[str, int]:
    """Split ``host:port``.

    Raises:
        ValueError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not digits or int(port) > 65535 or not _HOST.fullmatch(host):
        raise ValueError(f"{text!r} is not host:port")
    return host.strip("[]"), int(port)


def read_config(text: str, source: str, base: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a configuration from ``text``; ``source`` names it in errors, ``overrides`` replace top-level fields.

    ``overrides`` may hold ``mode`` (of the policy), ``log_level`` and ``log_format`` besides the file's own fields.

    Raises:
        ConfigError: with all of its errors.
    """
    problems: list[Problem] = []
    try:
        document = load(text, source, problems)
    except YamlError as error:
        raise ConfigError([str(problem) for problem in error.problems]) from None
    value = document.value
    raw: Any = {} if value is None else dict(value) if isinstance(value, dict) else value
    if isinstance(raw, dict):
        if "base" in raw:
            problems.append(document.problem(document.key_position(("base",)), "base: unknown field"))
        if "policy" in raw:
            raw["policy"] = _without_inner(document, raw["policy"], ("policy",), problems)
        raw = _override(raw, overrides or {})
        raw["base"] = str(base)
    return _convert(document, raw, Config, problems)


def _without_inner(document: Document, policy: Any, path: FieldPath, problems: list[Problem]) -> Any:
    """Refuse what the core's settings hold beside the policy: it has its place at the top of the configuration."""
    if not isinstance(policy, dict) or "planned_changes" not in policy:
        return policy
    at = (*path, "planned_changes")
    says = f"{where(at)}: unknown field; planned_changes stands at the top of the configuration"
    problems.append(document.problem(document.key_position(at), says))
    return {name: value for name, value in policy.items() if name != "planned_changes"}


def _convert(document: Document, value: Any, model: type[Model], problems: list[Problem]) -> Model:
    """Convert a file's value; ``problems`` are those that were found before."""

    def complain(path: FieldPath, says: str) -> None:
        place = document.key_position(path) if says.startswith("unknown field") else document.position(path)
        problems.append(document.problem(place, f"{where(path) or 'file'}: {says}"))

    converted = convert(value, model, complain)
    changes = value.get("planned_changes") if isinstance(value, dict) else None
    for index, change in enumerate(changes if isinstance(changes, list) else []):
        kind = change.get("kind") if isinstance(change, dict) else None
        if isinstance(kind, str) and kind and kind not in KINDS and change.get("planned") is not True:
            hint = did_you_mean(kind, KINDS) or f"; known are {', '.join(KINDS)}."
            says = f"unknown kind {kind!r}{hint} A word of your own needs planned: true beside it"
            complain(("planned_changes", index, "kind"), says)
        elif isinstance(change, dict) and change.get("planned") is False:
            complain(("planned_changes", index, "planned"), "it is true or left out: what stands here is planned")
    if problems or converted is None:
        raise ConfigError([str(problem) for problem in sorted(problems, key=lambda one: (one.line, one.column))])
    return converted


def _override(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    for name, value in overrides.items():
        if value is None:
            continue
        section, field = {
            "mode": ("policy", "mode"),
            "log_level": ("log", "level"),
            "log_format": ("log", "format"),
        }.get(name, ("", name))
        if not section:
            raw[field] = value
        elif isinstance(raw.get(section, {}), dict):
            raw[section] = {**raw.get(section, {}), field: value}
    return raw


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a configuration file.

    Raises:
        ConfigError: it cannot be read or used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file; docs/daemon.md begins with one of three lines"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {_says(error)}"]) from None
    return read_config(text, str(path), path.parent, overrides)


def load_policy(path: Path) -> Settings:
    """Read a file that holds the policy's settings alone.

    Raises:
        ConfigError: it cannot be read or used.
    """
    document, problems = _document(path)
    return _convert(document, _without_inner(document, document.value, (), problems) or {}, Settings, problems)


def _document(path: Path) -> tuple[Document, list[Problem]]:
    """Read a file, with the keys that it gives twice."""
    problems: list[Problem] = []
    try:
        return load(path.read_text(encoding="utf-8"), str(path), problems), problems
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {_says(error)}"]) from None
    except YamlError as error:
        raise ConfigError([str(problem) for problem in error.problems]) from None


class _Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A file of planned changes alone."""

    planned_changes: list[PlannedChange]


def load_planned(path: Path) -> tuple[PlannedChange, ...]:
    """Read a file that holds ``planned_changes`` alone, in the form that the configuration has.

    Raises:
        ConfigError: it cannot be read or used.
    """
    document, problems = _document(path)
    return tuple(_convert(document, document.value or {}, _Planned, problems).planned_changes)


def read_secret(path: Path) -> str:
    """Return the contents of a secret's file.

    Raises:
        ConfigError: it is missing, empty, not a plain file, or others can read it.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError([f"{path}: is not a plain file"])
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                [f"{path}: other users can read it (mode {stat.S_IMODE(status.st_mode):o}); chmod 600 it"]
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError([f"{path}: belongs to another user (uid {status.st_uid})"])
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {_says(error)}"]) from None
    if not text:
        raise ConfigError([f"{path}: is empty"])
    return text


def read_webhook_secret(path: Path) -> str:
    """Return the ``whsec_…`` secret in a file: the first line that is no comment.

    The receiver takes several lines while keys are rotated; the daemon signs with the first.

    Raises:
        ConfigError: as :func:`read_secret`, or it is no such secret.
    """
    lines = (line.strip() for line in read_secret(path).splitlines())
    text = next((line for line in lines if line and not line.startswith("#")), "")
    try:
        decode_secret(text)
    except WebhookError as error:
        raise ConfigError([f"{path}: {error}"]) from None
    return text


def _says(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
