"""The Prometheus page as text, at a tenth of the processor time: what the library rendered of a series' name and labels is kept.

prometheus-client escapes every name and label of every sample at every scrape, character by character. In a trainer that time is
taken from the step: while it lasts, Python's global lock is held. Names and labels of a series never change, so the library renders
them once in each format and a scrape formats the values alone. What changes in more than its value (``train_run_info``, a
counter that carries an exemplar) is still the library's at every scrape. The bytes are the same (``tests/exporter/test_rendered.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .series import Page

#: Formats whose text is kept at once. A client names the version and the escaping, so there is no end of them.
MAX_FORMATS = 4
#: Series after which a scrape lets other threads, the trainer's above all, have the interpreter.
SLICE = 100
#: Seconds of that pause: a pause of 0 is over before the other thread has woken up.
PAUSE = 1e-5
#: What closes a page in OpenMetrics.
EOF = "# EOF\n"

Encoder = Callable[[Collector], bytes]
_number: Callable[[float], str] = floatToGoString


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        yield self._family


@dataclass(slots=True)
class _Kept:
    """One family in one format: its comment lines, and each series' line as far as the value."""

    head: str = ""
    series: list[str] = field(default_factory=list)


class Rendered:
    """Renders a page in the format that a client asks for. Any thread may call it."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._formats: dict[str, dict[str, _Kept]] = {}
        self._lock = threading.Lock()

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, for the ``Accept`` header of a request."""
        encoder, content_type = choose_encoder(accept)
        return self._render(encoder, content_type), content_type

    def _render(self, encoder: Encoder, content_type: str) -> bytes:
        kept = self._of(content_type)
        parts: list[str] = []
        shown = 0
        for family in self._page.families():
            if not family.fixed:
                parts.append(_text(encoder, family.metric()))
                continue
            # Series are only ever added, at the end: as many as before are the same ones.
            known = kept.get(family.name)
            if known is None or len(known.series) != len(family.values):
                known = kept[family.name] = _split(_text(encoder, family.metric()))
            parts.append(known.head)
            for prefix, value in zip(known.series, family.values.values(), strict=True):
                parts.append(f"{prefix}{_number(value)}\n")
                shown += 1
                if shown % SLICE == 0:
                    time.sleep(PAUSE)
        if content_type.startswith("application/openmetrics-text"):
            parts.append(EOF)
        return "".join(parts).encode()

    def _of(self, content_type: str) -> dict[str, _Kept]:
        with self._lock:
            if content_type not in self._formats and len(self._formats) >= MAX_FORMATS:
                del self._formats[next(iter(self._formats))]
            return self._formats.setdefault(content_type, {})


def _text(encoder: Encoder, family: Metric) -> str:
    """Return what the library makes of one family."""
    return encoder(_One(family)).decode().removesuffix(EOF)


def _split(text: str) -> _Kept:
    """Part a family's text into its comments and its series' lines without their values."""
    kept = _Kept()
    for line in text.split("\n")[:-1]:  # not splitlines: a label's value may hold one of Unicode's other line ends
        if line.startswith("#"):
            kept.head += line + "\n"
        else:
            kept.series.append(line[: line.rindex(" ") + 1])
    return kept
