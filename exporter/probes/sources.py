"""Where the batch's samples are from, and what its loss should be given that mix.

A batch says its source under one of :data:`SOURCE_NAMES`: one name or number for all of it, or one a sample. Numbers that
lie on a device are counted there and never looked at here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwarden.exporter.levels import Levels
from trainwarden.exporter.loader.streams import samples_in
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.tokens import named_parts
from trainwarden.exporter.watched import local
from trainwarden.record import Value
from trainwarden.signals import MOST_SOURCES, OTHER_SOURCES

#: What batches call it.
SOURCE_NAMES = ("source", "sources", "domain", "domains", "data_source", "dataset", "dataset_name")
#: A longer text is no name of a source: a corpus of translations has its sentences under this word.
LONGEST_NAME = 64
#: Losses of single samples are looked at in batches of up to so many.
MOST_LOSSES = 256
_DEPTH = 2


def find_source(batch: Any) -> Any:
    """Return what a batch says of its source, or None: a name, a number, a sequence of them, or a tensor or array of numbers."""
    return _in_named(batch, _DEPTH)


def _in_named(batch: Any, depth: int) -> Any:
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Mapping) and named_parts(batch) is None:
        for name in SOURCE_NAMES:
            told = [sample.get(name) for sample in batch if isinstance(sample, Mapping)]
            if len(told) == len(batch) and all(_is_name(one) for one in told):
                return told
        return _in_named(batch[0], depth - 1) if depth else None
    named = named_parts(batch)
    if named is None:
        return None
    for name in SOURCE_NAMES:
        if _says_source(named.get(name)):
            return named[name]
    if not depth:
        return None
    return next((found for part in named.values() if (found := _in_named(part, depth - 1)) is not None), None)


def _is_name(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= LONGEST_NAME
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _says_source(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex()) and value.ndim <= 1 and value.numel() > 0
    if isinstance(value, np.ndarray):
        return (
            value.dtype.kind in "iuUO" and value.ndim <= 1 and value.size > 0 and all(map(_is_name, value.reshape(-1)))
        )
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_name, value))
    return _is_name(value)


class Sources(Probe):
    """Signals ``source_share`` and ``loss_expected``, where batches say their source.

    ``names`` name the sources that are numbers, from 0, and come first; what else is named is numbered as it comes. Beyond
    :data:`trainwarden.signals.MOST_SOURCES` sources the rest is one, ``other``.
    """

    name = "sources"
    of_batches = True

    def __init__(self, names: Sequence[str] = (), notices: Notices | None = None) -> None:
        self._given = tuple(names)
        self._names = list(names)
        self._notices = notices
        self._levels = Levels(MOST_SOURCES + 1)

    def close(self, closing: Closing) -> None:
        """Put down how many samples are of each source, and the losses of the samples where there is one of each."""
        told = [(source, batch) for batch in closing.batches if (source := find_source(batch)) is not None]
        if not told:
            return
        sheet, losses = closing.sheet, _losses(closing.loss)
        alone = len(told) == 1 and len(closing.batches) == 1
        named: Counter[Any] = Counter()
        counted: dict[torch.device, list[Tensor]] = {}
        for source, batch in told:
            if isinstance(source, torch.Tensor):
                numbers = local(source)
                if not numbers.ndim:  # one for the whole batch
                    numbers = numbers.reshape(1).expand(samples_in(batch) or 1)
                is_of = numbers.reshape(-1, 1) == torch.arange(MOST_SOURCES, device=numbers.device)
                counted.setdefault(numbers.device, []).append(is_of.sum(0))
                sheet.host["sources.counted"] = sheet.host.get("sources.counted", 0) + numbers.numel()
                if (
                    alone
                    and losses is not None
                    and (losses.numel(), losses.device) == (numbers.numel(), numbers.device)
                ):
                    sheet.add("sources.sums", torch.where(is_of, losses.reshape(-1, 1), 0).sum(0))
                continue
            each = _each(source)
            if len(each) == 1:
                named[each[0]] += samples_in(batch) or 1
            else:
                named.update(each)
                if alone and losses is not None and losses.numel() == len(each):
                    sheet.add("sources.losses", losses)
                    sheet.host["sources.order"] = each
        sheet.host["sources"] = list(named.items())
        for several in counted.values():  # however many micro-batches, one row of counts is sent
            sheet.add("sources.counts", several[0] if len(several) == 1 else torch.stack(several).sum(0))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the mix and the loss that it should have had, then learn from the one that it had."""
        counts = np.zeros(MOST_SOURCES + 1)
        for source, count in reading.host.get("sources", ()):
            counts[self._number(source)] += count
        counts[MOST_SOURCES] += reading.host.get("sources.counted", 0)  # and less by those that are known
        for _, values in reading.pieces("sources.counts"):
            counts[MOST_SOURCES] -= values.sum()
            for number in np.flatnonzero(values):
                counts[self._number(int(number))] += values[number]
        total = counts.sum()
        if not total or not (reading.complete or "sources.counted" not in reading.host):
            return {}
        mix = counts / total
        shares: dict[str, Value] = {self._called(int(number)): float(mix[number]) for number in np.flatnonzero(mix)}
        found: dict[str, Value] = {"source_share": shares}
        self._levels.pass_step()
        expected = self._levels.expected(mix)
        if expected is not None:
            found["loss_expected"] = expected
        self._learn(reading, mix)
        return found

    def _learn(self, reading: Reading, mix: np.ndarray) -> None:
        """Learn from the loss of each source in the batch where it is known, else from the batch's."""
        sums = dict(self._by_source(reading))
        if not sums:
            loss = reading.number("loss")
            if loss is not None:
                self._levels.learn(mix, loss)
            return
        for number, (mean, share) in sums.items():
            alone = np.zeros(len(mix))
            alone[number] = 1.0
            self._levels.learn(alone, mean, 1.0 / share)

    def _by_source(self, reading: Reading) -> list[tuple[int, tuple[float, float]]]:
        """Return each source with the mean loss of its samples and their share."""
        for _, losses in reading.pieces("sources.losses"):
            numbers = np.array([self._number(source) for source in reading.host["sources.order"]])
            return [
                (int(number), (float(losses[numbers == number].mean()), float(np.mean(numbers == number))))
                for number in np.unique(numbers)
            ]
        for _, sums in reading.pieces("sources.sums"):
            ((_, counts),) = reading.pieces("sources.counts")
            size = reading.host["sources.counted"]
            return [
                (self._number(int(number)), (float(sums[number] / counts[number]), float(counts[number]) / size))
                for number in np.flatnonzero(counts)
            ]
        return []

    def _number(self, source: Any) -> int:
        """Return the number of a source, that of all others beyond the limit."""
        if isinstance(source, str):
            name = source
        else:
            name = self._given[source] if 0 <= source < len(self._given) else str(int(source))
        if name in self._names:
            return self._names.index(name)
        if len(self._names) < MOST_SOURCES and name != OTHER_SOURCES:
            self._names.append(name)
            return len(self._names) - 1
        if self._notices is not None and name != OTHER_SOURCES:
            self._notices.say("sources", f"more than {MOST_SOURCES} sources: the rest counts as one, {OTHER_SOURCES!r}")
        return MOST_SOURCES

    def _called(self, number: int) -> str:
        return OTHER_SOURCES if number == MOST_SOURCES else self._names[number]


def _each(source: Any) -> list[Any]:
    """Return names and numbers of the host's own, one a sample."""
    if isinstance(source, np.ndarray):
        source = list(source.reshape(-1))
    each = list(source) if isinstance(source, list | tuple) else [source]
    return [one if isinstance(one, str) else int(one) for one in each]


def _losses(loss: Tensor | float | None) -> Tensor | None:
    """Return the losses of single samples, where that is what the trainer handed in."""
    if not isinstance(loss, torch.Tensor):
        return None
    losses = local(loss.detach()).reshape(-1)
    return losses if 1 < losses.numel() <= MOST_LOSSES else None
