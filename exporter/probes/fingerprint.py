"""What dirty data looks like: supervised tokens, distinct tokens, the longest repeat, ids beyond the vocabulary, shares of classes
of tokens, and a hash.

Computed on the device the batch is on, in tensor operations alone, in one pass whose cost grows with the tokens. No token id
is ever used as an index as it came: an id out of range would be a fault of the device and end the training. What an id stands at
is clamped to a table that has one place too many at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading, Sheet
from trainwarden.exporter.tokens import Tokens, find_tokens
from trainwarden.exporter.vocabulary import TokenClasses
from trainwarden.record import Value

#: Label of a token that carries no loss (torch.nn.CrossEntropyLoss' ignore_index).
IGNORED = -100


def longest_repeat(ids: Tensor, mask: Tensor | None, joined: Tensor | None = None) -> Tensor:
    """Return the longest run of one id along the last dimension, masked positions left out. ``ids`` is (…, tokens).

    A run ends with its document: ``joined`` (rows, tokens - 1) says where one goes on.
    """
    rows = ids.reshape(-1, ids.shape[-1])
    real = None if mask is None else mask.reshape(rows.shape) != 0
    longest = torch.ones((), dtype=torch.int64, device=ids.device)
    if rows.shape[1] > 1:
        same = rows[:, 1:] == rows[:, :-1]
        if joined is not None:
            same = same & joined
        if real is not None:
            same = same & real[:, 1:] & real[:, :-1]
        place = torch.arange(1, rows.shape[1], device=rows.device, dtype=torch.int32)
        begin = torch.where(same, 0, place).cummax(dim=1).values
        longest = (place - begin).max() + 1
    return longest if real is None else longest * real.any()


def table_places(ids: Tensor, size: int) -> Tensor:
    """Return where ids (any whole numbers) stand in a table of ``size`` places: 1 + id, what lies beyond at its two ends."""
    return (ids.reshape(-1).to(torch.int64).clamp(-1, size - 2)) + 1


def seen(places: Tensor, size: int) -> Tensor:
    """Return a table with 1 at each place that occurs (uint8)."""
    return torch.zeros(size, dtype=torch.uint8, device=places.device).index_fill_(0, places, 1)


def distinct(ids: Tensor) -> Tensor:
    """Return how many different ids there are, whatever they are."""
    ordered = ids.reshape(-1).sort().values
    return (ordered[1:] != ordered[:-1]).sum() + 1


def out_of_range(ids: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    """Return how many ids are none of ``0 … vocabulary - 1``, masked positions left out."""
    found = (ids < 0) | (ids >= vocabulary)
    if mask is not None:
        found = found & (mask != 0)
    return found.sum()


#: An odd multiplier that spreads neighbouring numbers over 32 bits (2^32 over the golden ratio), and what numbers are taken modulo.
SPREAD, MODULUS = 2654435769, 2**32
#: Odd multiplier by which the hash of a row is stirred; below 2^31, so that a product fits.
STIR = 73244475


def hash_of(flat: Tensor, before: int = 0) -> Tensor:
    """Return a hash below 2^32 of ids in their order, int64: each id is multiplied by an odd number of its place.

    ``before`` ids came before these: the hash of a whole is the sum of its parts' modulo 2^32.
    """
    place = torch.arange(2 * before + 1, 2 * (before + flat.numel()), 2, device=flat.device)
    last = MODULUS - 1  # "and" with it is the remainder, of negative numbers too, and cheaper
    return ((flat.to(torch.int64) + 1) * ((place * SPREAD) & last) & last).sum() & last


def rows_hash(ids: Tensor) -> Tensor:
    """Return the sum of a hash of each row (the last dimension) modulo 2^32, int64: the order of the rows does not matter.

    What a row's ids add up to is stirred (two rounds of xor-shift and multiplication) before it is added, so that tokens that
    change rows do not cancel.
    """
    rows = ids.reshape(-1, ids.shape[-1])
    place = torch.arange(1, 2 * rows.shape[1], 2, device=ids.device)
    last = MODULUS - 1
    found = ((rows.to(torch.int64) + 1) * ((place * SPREAD) & last) & last).sum(1) & last
    for _ in range(2):
        found = ((found ^ (found >> 16)) * STIR) & last
    return (found ^ (found >> 16)).sum() & last


def supervised(tokens: Tokens) -> Tensor | None:
    """Return how many tokens carry a loss, None where nothing says it: then all of them do."""
    if tokens.loss_mask is not None:
        return tokens.loss_mask.count_nonzero()
    if tokens.labels is not None:
        return (tokens.labels != IGNORED).sum()
    return None if tokens.mask is None else tokens.mask.count_nonzero()


class Fingerprint(Probe):
    """Signals ``batch_supervised_tokens``, ``batch_unique_token_ratio``, ``batch_longest_repeat_tokens``,
    ``batch_ids_out_of_range``, ``batch_token_share``, ``batch_hash``, ``batch_rows_hash``; counts tokens.

    ``classes`` says which ids are digits and padding. Its tables are put on ``devices`` now: later, that would be to wait for them.
    """

    name = "fingerprint"
    of_batches = True

    def __init__(self, classes: TokenClasses | None = None, devices: Iterable[torch.device] = ()) -> None:
        self._classes = classes
        self._tables: dict[torch.device, Tensor] = {}
        if classes is not None:
            table = classes.table()
            for device in {torch.device("cpu"), *devices}:
                self._tables[device] = table.to(device)

    def close(self, closing: Closing) -> None:
        """Compute the fingerprint of all batches of the step, micro-batches together."""
        found = [tokens for tokens in map(find_tokens, closing.batches) if tokens is not None]
        if not found:
            return
        sheet, vocabulary = closing.sheet, closing.watched.vocabulary
        count = sum(tokens.ids.numel() for tokens in found)
        sheet.host["tokens"] = count
        sheet.host["distinct_bound"] = min(count, vocabulary or count)
        before, begin = 0, len(sheet.tensors)
        for tokens in found:
            ids = tokens.ids
            carried = supervised(tokens)
            if carried is None:
                sheet.host["supervised"] = sheet.host.get("supervised", 0) + ids.numel()
            else:
                sheet.add("batch.supervised", carried)
            sheet.add("batch.repeat", longest_repeat(ids, tokens.mask, tokens.joined))
            sheet.add("batch.hash", hash_of(ids.reshape(-1), before))
            sheet.add("batch.rows", rows_hash(ids))
            if vocabulary:
                sheet.add("batch.beyond", out_of_range(ids, tokens.mask, vocabulary))
            if self._classes is not None or tokens.mask is not None:
                self._count_classes(sheet, tokens)
            before += ids.numel()
        if len(found) > 1:
            _combine(sheet, begin)
        if len({tokens.ids.device for tokens in found}) == 1:
            sheet.add("batch.distinct", _distinct_of([tokens.ids for tokens in found], vocabulary))

    def _count_classes(self, sheet: Sheet, tokens: Tokens) -> None:
        ids, mask = tokens.ids, tokens.mask
        if mask is not None:
            sheet.add("batch.real", mask.count_nonzero(), (ids.numel(), True))
        table = self._tables.get(ids.device)
        if table is not None:
            places = table_places(ids, len(table))
            if mask is not None:  # what is padding counts as nothing else
                places = torch.where(mask.reshape(-1) != 0, places, 0)
            sheet.add("batch.classes", table.index_select(0, places).sum(0), (ids.numel(), mask is not None))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the fingerprint."""
        found: dict[str, Value] = {}
        repeats = [float(values[0]) for _, values in reading.pieces("batch.repeat")]
        if not repeats:
            return found
        carried = sum(float(values[0]) for _, values in reading.pieces("batch.supervised"))
        found["batch_supervised_tokens"] = carried + reading.host.get("supervised", 0)
        found["batch_longest_repeat_tokens"] = max(repeats)
        beyond = [float(values[0]) for _, values in reading.pieces("batch.beyond")]
        if beyond:
            found["batch_ids_out_of_range"] = sum(beyond)
        found["batch_hash"] = float(sum(int(values[0]) for _, values in reading.pieces("batch.hash")) % MODULUS)
        found["batch_rows_hash"] = float(sum(int(values[0]) for _, values in reading.pieces("batch.rows")) % MODULUS)
        number = reading.number("batch.distinct")
        if number is not None:
            found["batch_unique_token_ratio"] = number / reading.host["distinct_bound"]
        shares = self._shares(reading)
        if shares:
            found["batch_token_share"] = shares
        return found

    def _shares(self, reading: Reading) -> dict[str, Value]:
        """Return the share of each class: padding of all tokens, the others of those that are no padding."""
        total = int(reading.host["tokens"])
        names = () if self._classes is None else self._classes.names
        masked = sum(size for (size, _), _ in reading.pieces("batch.real"))
        padding = masked - sum(float(values[0]) for _, values in reading.pieces("batch.real"))
        seen_in, counted = 0, dict.fromkeys(names, 0.0)
        known = masked
        for (size, has_mask), values in reading.pieces("batch.classes"):
            seen_in += size
            for name, value in zip(names, values, strict=True):
                if name != "padding":
                    counted[name] += float(value)
                elif not has_mask:
                    padding += float(value)
                    known += size
        shares: dict[str, Value] = {}
        if seen_in == total:
            real = total - padding
            shares = {name: counted[name] / real for name in names if name != "padding" and real > 0}
        if known == total:
            shares["padding"] = padding / total
        return shares


def _combine(sheet: Sheet, begin: int) -> None:
    """Put together what micro-batches put down from ``begin`` on: however many they are, a step sends a handful of numbers.

    With counts comes the number of tokens that they are of, and whether these had a mask.
    """
    parts: dict[tuple[str, torch.device, bool], list[tuple[int, Tensor]]] = {}
    for name, meta, tensor in sheet.tensors[begin:]:
        size, has_mask = meta or (0, False)
        parts.setdefault((name, tensor.device, has_mask), []).append((size, tensor))
    del sheet.tensors[begin:]
    for (name, _, has_mask), several in parts.items():
        together = torch.stack([tensor for _, tensor in several])
        whole = together.amax(0) if name == "batch.repeat" else together.sum(0)
        sheet.add(name, whole, (sum(size for size, _ in several), has_mask))


def _distinct_of(several: list[Tensor], vocabulary: int | None) -> Tensor:
    """Return how many different ids there are in tensors of one device.

    With a vocabulary by ticking them off in a table, which costs a fraction of sorting them: what lies beyond counts once on each side.
    """
    if not vocabulary:
        return distinct(several[0] if len(several) == 1 else torch.cat([ids.reshape(-1) for ids in several]))
    table: Tensor | None = None
    for ids in several:
        places = table_places(ids, vocabulary + 2)
        if table is None:
            table = seen(places, vocabulary + 2)
        else:
            table.index_fill_(0, places, 1)
    assert table is not None
    return table.sum()
