"""What lies in a quarantined checkpoint, and how the suspect step is made again from it.

::

    RUN/quarantine/incident-ID/QUARANTINED.json          the request, and the mark by which such a folder is known
    RUN/quarantine/incident-ID/WHOLE                     written last: every rank's part is there
    RUN/quarantine/incident-ID/checkpoint/               what the trainer's function wrote
    RUN/quarantine/incident-ID/rank-R/positions.json     the last batches, and what the record says of their steps
    RUN/quarantine/incident-ID/rank-R/random.pt          states of the random generators

Reading touches nothing of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainwarden.plan import Quarantine, Target
from trainwarden.record import Ranges, RecordError, ShardSpan, Step, decode_line, decode_number, encode_numbers
from trainwarden.runfolder import QUARANTINED

from . import random_state
from .identity import Identity
from .loader.rebuilt import RebuildError, Rebuilt
from .probes.fingerprint import MODULUS, hash_of
from .tokens import find_tokens

PARTIAL, CHECKPOINT, POSITIONS, RANDOM, WHOLE = ".partial", "checkpoint", "positions.json", "random.pt", "WHOLE"
SCHEMA = 1
#: Steps that are told at most, however far back the last good checkpoint is, and bytes read from the end of a journal's files.
MOST_STEPS, TAIL_BYTES = 20_000, 64 * 2**20
#: What the start event says of the loader and the data set: all that the rows at a position are a function of.
_LOADER = ("loader", "loader_kind", "dataset", "dataset_size")


class ForensicsError(ValueError):
    """A quarantined checkpoint that is not whole, or does not fit what is asked. The message names the file and what to do."""


class StepSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A step as this rank's record has it: what it ate (positions of ``epoch``'s unskipped order) and what came of it.

    ``position`` is that after the step, over all ranks. Numbers that are not finite are the words "NaN", "+Inf", "-Inf".
    """

    step: int
    epoch: int | None = None
    position: int | None = None
    samples: Ranges = []
    shards: list[ShardSpan] = []
    batch_hash: int | None = None
    batch_rows_hash: int | None = None
    loss: float | str | None = None
    grad_norm: float | str | None = None
    lr: float | str | None = None
    skipped: bool = False

    def number(self, name: str) -> float | None:
        """Return ``loss``, ``grad_norm`` or ``lr`` as a number, None where it was not measured."""
        return decode_number(getattr(self, name), name)


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``positions.json``. ``step`` is the one after which the state was saved, ``steps`` end with it."""

    run_uid: str
    run: str
    attempt: int
    start_id: str
    rank: int
    world_size: int
    incident: str
    suspect_step: int
    step: int
    last_good: Target | None
    steps: list[StepSeen]
    loader: dict[str, Any]
    torch: str
    schema: int = SCHEMA


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of one rank's part."""
    return folder / f"rank-{rank}"


def positions_of(
    journal: Path, start_line: bytes | None, identity: Identity, request: Quarantine, step: int, batches: int
) -> Positions:
    """Return what the records of a start's ``journal`` say up to ``step``: of the last ``batches`` steps, and of all since the last
    good checkpoint, at most :data:`MOST_STEPS`.
    """
    first = step - batches + 1
    if request.last_good is not None:
        first = min(first, request.last_good.step + 1)
    first = max(first, step - MOST_STEPS + 1)
    start = {} if start_line is None else msgspec.json.decode(start_line)
    return Positions(
        run_uid=identity.run_uid,
        run=identity.run,
        attempt=identity.attempt,
        start_id=identity.start_id,
        rank=identity.rank,
        world_size=identity.world_size,
        incident=request.incident,
        suspect_step=request.suspect_step,
        step=step,
        last_good=request.last_good,
        steps=[_seen(record) for record in _records(journal, first, step)],
        loader={name: start.get(name) for name in _LOADER},
        torch=str(torch.__version__),
    )


def _records(journal: Path, first: int, last: int) -> list[Step]:
    found: dict[int, Step] = {}
    for path in sorted(journal.glob("*.ndjson"), reverse=True):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            for line in file.read().splitlines():
                try:
                    record = decode_line(line)
                except RecordError:  # torn, by the seek or by being written right now
                    continue
                if isinstance(record, Step) and first <= record.step <= last:
                    found.setdefault(record.step, record)
        if first in found:
            break
    return [found[step] for step in sorted(found)]


def _seen(record: Step) -> StepSeen:
    def whole(name: str) -> int | None:
        value = record.value(name)
        return None if value is None else int(value)

    numbers = {name: encode_numbers(record.value(name)) for name in ("loss", "grad_norm", "lr")}
    return StepSeen(
        step=record.step,
        epoch=whole("epoch"),
        position=whole("sample_position"),
        samples=record.samples,
        shards=record.shards,
        batch_hash=whole("batch_hash"),
        batch_rows_hash=whole("batch_rows_hash"),
        skipped=bool(record.value("skipped") or 0),
        **numbers,
    )


def load(path: str | Path, rank: int | None = None) -> Quarantined:
    """Return one rank's part of the quarantined checkpoint at ``path``, a folder ``incident-ID``.

    ``rank``: None is this process's rank, 0 without a process group.

    Raises:
        ForensicsError: the folder is no quarantined checkpoint or was never completed, or it cannot be read.
    """
    folder = Path(path)
    if rank is None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if not (folder / QUARANTINED).is_file():
        raise ForensicsError(f"{folder}: is no quarantined checkpoint: name a folder RUN/quarantine/incident-ID")
    if folder.name.endswith(PARTIAL) or not (folder / WHOLE).is_file():
        raise ForensicsError(f"{folder}: was never completed: the run ended while it was written; it can be deleted")
    where = rank_folder(folder, rank) / POSITIONS
    try:
        positions = msgspec.json.decode(where.read_bytes(), type=Positions)
    except FileNotFoundError:
        raise ForensicsError(f"{where}: is not there: the run had no rank {rank}") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ForensicsError(f"{where}: {error}") from None
    if positions.schema != SCHEMA:
        raise ForensicsError(f"{where}: schema {positions.schema} is not {SCHEMA}, the one this version reads")
    return Quarantined(folder, positions)


class Quarantined:
    """One rank's part of a quarantined checkpoint.

    Example::

        found = load(".trainwarden/gpt-7b/quarantine/incident-gpt-7b-0-341")
        state = torch.load(found.last_good.path)            # model, optimizer, scheduler
        found.restore_random(found.last_good.step)
        for seen, batches in found.batches(loader, found.last_good.step + 1, found.suspect_step):
            ...                                             # the step as the script makes it; seen.loss is what came of it
    """

    def __init__(self, folder: Path, positions: Positions) -> None:
        self.folder = folder
        #: Everything that ``positions.json`` holds.
        self.positions = positions
        #: Where the trainer's function has saved the damaged state, that after :attr:`step`.
        self.checkpoint = folder / CHECKPOINT
        self.step = positions.step
        #: The incident's onset: the step whose batch is suspect.
        self.suspect_step = positions.suspect_step
        #: The checkpoint from which the suspect step can be made again; None where there was none.
        self.last_good = positions.last_good
        self._steps = {seen.step: seen for seen in positions.steps}

    def seen(self, step: int) -> StepSeen:
        """Return what the record says of a step.

        Raises:
            ForensicsError: nothing is known of it.
        """
        if step not in self._steps:
            known = f"{min(self._steps)} to {max(self._steps)}" if self._steps else "none"
            raise ForensicsError(f"{self.folder}: step {step} is not among those told ({known})")
        return self._steps[step]

    def rows(self, step: int, order: Callable[[int, int], Any] | None = None, shards: Any = None) -> list[int]:
        """Return the rows of the data set that this rank read for a step, in their order, stand-ins of skipped ones included.

        ``order`` and ``shards`` are those of ``wrap``, where the first was a function or the second too many for a start event.

        Raises:
            ForensicsError: nothing is known of the step, or the loader was of a kind that keeps its order to itself.
        """
        seen = self.seen(step)
        if seen.epoch is None or not seen.samples:
            raise ForensicsError(f"{self.folder}: step {step} has no positions: the loader was not wrapped")
        try:
            return [row.row for row in Rebuilt(self.positions.loader, order, shards).rows(seen.epoch, seen.samples)]
        except RebuildError as error:
            raise ForensicsError(f"{self.folder}: step {step}: {error}") from None

    def batches(
        self,
        loader: Any,
        first: int | None = None,
        last: int | None = None,
        order: Callable[[int, int], Any] | None = None,
        shards: Any = None,
    ) -> Iterator[tuple[StepSeen, list[Any]]]:
        """Yield each step from ``first`` to ``last`` (both: the suspect one) with its batches, several where it accumulated.

        ``loader`` is the script's DataLoader, wrapped or not: its data set, batch size and ``collate_fn`` are used, its order is not.

        Raises:
            ForensicsError: as :meth:`rows`; the loader does not collate rows of its data set; or a batch is another than it
                was, by its hash: data set, tokenizer or ``collate_fn`` have changed.
        """
        first = self.suspect_step if first is None else first
        for step in range(first, (first if last is None else last) + 1):
            rows = self.rows(step, order, shards)
            size = getattr(loader, "batch_size", None)
            if not size or not hasattr(loader, "collate_fn") or not hasattr(loader.dataset, "__getitem__"):
                raise ForensicsError(
                    f"{type(loader).__name__} does not collate rows of a data set: make the batches of rows()"
                )
            batches = [
                loader.collate_fn([loader.dataset[row] for row in rows[at : at + size]])
                for at in range(0, len(rows), size)
            ]
            seen = self.seen(step)
            found = batch_hash(batches)
            if seen.batch_hash is not None and found is not None and found != seen.batch_hash:
                raise ForensicsError(
                    f"{self.folder}: the batch of step {step} has hash {found} and had {seen.batch_hash}: data set, tokenizer or "
                    "collate_fn are not those of the run"
                )
            yield seen, batches

    def restore_random(self, step: int | None = None) -> None:
        """Put the random generators where they were: after :attr:`step`, or when the checkpoint of ``step`` was reported.

        Raises:
            ForensicsError: nothing was kept of that step: the trainer's own checkpoint has to hold it.
        """
        where = rank_folder(self.folder, self.positions.rank) / RANDOM
        try:
            states = torch.load(where, weights_only=True)
            found = states["after"] if step in (None, self.step) else states["checkpoints"].get(step)
        except Exception as error:
            raise ForensicsError(f"{where}: {error}") from None
        if found is None:
            kept = ", ".join(map(str, states["checkpoints"])) or "none"
            raise ForensicsError(f"{where}: holds no states of a checkpoint of step {step}; it has those of: {kept}")
        random_state.restore(found)


def batch_hash(batches: list[Any]) -> int | None:
    """Return the ``batch_hash`` of a step of these micro-batches, None where they hold no tokens."""
    total = before = 0
    for tokens in map(find_tokens, batches):
        if tokens is None:
            return None
        flat = tokens.ids.reshape(-1)
        total += int(hash_of(flat, before))
        before += flat.numel()
    return total % MODULUS


__all__ = ["ForensicsError", "Positions", "Quarantined", "StepSeen", "batch_hash", "load", "positions_of"]
