"""The page's text: byte for byte what prometheus-client makes of it, in every format, while series are added and values change."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from trainwarden.exporter import rendered
from trainwarden.exporter.rendered import MAX_FORMATS, Rendered
from trainwarden.exporter.series import Page
from trainwarden.record import ShardSpan, Step

TEXT = "text/plain;version=0.0.4"
FORMATS = (
    "",
    TEXT,
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "application/openmetrics-text;version=1.0.0",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5",
    "application/openmetrics-text;version=0.0.1",
    "*/*",
)


def of_the_library(page: Page, accept: str) -> tuple[bytes, str]:
    registry = CollectorRegistry()
    registry.register(page)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def step(number: int, rates: dict[str, float], shard: str | None = None) -> Step:
    signals = {"lr": dict(rates), "loss": 2.5 / (number + 1), "samples_seen": 4.0 * number}
    return Step(
        seq=number, step=number, time=1.7e9 + number, signals=signals, shards=[ShardSpan(shard, 0, 4)] if shard else []
    )


@pytest.mark.parametrize("accept", FORMATS)
def test_a_page_is_the_librarys_byte_for_byte_before_the_first_step_and_after_each(accept: str) -> None:
    page = Page("run", 3, sources=("web", "code"))
    render = Rendered(page)
    assert render(accept) == of_the_library(page, accept)
    for number in range(4):
        rates = {f"group {group}": 10.0 ** -(group + number) for group in range(number + 1)}
        page.step(step(number, rates, shard=f"shard-{number}" if number > 1 else None))
        if number == 2:
            page.identify({"run_uid": "u", "model": 'of "quotes" \\ and\nlines'})
        assert render(accept) == of_the_library(page, accept)


@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5),
    values=st.lists(st.floats(), min_size=5, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_any_name_and_any_number_are_written_as_the_library_writes_them(names: list[str], values: list[float]) -> None:
    page = Page("a\u2028run # {", 0)
    render = Rendered(page)
    for count in range(len(names) + 1):
        page.step(step(count, dict(zip(names[:count], values, strict=False))))
        for accept in (FORMATS[1], FORMATS[3]):
            assert render(accept) == of_the_library(page, accept)


def test_what_a_client_asks_for_cannot_make_it_keep_more_and_more() -> None:
    page = Page("run", 0)
    render = Rendered(page)
    for number in range(50):
        accept = f"application/openmetrics-text;version=1.0.{number}"
        assert render(accept) == of_the_library(page, accept)
    assert len(render._formats) == MAX_FORMATS


def test_names_and_labels_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("run", 0)
    render = Rendered(page)
    asked: list[str] = []
    text = rendered._text

    def counting(encoder: rendered.Encoder, family: rendered.Metric) -> str:
        asked.append(family.name)
        return text(encoder, family)

    monkeypatch.setattr(rendered, "_text", counting)
    render(TEXT)
    first = len(asked)
    for number in range(3):
        page.step(step(number, {"all": 0.1 / (number + 1)}))
        render(TEXT)
    assert first > 50
    assert asked[first:] == ["train_run"] * 3


def test_several_threads_may_ask_while_series_are_added() -> None:
    page = Page("run", 0)
    render = Rendered(page)
    wrong: list[bytes] = []
    done = threading.Event()

    def ask(accept: str) -> None:
        while not done.is_set():
            body, _ = render(accept)
            rates = [line for line in body.decode().splitlines() if line.startswith("train_learning_rate{")]
            # The value of a group is its number: a line that got another's would tell.
            pairs = [(line.partition('group="')[2].partition('"')[0], float(line.rpartition(" ")[2])) for line in rates]
            if any(name != "all" and value != float(name) and not math.isnan(value) for name, value in pairs):
                wrong.append(body)

    threads = [threading.Thread(target=ask, args=(accept,)) for accept in (FORMATS[1], FORMATS[3], FORMATS[1])]
    for thread in threads:
        thread.start()
    for number in range(200):
        page.step(step(number, {str(number): float(number)}))
    done.set()
    for thread in threads:
        thread.join(10)
    assert not wrong
    body, _ = render(TEXT)
    assert body.decode().count("train_learning_rate{") == 201
