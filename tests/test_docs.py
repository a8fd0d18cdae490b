"""The documentation says what the code says: made parts are fresh, examples are real, links lead somewhere."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
import yaml

from trainwarden import webhook
from trainwarden.record import Event, Header, Step, decode_line, encode_line
from trainwarden.rules.core.delivery import SEVERITIES
from trainwarden.rules.core.facts import CAUSES
from trainwarden.rules.core.gates import GATES
from trainwarden.rules.core.policy import Wanted
from trainwarden.rules.core.rows import row
from trainwarden.rules.core.state import Incident, IncidentState
from trainwarden.rules.lint.lint import lint
from trainwarden.rules.report.words import CLAUSES
from trainwarden.rules.rulefiles import check_packs
from trainwarden.signals import DERIVED, SIGNALS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_made_parts_of_the_pages_are_fresh() -> None:
    ran = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/series.md"])
def test_the_table_of_series_is_complete(page: str) -> None:
    text = (ROOT / page).read_text()
    names = [*(one.series for one in SIGNALS if one.probed), *(one.name for one in DERIVED)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_exporter_has_a_probe_for_what_is_called_probed_and_for_nothing_else() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "exporter").rglob("*.py") if path.name != "series.py")
    named = {signal.name for signal in SIGNALS if f'"{signal.name}"' in sources}
    assert named == {signal.name for signal in SIGNALS if signal.probed}


def test_the_examples_of_records_are_records() -> None:
    lines = [decode_line(example.strip()) for example in fenced("docs/records.md", "json")]
    assert [type(line) for line in lines] == [Header, Step, Event]
    step = lines[1]
    assert isinstance(step, Step)
    assert not set(step.signals) - {signal.name for signal in SIGNALS}
    for line, example in zip(lines, fenced("docs/records.md", "json"), strict=True):
        assert decode_line(encode_line(line)) == decode_line(example.strip())


def test_the_example_of_a_webhook_is_accepted() -> None:
    (body,) = fenced("docs/webhook.md", "json")
    assert webhook.decode_envelope(body.encode()).action == "rollback"
    (vector,) = fenced("docs/webhook.md", "")
    of = dict(line.split(maxsplit=1) for line in vector.splitlines())
    at = datetime.fromtimestamp(int(of["timestamp"]), UTC)
    assert webhook.sign(of["secret"], of["id"], at, of["body"].encode())["webhook-signature"] == of["signature"]


def rule_files() -> dict[str, str]:
    """Return each whole rule file that a page shows, by page and number."""
    return {
        f"{page.name}:{number}": text
        for page in PAGES
        for number, text in enumerate(fenced(page.relative_to(ROOT).as_posix(), "yaml"), 1)
        if re.match(r"(?:signals:.*\n)?groups:", text)
    }


@pytest.mark.parametrize("name", rule_files())
def test_a_rule_file_in_a_page_can_be_used_as_it_stands(name: str) -> None:
    text = rule_files()[name]
    check_packs([(text, name)])
    assert [str(one) for one in lint([(text, name)]) if one.severity == "warning"] == []


def test_what_tests_of_rules_cannot_show_has_an_example() -> None:
    shown = "\n".join(text for name, text in rule_files().items() if name.startswith("language.md"))
    functions = ("parent", "at_resume", "since_resume", "departure", "resumed", "idle", "budget", "repeats", "period")
    assert [name for name in functions if f"{name}(" not in shown] == []
    assert "through_planned_changes" in shown


def test_the_examples_of_the_language_fire_in_a_replay_as_their_page_says(tmp_path: Path) -> None:
    rules, planned, table = (tmp_path / name for name in ("my-rules.yml", "changes.yml", "runs.csv"))
    groups = [text.removeprefix("groups:\n") for name, text in rule_files().items() if name.startswith("language.md")]
    rules.write_text("groups:\n" + "".join(text for text in groups if not text.startswith("signals:")))
    (change,) = (text for text in fenced("docs/language.md", "yaml") if text.startswith("planned_changes:"))
    planned.write_text(change)
    chance, time, lines = random.Random(1), 1.7e9, ["step,time,loss,grad_norm,loss_scale"]
    for step in (*range(1, 1001), *range(901, 1201)):
        again = len(lines) > 1000
        time += 7200 if step == 300 else 1  # a hang
        loss = (9 if 350 < step < 400 else 3) + chance.gauss(0, 0.02)
        norm, scale = chance.gauss(4 if again else 1, 0.05), 16 if again else 65536
        lines.append(f"{step},{time:.0f},{loss:.4f},{norm:.4f},{scale}")
    table.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "trainwarden.rules.cli", "replay", str(table), "--output", "json"]
    ran = subprocess.run(
        [*command, "--rules", str(rules), "--planned", str(planned)], capture_output=True, text=True, check=True
    )
    (report,) = json.loads(ran.stdout)
    fired = {name for one in report["incidents"] for name in one["alerts"]}
    assert {"GradNormUnlikeParent", "LossScaleNotRestored", "NothingForTwiceTheBudget", "LossAboveCeiling"} <= fired


def test_every_type_of_request_is_in_its_page() -> None:
    text = (ROOT / "docs/webhook.md").read_text()
    assert [name for name in webhook.ACTION_OF if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for found in LINK.finditer(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        target = (found[1] or found[2]).partition("#")
        if target[0].startswith(("http://", "https://", "mailto:")):
            continue
        path = (page.parent / target[0]).resolve() if target[0] else page
        if not path.exists():
            broken.append(target[0])
        elif target[2] and path.suffix == ".md" and target[2] not in anchors(path):
            broken.append("#".join(target[::2]))
    assert broken == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_named_are_there(page: str) -> None:
    named = re.findall(r"`((?:\.ci|[a-z]+)/[\w./-]+\.\w+)`", (ROOT / page).read_text())
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_alert_of_the_shipped_packs_has_its_page() -> None:
    for pack in sorted(set((ROOT / "rules/packs").glob("*.yml")) - set((ROOT / "rules/packs").glob("*.test.yml"))):
        alerts = re.findall(r"^\s*- alert: (\w+)", pack.read_text(), re.MULTILINE)
        assert alerts
        assert [name for name in alerts if not (ROOT / f"docs/rules/{name}.md").is_file()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/rules").glob("*.md")), ids=lambda page: page.stem)
def test_the_page_of_a_rule_shows_it_as_it_is_and_says_what_to_look_at_first(page: Path) -> None:
    heads = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    assert heads == ["Why", "When it is wrong", "What to look at first", "What to do"]
    pack = yaml.safe_load((ROOT / "rules/packs/default.yml").read_text())
    rules = {rule.get("alert") or rule["record"]: rule for group in pack["groups"] for rule in group["rules"]}
    shown = yaml.safe_load(fenced(page.relative_to(ROOT).as_posix(), "yaml")[0])
    assert page.stem in {rule.get("alert") for rule in shown}
    for rule in shown:
        known = {
            key: value for key, value in rules[rule.get("alert") or rule["record"]].items() if key != "annotations"
        }
        for one in (rule, known):
            one["expr"] = " ".join(one["expr"].split())
        assert rule == known


def test_every_case_that_anything_refers_to_is_in_the_page_of_cases() -> None:
    rows = re.findall(r"^\| ([A-F]\d\d) ", (ROOT / "docs/cases.md").read_text(), re.MULTILINE)
    known = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    named = {found.upper() for text in known.values() for found in re.findall(r"\bdef test_([a-f]\d\d)_", text)}
    for room in ("docs", "rules", "exporter", "src", "deploy", "examples", "bench", "tests"):
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".md", ".yml", ".json") and path.name != "cases.md":
                for found in re.findall(r"\bcases? ([A-F]\d\d(?:(?:,| and|, and)\s+[A-F]\d\d)*)", path.read_text()):
                    named.update(re.findall(r"[A-F]\d\d", found))
    assert sorted(named - set(rows)) == []


def test_the_page_of_incidents_names_every_word_that_an_incident_can_hold() -> None:
    page = (ROOT / "docs/incidents.md").read_text()
    incident = Incident("i", "u", "r", 0, "s", onset=1, opened_step=1, opened_time=0.0)
    words = [*row(incident), *get_args(IncidentState), *CLAUSES, *CAUSES, *get_args(Wanted), *SEVERITIES]
    words += [gate.name for gate in GATES]
    assert [word for word in words if f"`{word}`" not in page] == []
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page.partition("## Fields")[2], re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(table))) == sorted(row(incident))


def test_every_page_is_reached_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "docs/index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        waiting.extend(
            (page.parent / found[1].partition("#")[0]).resolve()
            for found in LINK.finditer(page.read_text())
            if found[1]
        )
    assert sorted(set((ROOT / "docs").rglob("*.md")) - seen) == []


def test_every_make_target_that_the_pages_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(
            re.findall(r"\bmake ([a-z]+)\b", " ".join(re.findall(r"`[^`]*`|^make .*$", page.read_text(), re.MULTILINE)))
        )
        assert named <= targets, page.name


def test_every_example_that_a_page_runs_is_there_and_run_by_a_test() -> None:
    tests = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__))
    for page in PAGES:
        for found in re.findall(r"\b(?:python|torchrun)\b[^\n`]* (examples/[\w/]+\.py)", page.read_text()):
            assert (ROOT / found).is_file(), f"{page.name}: {found}"
            assert Path(found).stem in tests, f"{page.name}: {found} is run by no test"
