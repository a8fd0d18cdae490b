"""What a step ate, at a terminal: a head of three lines, then a sample a line with its text. No control character gets through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwarden.rules.report.scale import whole
from trainwarden.rules.report.terminal import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> str:
    """Return a text in one line, in which every character can be seen: what cannot be printed as its number."""
    return "".join(
        _SIGNS.get(character) or (character if character.isprintable() else _number(character)) for character in text
    )


def _number(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def to_text(told: dict[str, Any], console: Console) -> None:
    """Print what :func:`trainwarden.rules.data.report.assemble` returned."""
    for place, step in enumerate(told["steps"]):
        if place:
            console.print()
        _head(told["run"], step, console)
        table = _table(step)
        if table is not None:
            console.print()
            console.print(table)
        for rank in step["ranks"]:
            of = f"rank {rank['rank']}: " if len(step["ranks"]) > 1 else ""
            if rank["more"]:
                console.print(_styled(f"  {of}and {whole(rank['more'])} more samples (--limit 0 lists all)", "dim"))
            if rank["unknown"]:
                console.print(_styled(f"  {of}rows unknown: {plain(rank['unknown'])}", "yellow"))
    if told["notices"]:
        console.print()
    for notice in told["notices"]:
        console.print(_styled(f"  {plain(notice)}", "yellow"))


def _head(run: str, step: dict[str, Any], console: Console) -> None:
    head = _styled(plain(run), "bold")
    head.append(f" · step {whole(step['step'])} · attempt {step['attempt']}")
    head.append(f" · start {plain(step['start_id'])[:8]}", "dim")
    console.print(head)
    counted = sum(rank["count"] for rank in step["ranks"])
    ranks = "" if len(step["ranks"]) == 1 else f" on {len(step['ranks'])} ranks"
    said = [f"loss {_range([rank.get('loss') for rank in step['ranks']])}"]
    expected = [rank["loss_expected"] for rank in step["ranks"] if "loss_expected" in rank]
    if expected:
        said[0] += f" ({_range(expected)} expected of its sources)"
    if step["epoch"] is not None:
        said.append(f"epoch {step['epoch']}")
    if step["samples"]:
        said.append(f"{whole(counted)} sample{'' if counted == 1 else 's'}{ranks} at position{_spans(step['samples'])}")
    console.print("  " + " · ".join(said))
    whence = [] if step["dataset"] is None else [f"data set {plain(step['dataset'])}"]
    if step["order"] is not None:
        whence.append(plain(f"order {step['order']}, seed {step['seed']}"))
    shares = _sources(step["ranks"])
    if shares:
        whence.append(shares)
    if whence:
        console.print(_styled("  " + " · ".join(whence), "dim"))
    for line in _shards(step["ranks"]):
        console.print(_styled(f"  {line}", "dim"))


def _sources(ranks: list[dict[str, Any]]) -> str:
    """Return the mix of sources over all ranks, the largest first."""
    total: dict[str, float] = {}
    told = [rank["source_share"] for rank in ranks if isinstance(rank.get("source_share"), dict)]
    for shares in told:
        for name, share in shares.items():
            total[name] = total.get(name, 0.0) + float(share) / len(told)
    ordered = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{100 * share:.0f} % {plain(name)}" for name, share in ordered)


def _shards(ranks: list[dict[str, Any]]) -> list[str]:
    spans = {shard["name"]: shard for rank in ranks for shard in rank["shards"]}
    return [
        f"shard {plain(name)}: positions {whole(shard['first'])} to {whole(shard['end'] - 1)}"
        for name, shard in sorted(spans.items(), key=lambda item: item[1]["first"])
    ]


def _table(step: dict[str, Any]) -> Table | None:
    from rich.table import Table

    rows = [(rank["rank"], row) for rank in step["ranks"] for row in rank["rows"]]
    if not rows:
        return None
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("  ")
    several = len(step["ranks"]) > 1
    with_shard = any(row["shard"] is not None for _, row in rows)
    with_place = any(row.get("file") is not None for _, row in rows)
    with_text = any("length" in row for _, row in rows)
    if several:
        table.add_column("rank", justify="right")
    for name in ("position", "row"):
        table.add_column(name, justify="right", no_wrap=True)
    if with_shard:
        table.add_column("shard", no_wrap=True)
        table.add_column("in shard", justify="right", no_wrap=True)
    if with_place:
        table.add_column("file", overflow="fold")
    if with_text:
        table.add_column("text", overflow="fold")
    for rank, row in rows:
        cells: list[Any] = ["", *([str(rank)] if several else []), whole(row["position"]), whole(row["row"])]
        if with_shard:
            inside = row["row_in_shard"]
            cells += [_styled(plain(row["shard"] or "")), "" if inside is None else whole(inside)]
        if with_place:
            cells.append(_styled(_place(row), "dim"))
        if with_text:
            cells.append(_text(row))
        table.add_row(*cells)
        if row["instead_of"] is not None:
            stands = f"stands in for row {whole(row['instead_of'])}, which a plan skips"
            table.add_row(*[""] * (len(cells) - 1), _styled(stands, "yellow")) if with_text else table.add_row(
                *[""] * (1 + several), _styled(stands, "yellow")
            )
    return table


def _place(row: dict[str, Any]) -> str:
    if row.get("file") is None:
        return ""
    name = plain(row["file"]).rpartition("/")[2]
    at = f"line {whole(row['line'])}" if row.get("line") is not None else f"byte {whole(row['byte'])}"
    return f"{name}, {at}"


def _text(row: dict[str, Any]) -> Text:
    if row.get("text") is not None:
        said, what = visible(row["text"]), "characters"
    else:
        said, what = " ".join(map(str, row.get("tokens") or ())), "tokens"
    shown = _styled(said)
    if row.get("cut"):
        shown.append(f" … {whole(row['length'])} {what}", "dim")
    return shown


def _range(values: list[Any]) -> str:
    """Return the least and the greatest of some numbers, of which some may be words such as NaN."""
    known = [value for value in values if value is not None]
    numbers = sorted(float(value) for value in known if not isinstance(value, str))
    words = sorted({value for value in known if isinstance(value, str)})
    shown = [f"{number:.4g}" for number in dict.fromkeys((numbers[0], numbers[-1]))] if numbers else []
    return " to ".join(dict.fromkeys(shown)) + (" and " if shown and words else "") + ", ".join(words) or "unknown"


def _spans(samples: list[list[int]]) -> str:
    many = len(samples) > 1 or samples[0][1] - samples[0][0] > 1
    shown = [whole(first) if end - first == 1 else f"{whole(first)} to {whole(end - 1)}" for first, end in samples[:4]]
    return f"{'s' if many else ''} {', '.join(shown)}" + (
        f" and {len(samples) - 4} ranges more" if len(samples) > 4 else ""
    )


def _styled(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)
