"""The schemas for editors are fresh, and agree with the readers on what is right and what is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainwarden.rules.core.language import pack as language
from trainwarden.rules.rulefiles import RuleFileError, check_packs, text_of
from trainwarden.rules.schema import schema_of, to_json
from trainwarden.rules.schema.rulefile import Alert, Group, Record, RuleFile
from trainwarden.rules.yamltext import load

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def wrong(value: Any, schema: Any, whole: dict[str, Any], at: str = "") -> list[str]:
    """Return where a value does not fit a schema, for the keywords that the schemas use."""
    unknown = set(schema) - {"$schema", "$defs", "title", "description", "default", "examples"}
    unknown -= {"$ref", "anyOf", "enum", "type", "pattern", "properties", "required", "additionalProperties", "items"}
    unknown -= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "propertyNames"}
    assert not unknown, unknown
    if "$ref" in schema:
        return wrong(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, at)
    if "anyOf" in schema:
        return [] if any(not wrong(value, one, whole, at) for one in schema["anyOf"]) else [f"{at}: fits none"]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{at}: {value!r} is none of {schema['enum']}"]
    kind = schema.get("type")
    if kind == "null":
        return [] if value is None else [f"{at}: not null"]
    if kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):  # type: ignore[arg-type]
        return [f"{at}: {value!r} is no {kind}"]
    found = []
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{at}: {value!r} does not match")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            found.append(f"{at}: {value} out of limits")
        if value <= schema.get("exclusiveMinimum", value - 1) or value >= schema.get("exclusiveMaximum", value + 1):
            found.append(f"{at}: {value} out of limits")
    if isinstance(value, list):
        for place, item in enumerate(value):
            found += wrong(item, schema.get("items", {}), whole, f"{at}[{place}]")
    if isinstance(value, dict):
        found += [f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            found += wrong(name, schema.get("propertyNames", {}), whole, f"{at}.{name}")
            more = schema.get("additionalProperties", {})
            if name in schema.get("properties", {}):
                found += wrong(item, schema["properties"][name], whole, f"{at}.{name}")
            elif more is False:
                found.append(f"{at}: unknown {name}")
            else:
                found += wrong(item, more, whole, f"{at}.{name}")
    return found


@pytest.mark.parametrize("name", ["rules", "config", "tests"])
def test_the_committed_copy_is_what_is_made_now(name: str) -> None:
    path = ROOT / f"rules/schema/{name}.json"
    assert to_json(schema_of(name)) == path.read_bytes(), f"trainwarden check schema {name} > {path}"


def test_shipped_files_fit_their_schemas() -> None:
    for name, path in (
        ("rules", "rules/packs/default.yml"),
        ("tests", "rules/packs/default.test.yml"),
        ("config", "deploy/compose/trainwarden.yml"),
    ):
        schema = schema_of(name)
        assert wrong(load((ROOT / path).read_text(), path).value, schema, schema) == []


def test_the_models_have_the_keys_that_the_language_reads() -> None:
    pairs = ((RuleFile, language._TOP), (Group, language._GROUP), (Alert, language._ALERT), (Record, language._RECORD))
    for model, keys in pairs:
        assert {field.encode_name for field in msgspec.structs.fields(model)} == set(keys)


GOOD = {"alert": "A", "expr": "loss > 1"}


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (GOOD, True),
        ({"record": "r", "expr": "loss * 1"}, True),
        ({**GOOD, "for": "3 steps", "keep_firing_for": "1h30m"}, True),
        ({**GOOD, "for": "20 records", "labels": {"severity": "info", "team": "x"}}, True),
        ({**GOOD, "for": 3}, False),
        ({**GOOD, "for": "3 stepz"}, False),
        ({**GOOD, "for": ""}, False),
        ({**GOOD, "labels": {"severity": "page"}}, False),
        ({**GOOD, "labels": {"verdict": "spike"}}, False),
        ({**GOOD, "labels": {"team": 3}}, False),
        ({**GOOD, "severity": "info"}, False),
        ({"alert": "A"}, False),
        ({"expr": "loss > 1"}, False),
        ({"alert": "a b", "expr": "loss > 1"}, False),
        ({"record": "r", "expr": "loss * 1", "for": "3 steps"}, False),
    ],
)
def test_schema_and_reader_agree(rule: dict[str, Any], fits: bool) -> None:
    file = {"groups": [{"name": "g", "rules": [rule]}]}
    schema = schema_of("rules")
    assert (not wrong(file, schema, schema)) == fits
    text = msgspec.json.encode(file).decode()
    if fits:
        check_packs([(text, "f")])
    else:
        with pytest.raises(RuleFileError):
            check_packs([(text, "f")])


def test_a_setting_is_described_as_beside_its_field() -> None:
    assert schema_of("config")["$defs"]["Settings"]["properties"]["mode"]["description"].startswith("observe: ")
    assert "base" not in schema_of("config")["$defs"]["Config"]["properties"]


def test_the_shipped_pack_is_read_as_it_was_checked() -> None:
    text, source = text_of("default")
    assert check_packs([(text, source)]).rules
