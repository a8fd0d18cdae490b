"""A replay's result at a terminal: the verdict first, then what a person would act on, then the rest in few lines.

Every text is printed as it is, without markup, and without the control characters that a hostile name could hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import words
from .scale import whole

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: At most so many notices and noted steps are listed; JSON and pages hold all.
MOST_NOTICES = 6
MOST_NOTED = 12
_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "blue"}


def plain(text: object) -> str:
    """Return a text in which what cannot be printed, escape sequences among it, is replaced."""
    return "".join(character if character.isprintable() else "\ufffd" for character in str(text))


def to_text(reports: list[dict[str, Any]], console: Console) -> None:
    """Print the reports of a replay. Several runs begin with a table of all, the gravest first; those with a finding follow."""
    if len(reports) > 1:
        reports = sorted(reports, key=lambda one: tuple(-number for number in words.counts(one).values()))
        _overview(reports, console)
        reports = [one for one in reports if _tells(one)]
    for place, one in enumerate(reports):
        if place:
            console.print()
        _run(one, console)


def _tells(one: dict[str, Any]) -> bool:
    """Say whether a run has more to be told than its line in the table."""
    found = words.counts(one)
    return bool(found["critical"] or found["warning"] or (not one.get("incidents") and words.unjudged(one)))


def incident_to_text(row: dict[str, Any], console: Console) -> None:
    """Print one incident with everything that its row holds."""
    _incident(row, console, attempts=True, timeline=True)


def _overview(reports: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in (("run", "left"), ("records", "right"), ("critical", "right"), ("warning", "right")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name in ("info", "notices"):
        table.add_column(name, justify="right")
    for one in reports:
        found = words.counts(one)
        numbers = [_text(str(found[name]) if found[name] else "·", _COLOURS[name]) for name in words.SEVERITIES]
        numbers.append(_text(len(one.get("notices") or []) or "·", "dim"))
        table.add_row(_text(one.get("run")), whole(one.get("records") or 0), *numbers)
    console.print(table)
    console.print()


def _run(one: dict[str, Any], console: Console) -> None:
    steps = ""
    if one.get("records"):
        steps = f", steps {words.step(one.get('first_step'))}–{words.step(one.get('last_step'))}"
        if one.get("stride", 1) != 1:
            steps += f", {whole(one['stride'])} steps a record"
    console.print(_text(one.get("run"), "bold"))
    _say(
        console,
        f"{whole(one.get('records') or 0)} record{'' if one.get('records') == 1 else 's'}{steps}; {words.tally(one)}",
        2,
    )
    _say(console, one.get("source"), 2, "dim")
    found = words.counts(one)
    worst = next((name for name in words.SEVERITIES[:2] if found[name]), None)
    calm = "green" if one.get("incidents") or not words.unjudged(one) else "yellow"
    _say(console, words.verdict_of_run(one), 2, _COLOURS[worst] if worst else calm)
    rows = words.ordered(one.get("incidents") or [])
    attempts = len({row.get("attempt") for row in rows} - {0}) > 0
    for row in rows:
        if row.get("severity") != "info":
            console.print()
            _incident(row, console, attempts=attempts, timeline=row.get("action") in ("rollback", "probe", "stop"))
    _noted(rows, console)
    _notices(one.get("notices") or [], console)


def _incident(row: dict[str, Any], console: Console, *, attempts: bool, timeline: bool) -> None:
    from rich.text import Text

    severity = str(row.get("severity"))
    head = Text("  ")
    head.append(plain(severity), _COLOURS.get(severity, ""))
    head.append(f"  {plain(row.get('verdict'))}", "bold")
    head.append(f"  {plain(row.get('state'))}")
    console.print(head)
    where = words.steps_of(row) + (f", attempt {row.get('attempt')}" if attempts else "")
    _say(console, f"{where}; {row.get('id', '')}", 4, "dim")
    _say(console, row.get("summary") or words.sentence(row), 4)
    _say(console, words.decision(row), 4)
    for rule in row.get("rules") or []:
        says = (rule.get("annotations") or {}).get("summary")
        if says:
            _say(console, f"{rule.get('alert')}: {says}", 6, "dim")
    todo = words.todo(row)
    if todo:
        _say(console, f"→ {todo}", 4, "bold")
    if row.get("cheapest_test"):
        _say(console, f"→ {row['cheapest_test']}", 4)
    for advice in row.get("advice") or []:
        _say(console, f"→ {advice}", 4)
    for item in row.get("evidence") or []:
        _say(console, f"{_at(item)}{item.get('says', '')}", 6, "dim")
    if row.get("alerts"):
        _say(console, f"alerts: {', '.join(map(str, row['alerts']))}", 4, "dim")
    runbooks = [(rule.get("annotations") or {}).get("runbook_url") for rule in row.get("rules") or []]
    if any(runbooks):
        _say(console, f"runbooks: {', '.join(dict.fromkeys(str(one) for one in runbooks if one))}", 4, "dim")
    if isinstance(row.get("plan"), dict):
        _plan(row["plan"], console)
    if timeline:
        for item in row.get("timeline") or []:
            _say(console, f"{_at(item)}{item.get('state')}: {item.get('says', '')}", 6)


def _plan(plan: dict[str, Any], console: Console) -> None:
    target = plan.get("target") if isinstance(plan.get("target"), dict) else {}
    assert isinstance(target, dict)
    goes = f": back to step {words.step(target.get('step'))} ({target.get('path')})" if target else ""
    _say(console, f"plan {plan.get('plan_id', '')}{goes}", 4)
    if plan.get("skip_samples"):
        skipped = ", ".join(f"[{first}, {end})" for first, end in plan["skip_samples"])
        _say(console, f"skip samples {skipped} ({plan.get('skip_mode')})", 6)
    for field, sentence in (plan.get("reasons") or {}).items():
        _say(console, f"{field}: {sentence}", 6, "dim")


def _noted(rows: list[dict[str, Any]], console: Console) -> None:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("severity") == "info":
            kinds.setdefault(str(row.get("verdict")), []).append(row)
    if kinds:
        console.print()
    for verdict, ones in kinds.items():
        _listed(f"info  {verdict} at step", [_began(row, rows) for row in ones], MOST_NOTED, console)
        _reasons(ones, console)


def _began(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    graver = words.graver(row, rows)
    began = f" (the beginning of the {words.title(graver).lower()})" if graver else ""
    return words.step(row.get("onset_step")) + began


def _reasons(rows: list[dict[str, Any]], console: Console) -> None:
    """Print what the first rule of these incidents says, one line a rule: that of its first incident."""
    said: dict[str, tuple[object, object]] = {}
    times: dict[str, int] = {}
    for row in rows:
        for rule in row.get("rules") or []:
            says = (rule.get("annotations") or {}).get("summary")
            if says:
                alert = str(rule.get("alert"))
                said.setdefault(alert, (row.get("onset_step"), says))
                times[alert] = times.get(alert, 0) + 1
                break
    for alert, (at, says) in said.items():
        first = f", first at step {words.step(at)}" if times[alert] > 1 else ""
        _say_in_a_line(console, f"{alert}{first}: {says}", 6, "dim")


def _listed(head: str, items: list[str], most: int, console: Console) -> None:
    more = f" and {len(items) - most} more (--output html shows each)" if len(items) > most else ""
    _say(console, f"{head} {', '.join(items[:most])}{more}", 2, "blue")


def _notices(notices: Iterable[dict[str, Any]], console: Console) -> None:
    listed = list(notices)
    if listed:
        console.print()
    for notice in listed[:MOST_NOTICES]:
        _say(console, f"notice  {_at(notice)}{notice.get('says', '')}", 2, "dim")
    if len(listed) > MOST_NOTICES:
        _say(console, f"notice  and {len(listed) - MOST_NOTICES} more (--output json holds all)", 2, "dim")


def _at(item: dict[str, Any]) -> str:
    return "" if item.get("step") is None else f"step {words.step(item['step'])}: "


def _text(text: object, style: str = "") -> RenderableType:
    from rich.text import Text

    return Text(plain(text), style=style)


def _say_in_a_line(console: Console, text: object, indent: int, style: str = "") -> None:
    """Print a text in one line, cut where a terminal ends; a file holds all of it."""
    from rich.text import Text

    line = Text(" " * indent + plain(text), style=style)
    if not console.soft_wrap:
        line.truncate(console.width, overflow="ellipsis")
    console.print(line, soft_wrap=True)


def _say(console: Console, text: object, indent: int, style: str = "") -> None:
    """Print a text whose further lines, on a narrow terminal, are indented as its first."""
    from rich.padding import Padding

    if console.soft_wrap:
        console.print(" " * indent, _text(text, style), sep="")
    else:
        console.print(Padding.indent(_text(text, style), indent))
