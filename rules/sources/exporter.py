"""One exporter, pulled by cursor over HTTP.

A poll asks which start is running, finishes reading the start before it (the new exporter serves that one's journal),
then reads the running one page by page up to the newest line, and says what it saw besides lines. While every answer says
that its start is the running one, nobody asks again which it is. Every line goes on
once and in order; a line that is missing or cannot be read is counted and passed over, never invented.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import structlog

from trainwarden.record import Event, RecordError, decode_line
from trainwarden.rules.config import ConfigError, Limits, read_secret
from trainwarden.rules.core.inputs import SourceSeen, Start
from trainwarden.rules.sources.bounded import Reply, Unanswered, exchange, new_session
from trainwarden.rules.sources.folder import Target
from trainwarden.rules.sources.lines import Counts, Page, Read, decode_lines
from trainwarden.rules.sources.positions import Positions

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

#: How a poll ended; a closed set that becomes a metric label.
Outcome: TypeAlias = Literal["ok", "behind", "unreachable", "denied", "not_started", "unusable", "taken"]

#: Polls for which a start that ended is asked for, before what was not read of it is given up as a gap.
DRAIN_POLLS = 15


class _Broken(Exception):
    """The peer's answer is not what an exporter says. The message is for the operator."""


class _Stopping(Exception):
    """The daemon takes no more: the poll ends where it is."""


class ExporterSource:
    """Pulls one exporter; :meth:`poll` is called by one thread at a time and never raises for what the peer does."""

    def __init__(
        self,
        target: Target,
        limits: Limits,
        positions: Positions,
        put: Callable[[Read], bool],
        counts: Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.target = target
        self._limits = limits
        self._positions = positions
        self._put = put
        self._counts = counts
        self._clock = clock
        self._log = structlog.get_logger("source").bind(source=target.address)
        self._session = new_session()
        self._token: str | None = None
        self._token_of = ""  # the file that it is from
        self._seen: tuple[Start, int, int] | None = None  # start, rank and the newest seq of the last good poll
        self._running = False  # whether the last page said that its start is the running one
        self._drains = 0
        self._said: set[str] = set()
        self._last_outcome: tuple[Outcome, str] | None = None

    def poll(self, *, leaving: bool = False) -> Outcome:
        """Read what is new and return how it went. A source that is ``leaving`` need not be there any more."""
        try:
            outcome = self._poll(leaving)
            says = ""
        except _Stopping:
            return "behind"
        except Unanswered as error:
            outcome, says = "unreachable", str(error)
        except _Broken as error:
            outcome, says = "unusable", str(error)
        if leaving and outcome == "unreachable":
            return outcome
        if outcome not in ("ok", "behind"):
            self._say_unseen()
        self._say(outcome, says)
        return outcome

    @property
    def reading(self) -> tuple[Start, int] | None:
        """The start and rank that the last good poll read."""
        return None if self._seen is None else self._seen[:2]

    def close(self) -> None:
        """Close the connection and let another source have the stream."""
        self._positions.leave(self.target.address)
        self._session.close()

    def look(self) -> None:
        """Say how far this source is behind, without reading it.

        Done with all new sources before the first of them is read: a core that knows which ranks are catching up
        waits for them.
        """
        try:
            found = self.running()
            if isinstance(found, str):
                return
            start, rank = found
            if not self._claim(start, rank):
                return
            at = self._positions.seq(start.start_id, rank)
            reply = self._page(start, at, 1)
            if reply is None:
                return
            last = _last_seq(reply)
        except (Unanswered, _Broken):
            return  # the poll that follows says so
        if at < last:
            self._note(start, rank, last, caught_up=False, authenticated=self._token is not None, reachable=True)

    def running(self) -> tuple[Start, int] | Outcome:
        """Ask which start of which rank the exporter serves, or what keeps it from saying so.

        Raises:
            Unanswered: it cannot be reached.
        """
        reply = self._get("/api/v1/run")
        if reply.status in (401, 403):
            self._token = None
            return "denied"
        if reply.status in (404, 503):
            return "not_started"
        if reply.status != 200:
            raise _Broken(f"/api/v1/run answers {reply.status}")
        return _start_of(reply.body)

    def _poll(self, leaving: bool) -> Outcome:
        if self._running and not leaving and self._seen is not None:
            start, rank, _ = self._seen
            before = self._positions.current(start.run_uid, rank)
            if before is not None and before.start_id == start.start_id:
                if not self._claim(start, rank):
                    return "taken"
                self._running = False
                try:
                    last = self._read(start, rank)
                except _Broken:
                    last = None  # the longer way finds out why
                if last is not None and self._running:
                    return self._seen_up_to(start, rank, last)
        found = self.running()
        if isinstance(found, str):
            return found
        start, rank = found
        if not leaving and not self._claim(start, rank):
            return "taken"
        before = self._positions.current(start.run_uid, rank)
        if before is not None and before.start_id != start.start_id:
            if before.attempt > start.attempt:
                raise _Broken(
                    f"serves attempt {start.attempt} of run {start.run}, but {before.attempt} was seen already"
                )
            if not self._drain(before, rank):
                return "behind"
        if before is None or before.start_id != start.start_id:
            self._positions.begin(start, rank)
        last = self._read(start, rank)
        if last is None:
            return "behind"  # restarted between two requests: the next poll meets the new start
        return self._seen_up_to(start, rank, last)

    def _seen_up_to(self, start: Start, rank: int, last: int) -> Outcome:
        caught_up = self._positions.seq(start.start_id, rank) >= last
        self._seen = (start, rank, last)
        self._note(start, rank, last, caught_up=caught_up, authenticated=self._token is not None, reachable=True)
        return "ok" if caught_up else "behind"

    def _claim(self, start: Start, rank: int) -> bool:
        token = "" if self._token is None else self._token_of
        return self._positions.claim(start.run_uid, rank, self.target.address, self._clock(), token)

    def _drain(self, start: Start, rank: int) -> bool:
        """Read the rest of a start that ended; True once there is nothing more to be had of it."""
        self._drains += 1
        last = self._read(start, rank)
        if last is not None and self._positions.seq(start.start_id, rank) < last and self._drains < DRAIN_POLLS:
            return False
        if last is None or self._positions.seq(start.start_id, rank) < last:
            self._log.warning(
                "the end of an earlier start cannot be read any more", run=start.run, start_id=start.start_id, rank=rank
            )
            self._counts.missing(1)
        self._drains = 0
        return True

    def _read(self, start: Start, rank: int) -> int | None:
        """Read pages up to the newest line or the poll's limit; return the newest seq, None where the start is unknown."""
        last = 0
        for page in range(self._limits.pages_per_poll):
            after = self._positions.seq(start.start_id, rank)
            reply = self._page(start, after, self._limits.page_lines)
            if reply is None:
                return None
            last = _last_seq(reply)
            decoded = self._decode(start, rank, reply.body, after, last)
            upto = decoded.upto
            if upto == after:
                break
            if page == 0 and upto < last:
                self._note(start, rank, last, caught_up=False, authenticated=self._token is not None, reachable=True)
            if not self._put(Read(start, rank, after, upto, decoded.inputs)):
                raise _Stopping
            self._positions.advance(start, rank, after, upto)
            if upto >= last:
                break
        return last

    def _page(self, start: Start, after: int, limit: int) -> Reply | None:
        """Ask for lines of a start; None where the exporter does not know it."""
        reply = self._get("/api/v1/steps", {"start_id": start.start_id, "after": str(after), "limit": str(limit)})
        if reply.status in (404, 410):
            return None
        if reply.status != 200:
            raise _Broken(f"/api/v1/steps answers {reply.status}")
        served = reply.headers.get("trainwarden-start", start.start_id)
        if served != start.start_id:
            raise _Broken(f"/api/v1/steps serves start {served[:64]!r} when asked for {start.start_id}")
        self._running = reply.headers.get("trainwarden-current-start") == start.start_id
        return reply

    def _decode(self, start: Start, rank: int, body: bytes, after: int, last: int) -> Page:
        page = decode_lines(start, rank, body, after, last)
        if page.malformed:
            self._counts.malformed(page.malformed)
            self._once(
                f"malformed {start.start_id}",
                "lines cannot be read and are skipped",
                example=page.example,
                run=start.run,
            )
        if page.missing:
            self._counts.missing(page.missing)
            self._log.warning(
                "lines are missing", run=start.run, start_id=start.start_id, after=after, missing=page.missing
            )
        return page

    def _get(self, path: str, params: dict[str, str] | None = None) -> Reply:
        if self._token is None and self.target.token_file is not None:
            try:
                self._token = read_secret(self.target.token_file)
                self._token_of = str(self.target.token_file.resolve())
            except ConfigError as error:
                self._once(f"token {error}", "no token: this source is observe-only", error=str(error))
        return exchange(
            self._session,
            "GET",
            f"http://{self.target.address}{path}",
            headers={"Authorization": f"Bearer {self._token}"} if self._token else None,
            params=params,
            connect_timeout=self._limits.connect_timeout,
            total_timeout=self._limits.response_timeout,
            limit=self._limits.response_bytes,
        )

    def _say_unseen(self) -> None:
        if self._seen is not None:
            start, rank, last = self._seen
            self._note(start, rank, last, caught_up=False, authenticated=False, reachable=False)

    def _note(
        self, start: Start, rank: int, last: int, *, caught_up: bool, authenticated: bool, reachable: bool
    ) -> None:
        at = self._positions.seq(start.start_id, rank)
        seen = SourceSeen(
            start=start,
            rank=rank,
            time=self._clock(),
            last_seq=last,
            caught_up=caught_up,
            authenticated=authenticated,
            may_act=self.target.act,
            reachable=reachable,
        )
        self._put(Read(start, rank, at, at, (seen,)))

    def _say(self, outcome: Outcome, says: str) -> None:
        """Log a change of the source's condition once, while it lasts."""
        condition: tuple[Outcome, str] = ("ok", "") if outcome == "behind" else (outcome, says)
        if condition == self._last_outcome:
            return
        recovered = self._last_outcome is not None and condition[0] == "ok"
        self._last_outcome = condition
        if outcome == "unreachable":
            self._log.warning("cannot see the run", reason=says)
        elif outcome == "unusable":
            self._log.warning("this is no exporter that can be read", reason=says)
        elif outcome == "denied":
            self._log.warning("the exporter refuses the token", token_file=str(self.target.token_file))
        elif outcome == "taken":
            self._log.warning(
                "another source serves this run already, with another token or the same rank; this one is not read"
            )
        elif recovered:
            self._log.info("the source answers again")

    def _once(self, key: str, says: str, **fields: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._log.warning(says, **fields)


def probe(target: Target, limits: Limits) -> tuple[bool, str, str]:
    """Ask an exporter once, for people: whether it can be read, its address, and what it says."""
    source = ExporterSource(target, limits, Positions(), lambda read: True, _NoCounts())
    what = f"source {target.address}"
    try:
        found = source.running()
    except (Unanswered, _Broken) as error:
        return False, what, str(error)
    finally:
        source.close()
    if isinstance(found, str):
        return found == "not_started", what, {"denied": f"refuses the token in {target.token_file}"}.get(found, found)
    start, rank = found
    return True, what, f"run {start.run}, attempt {start.attempt}, rank {rank}"


class _NoCounts:
    def malformed(self, lines: int) -> None:
        """Nobody reads the counts of a probe."""

    def missing(self, lines: int) -> None:
        """Nobody reads the counts of a probe."""


def _start_of(body: bytes) -> tuple[Start, int]:
    """Read ``/api/v1/run``: the latest start event."""
    try:
        line = decode_line(body)
    except RecordError as error:
        raise _Broken(f"/api/v1/run: {error}") from None
    if not isinstance(line, Event) or line.kind != "start":
        raise _Broken("/api/v1/run: no start event")
    fields = line.fields
    for name in ("run_uid", "run", "start_id"):
        if not isinstance(fields.get(name), str) or not _ID.fullmatch(fields[name]):
            raise _Broken(f"/api/v1/run: {name}: {str(fields.get(name))[:64]!r} is no name")
    for name in ("attempt", "rank"):
        value = fields.get(name, 0 if name == "rank" else None)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise _Broken(f"/api/v1/run: {name}: {str(value)[:64]!r} is no number of one")
    return Start(fields["run_uid"], fields["run"], fields["attempt"], fields["start_id"]), int(fields.get("rank", 0))


def _last_seq(reply: Reply) -> int:
    text = reply.headers.get("trainwarden-last-seq")
    if text is None or not text.isdigit() or len(text) > 15:
        raise _Broken(f"header Trainwarden-Last-Seq: {str(text)[:40]!r} is no whole number")
    return int(text)
