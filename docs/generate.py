"""Write the parts of the documentation that are said elsewhere already: the tables of series, the rules of the pack.

``python docs/generate.py`` rewrites what stands between ``<!-- made: NAME -->`` and ``<!-- end -->`` in README.md and docs/;
``--check`` changes nothing, names the stale files and exits 1. A test runs the check.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainwarden.rules.core.gates import GATES
from trainwarden.rules.core.policy import ACTIONS, OTHERWISE, POLICY
from trainwarden.rules.core.settings import Settings
from trainwarden.signals import DERIVED, LABEL_VALUES, SIGNALS, Series, Signal

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/series.md", "docs/index.md", "docs/decisions.md")
#: The rules that README shows.
NAMED_RULES = ("TrainingLossSpike", "TrainingGradCollapse", "TrainingPeriodicSpikes")
#: The info metric is made by the exporter's page and holds no number.
RUN_INFO = Series("train_run_info", "Identity of the run: run_uid, attempt, model, world size, commit, precision.")

_MARKED = re.compile(r"(<!-- made: (\w+) -->\n)(?:(?!<!-- end -->).)*(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def series() -> str:
    """Return one row a series of the exporter's page, as Prometheus sees it."""
    rows = [_series_row(one.series, one.type, one.labels, one.help) for one in SIGNALS if one.probed]
    rows += [_series_row(one.name, one.type, one.labels, one.help) for one in (*DERIVED, RUN_INFO)]
    return table(("series", "type", "labels", "meaning"), rows)


def _series_row(name: str, kind: str, labels: tuple[str, ...], help_: str) -> tuple[str, ...]:
    return (f"`{name}`", "info" if name.endswith("_info") else kind, ", ".join(f"`{label}`" for label in labels), help_)


def signals() -> str:
    """Return one row a signal, as a record holds it and a rule names it."""
    return table(("signal", "unit", "by", "seen", "ranks", "series"), [_signal_row(one) for one in SIGNALS])


def _signal_row(signal: Signal) -> tuple[str, ...]:
    seen = {"step": "every step", "cadence": "at its cadence", "clock": "every few seconds"}[signal.per]
    if not signal.probed:
        seen = "in logs"
    value = " (running total)" if signal.cumulative else ""
    by = ", ".join(f"`{label}`" for label in signal.labels)
    return (f"`{signal.name}`", signal.unit + value, by, seen, signal.reduce, f"`{signal.series}`")


def labels() -> str:
    """Return the closed set of values of each label."""
    rows = [
        (f"`{name}`", ", ".join(f"`{value}`" for value in values) or "as many as there are, by number or name")
        for name, values in LABEL_VALUES.items()
    ]
    return table(("label", "values"), rows)


def rules() -> str:
    """Return the three named rules letter by letter as they stand in the shipped pack."""
    pack = (ROOT / "rules/packs/default.yml").read_text().splitlines()
    found = [_rule(pack, name) for name in NAMED_RULES]
    return "```yaml\n" + "\n".join(found) + "\n```"


def _rule(pack: list[str], name: str) -> str:
    start = next(number for number, line in enumerate(pack) if re.match(rf"\s*- alert: {name}\b", line))
    indent = len(pack[start]) - len(pack[start].lstrip())
    end = start + 1
    while end < len(pack) and pack[end].strip() and len(pack[end]) - len(pack[end].lstrip()) > indent:
        end += 1
    return textwrap.dedent("\n".join(pack[start:end]))


def alerts() -> str:
    """Return one row an alert of the shipped pack, with its page."""
    groups = yaml.safe_load((ROOT / "rules/packs/default.yml").read_text())["groups"]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = [(f"[{rule['alert']}](rules/{rule['alert']}.md)", *_labels_of(rule)) for rule in found]
    return table(("rule", "severity", "verdict"), rows)


def _labels_of(rule: dict[str, Any]) -> tuple[str, str]:
    return str(rule["labels"].get("severity", "")), str(rule["labels"].get("verdict", ""))


def policy() -> str:
    """Return the policy's table: one row a line, in the order in which they are asked."""
    rows = [
        (f"{place} `{line.name}`", line.when, f"`{line.action}`", line.because)
        for place, line in enumerate((*POLICY, OTHERWISE), 1)
    ]
    return table(("line", "when", "wanted", "because"), rows)


def gates() -> str:
    """Return one row a gate, in the order in which they are asked."""
    actions = [action for action in ACTIONS if action != "none"]
    rows = []
    for place, gate in enumerate(GATES, 1):
        asked = [action for action in actions if action in gate.of]
        of = ", ".join(f"`{action}`" for action in asked)
        rows.append((f"{place} `{gate.name}`", gate.question, of, gate.opens))
    return table(("gate", "asks", "of", "opened by"), rows)


#: The settings that policy and gates go by, in the order of the page.
LIMITS = (
    *("mode", "confidence", "persist_steps", "dirty_steps", "nonfinite_steps", "warmup_steps", "cooldown_steps"),
    *("max_rollbacks", "max_rollbacks_per_day", "max_actions_per_day", "decision_ttl", "max_action_age"),
    *("lower_lr", "soft_steps", "lower_lr_factor", "lower_lr_steps", "lower_lr_return_steps", "max_lower_lr"),
    *("probe", "max_probes"),
)


def limits() -> str:
    """Return one row a setting that policy and gates go by, with its default and its own words."""
    text = Path(str(sys.modules[Settings.__module__].__file__)).read_text()
    rows = []
    for name in LIMITS:
        said = re.search(rf'^    {name}: [^\n]*\n    """(.*?)"""', text, re.MULTILINE | re.DOTALL)
        assert said is not None, name
        default = str(getattr(Settings(), name))
        rows.append((f"`{name}`", {"True": "true", "False": "false"}.get(default, default), " ".join(said[1].split())))
    return table(("setting", "default", "meaning"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "series": series,
    "signals": signals,
    "labels": labels,
    "rules": rules,
    "alerts": alerts,
    "policy": policy,
    "gates": gates,
    "limits": limits,
}


def generated(text: str) -> str:
    """Return a page with its marked parts made anew."""
    return _MARKED.sub(lambda part: part[1] + PARTS[part[2]]() + "\n" + part[3], text)


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or with ``--check`` name those that are stale."""
    stale = []
    for name in PAGES:
        path = ROOT / name
        before = path.read_text()
        after = generated(before)
        if after != before:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(after)
    if "--check" in arguments and stale:
        print(f"stale: {', '.join(stale)}: run `.venv/bin/python docs/generate.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
