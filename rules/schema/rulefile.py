"""The shape of a rule file as models. The language reads files by hand, for errors that say more; tests hold both together."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from trainwarden.rules.core.language import SEVERITIES, VERDICTS

_DURATION = r"^\s*(?:\d{1,9}\s*(?:steps?|records?)|(?=\d)(?:\d{1,6}d)?(?:\d{1,6}h)?(?:\d{1,6}m)?(?:\d{1,6}s)?)\s*$"
_LABELS: dict[str, Any] = {
    "properties": {
        "severity": {"enum": list(SEVERITIES), "description": "info is recorded, warning notified, critical paged."},
        "verdict": {"enum": list(VERDICTS), "description": "The shape that the rule offers for the incident."},
    }
}
_TEXTS: dict[str, Any] = {
    "properties": {
        "summary": {"type": "string", "description": "One sentence for people."},
        "runbook_url": {"type": "string", "description": "Where the rule is explained."},
    }
}
_EITHER: dict[str, Any] = {"items": {"anyOf": [{"$ref": "#/$defs/Alert"}, {"$ref": "#/$defs/Record"}]}}

Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_:]*$")]
Duration = Annotated[str, Meta(pattern=_DURATION, examples=["3 steps", "20 records", "5m"])]


class Alert(Struct, kw_only=True):
    """An alert: it is on while its expression holds."""

    alert: Name
    """Name of the alert; names differ over all files that are used together."""
    expr: str
    """A boolean expression over signals in the step domain."""
    for_: Duration = field(name="for", default="0 steps")
    keep_firing_for: Duration = "0 steps"
    """How long a firing alert goes on behind the last step at which its expression held."""
    labels: Annotated[dict[str, str], Meta(extra_json_schema=_LABELS)] = {}
    annotations: Annotated[dict[str, str], Meta(extra_json_schema=_TEXTS)] = {}
    """Texts for people, Jinja2 templates with value, since, step and labels."""


class Record(Struct, kw_only=True):
    """A recorded expression: a name for it, to be used further down in the same file."""

    record: Name
    """The name, used like a signal."""
    expr: str
    """A number or a boolean."""


class Group(Struct, kw_only=True):
    """Rules that belong together."""

    name: str
    """Name of the group, once in a file."""
    rules: Annotated[list[Any], Meta(extra_json_schema=_EITHER)]


class RuleFile(Struct, kw_only=True):
    """A file of rules."""

    groups: list[Group]
    signals: list[Name] | dict[Name, list[str]] = []
    """Signals of your own: names, or name: [labels]."""


#: The file itself first.
MODELS: tuple[type[Struct], ...] = (RuleFile, Group, Alert, Record)
