"""What a script logs itself, under the names that a record gives it. Numbers alone; a tensor is kept and not looked at.

A number that the exporter measures itself is left out: it is seen better there, and nothing is in a record twice. The loss is kept
for steps whose backward pass could not be seen.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwarden.names import HUMP, SYNONYMS, TAKEN, normal, own_name
from trainwarden.signals import BY_NAME

#: Names of the script's own that are followed.
MOST = 256
#: Signals that the exporter has probes for, but that it cannot measure where it is not handed the loader.
OF_THE_LOADER = frozenset({"epoch", "samples_seen", "tokens"})
#: A signal that is measured where it can be, and that a script's own wins over: it is what the script trains on.
OF_THE_SCRIPT = "router_aux_loss"
#: Signals that a word stands for in a log alone: in a process the exporter looks at the batch, and a script's number keeps its name.
OF_A_LOG = ("batch_supervised_tokens", "sample_position", "shard")
#: Which signal each word means, and how telling the word is: the less the better.
MEANS = {
    word: (signal, rank) for signal, words in SYNONYMS if signal not in OF_A_LOG for rank, word in enumerate(words)
}
#: How deep mappings within mappings are looked into.
DEPTH = 4

Number = float | Tensor


class Logged:
    """Collects what is logged from one :meth:`take` to the next; of a name that comes twice the last value is kept."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: dict[str, Number] = {}
        self._loss: tuple[int, Number] | None = None
        #: Names that came after there were :data:`MOST`.
        self.refused = 0

    def add(self, values: Mapping[str, Any], prefix: str = "", depth: int = DEPTH) -> None:
        """Take in some values by the script's names; what is not one number each is left out."""
        for name, value in values.items():
            whole = f"{prefix}{name}"
            if isinstance(value, Mapping):
                if depth:
                    self.add(value, f"{whole}.", depth - 1)
                continue
            number = _number(value)
            if number is not None:
                self._put(whole, number)

    def _put(self, name: str, value: Number) -> None:
        signal, rank = MEANS.get(normal(name)) or MEANS.get(normal(HUMP.sub("_", name))) or (None, 0)
        if signal == "loss":
            if self._loss is None or rank <= self._loss[0]:
                self._loss = (rank, value)
            return
        if name not in self._names:
            if len(self._names) >= MOST:
                self.refused += 1
                return
            self._names[name] = self._named(name, signal)
        if self._names[name]:
            self._values[self._names[name]] = value

    def _named(self, name: str, meant: str | None) -> str:
        """Return the name in a record; an empty one where the exporter has that number itself, or it is no signal."""
        signal = normal(name) if meant is None else meant
        known = BY_NAME.get(signal)
        if known is not None:
            kept = (not known.labels and (signal in OF_THE_LOADER or not known.probed)) or signal == OF_THE_SCRIPT
            return signal if kept and signal not in self._names.values() else ""
        if meant is not None:  # the step, the time, a running total of a counter
            return ""
        own = own_name(name)
        if own in BY_NAME or own in TAKEN:
            own = f"log_{own}"
        unique, count = own, 2
        while unique in self._names.values():
            unique, count = f"{own}_{count}", count + 1
        return unique

    def put_back(self, values: dict[str, Number], loss: Number | None) -> None:
        """Add what was taken before; a value that came since wins."""
        self._values = {**values, **self._values}
        if loss is not None and self._loss is None:
            self._loss = (0, loss)

    def take(self) -> tuple[dict[str, Number], Number | None]:
        """Return the values by their names in a record, and the loss that was logged, and begin anew."""
        found = self._values, None if self._loss is None else self._loss[1]
        self._values, self._loss = {}, None
        return found


def _number(value: Any) -> Number | None:
    """Return what can be a signal: a float, or a copy of a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return None if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool else value.detach().clone()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return None
