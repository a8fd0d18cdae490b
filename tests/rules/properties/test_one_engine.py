"""One engine: the same alerts live over HTTP and from a file, whole or cut anywhere; and no start inherits a window."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rules.daemon.toy import TOKEN, ToyExporter
from tests.rules.properties.journals import PACK, encoded, heard, lines_of, write
from trainwarden.record import Event, Step
from trainwarden.rules.config import Limits
from trainwarden.rules.core.feed import feed, new_state
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.replay import driver
from trainwarden.rules.replay.recordings import find_recordings, merged
from trainwarden.rules.sources.exporter import ExporterSource
from trainwarden.rules.sources.folder import Target
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.sources.positions import Positions

SEEDS = st.integers(0, 10_000)


def replayed(folder: Path) -> tuple[dict[str, dict[str, Any]], list[list[tuple[Any, ...]]]]:
    """Return the incidents of the journals in a folder, and what the rules of each start said."""
    with heard() as ears:
        (recording,) = find_recordings([str(folder)], io.BytesIO(), folder)
        outcome = driver.Replay(Settings(), PACK).run(merged(recording))
    return outcome.incidents, [ear.said for ear in ears]


class Counts:
    """What a source passes over: nothing, here."""

    def malformed(self, lines: int) -> None:
        raise AssertionError(f"{lines} malformed lines")

    def missing(self, lines: int) -> None:
        raise AssertionError(f"{lines} missing lines")


@pytest.fixture(scope="module")
def token() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "token"
        path.write_text(TOKEN)
        path.chmod(0o600)
        yield path


def followed(
    seed: int, starts: list[list[Step | Event]], shares: list[float], page: int, token: Path
) -> list[list[tuple[Any, ...]]]:
    """Serve the starts over HTTP, each growing between polls as ``shares`` say, and return what the rules of each said."""
    exporter = ToyExporter("made", f"uid-{seed}")
    state = new_state(Settings(mode="act", receiver=True), PACK)

    def put(read: Read) -> bool:
        for value in read.inputs:
            feed(state, value)
        return True

    source = ExporterSource(
        Target(exporter.address, token), Limits(page_lines=page, pages_per_poll=3), Positions(), put, Counts()
    )
    try:
        with heard() as ears:
            for attempt, lines in enumerate(starts):
                whole = encoded(lines)
                exporter.known.add(f"s{attempt}")
                for share in [*shares, 1.0]:
                    exporter.starts[f"s{attempt}"] = whole[: max(1, int(share * len(whole)))]
                    if (f"s{attempt}", attempt) not in exporter.order:
                        exporter.order.append((f"s{attempt}", attempt))
                    while source.poll() == "behind":
                        pass
        return [ear.said for ear in ears]
    finally:
        source.close()
        exporter.close()


@settings(max_examples=8)
@given(
    seed=SEEDS,
    length=st.integers(30, 260),
    second=st.integers(0, 120),
    shares=st.lists(st.floats(0, 1), max_size=4).map(sorted),
    page=st.integers(1, 90),
)
@example(seed=1, length=260, second=120, shares=[0.3, 0.31], page=7)
def test_live_over_http_and_from_a_file_the_rules_say_the_same(
    seed: int, length: int, second: int, shares: list[float], page: int, token: Path
) -> None:
    starts = [lines_of(seed, length)]
    if second:
        starts.append(lines_of(seed, second, attempt=1, first=length // 2))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), seed, starts)
        _, from_file = replayed(Path(folder))
    assert followed(seed, starts, shares, page, token) == from_file
    assert len(from_file) == len(starts)


@settings(max_examples=25)
@given(seed=SEEDS, length=st.integers(1, 400), share=st.floats(0, 1), torn=st.booleans())
@example(seed=2, length=400, share=0.5, torn=True)
def test_a_file_cut_at_any_record_has_exactly_the_incidents_opened_by_then(
    seed: int, length: int, share: float, torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = lines_of(seed, length)
        (path,) = write(Path(folder), seed, [lines])
        whole, said = replayed(Path(folder))
        text = path.read_bytes().splitlines(keepends=True)
        kept = 2 + int(share * (len(text) - 2))  # the header and the start event are always there
        half = text[kept][: len(text[kept]) // 2] if torn and kept < len(text) else b""
        path.write_bytes(b"".join(text[:kept]) + half)
        cut, said_of_cut = replayed(Path(folder))
    last = max((line.step for line in lines[: kept - 1] if isinstance(line, Step)), default=0)
    by_then = {name: row for name, row in whole.items() if row["opened_step"] <= last}
    assert set(cut) == set(by_then)
    for name, row in cut.items():
        assert row["opened_step"] == by_then[name]["opened_step"]
        assert row["alerts"] == by_then[name]["alerts"][: len(row["alerts"])]
        if row["closed_step"] is not None:
            assert {**row, "timeline": 0} == {**by_then[name], "timeline": 0}
    everything = said[0] if said else []
    assert (said_of_cut[0] if said_of_cut else []) == [one for one in everything if one[2] <= last]


@settings(max_examples=20)
@given(seed=SEEDS, length=st.integers(1, 300), second=st.integers(1, 200), back=st.floats(0, 1))
@example(seed=3, length=300, second=200, back=0.0)
def test_a_second_start_never_inherits_a_window(seed: int, length: int, second: int, back: float) -> None:
    first = 1 + int(back * length)
    after = lines_of(seed, second, attempt=1, first=first)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), seed, [lines_of(seed, length), after])
        _, both = replayed(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "alone").mkdir()
        write(Path(folder) / "gone", seed, [lines_of(seed, 1), after])
        (Path(folder) / "gone/attempt-1").rename(Path(folder) / "alone/attempt-1")
        _, alone = replayed(Path(folder) / "alone")
    assert both[-1] == alone[-1]
    assert len(both) == 2
    early = [one for one in both[1] if one[0] == "Early" and one[1] == "firing"]
    assert all(step >= first + 6 for _, _, step, *_ in early), "its seventh record, not the run's"


def test_the_journals_make_every_rule_fire() -> None:
    fired: set[str] = set()
    opened = 0
    for seed in range(12):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), seed, [lines_of(seed, 300)])
            incidents, (said,) = replayed(Path(folder))
        fired |= {one[0] for one in said if one[1] == "firing"}
        opened += len(incidents)
    assert fired == set(PACK.rules)
    assert opened > 15


@pytest.mark.parametrize("size", [1, 3, 64])
def test_replay_in_any_blocks_says_the_same(size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, 5, [lines_of(5, 300), lines_of(5, 100, attempt=1, first=200)])
    whole = replayed(tmp_path)
    monkeypatch.setattr(driver, "MOST_RECORDS", size)
    assert replayed(tmp_path) == whole
