"""Maintenance windows of the configuration: when one is open, by a cron expression or from one time to another, in a time zone.

The core reads no clock: the daemon looks here with every tick and tells it of each window that opens, as a command that is journalled
like every other input.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from trainwarden.rules.core.inputs import Command
from trainwarden.rules.fields import Seconds

#: Who opens a window, in the journal of inputs.
AUTHOR = "configuration"
#: A time on which every expression is tried that some year has.
_TRIED_FROM = datetime(2024, 1, 1, tzinfo=UTC)


class Maintenance(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which nothing is done to runs: ``cron`` (minute, hour, day, month, weekday) and how long it ``lasts``, or ``begin`` and
    ``end`` (ISO 8601).

    ``time_zone`` is a name of the IANA database; times that say their own offset keep it. ``run`` is a display name or a pattern with
    * and ?, ``note`` is what people are told.
    """

    cron: str | None = None
    lasts: Seconds | None = None
    begin: str | None = None
    end: str | None = None
    time_zone: str = "UTC"
    run: str = "*"
    note: str = ""

    def __post_init__(self) -> None:
        zone_of(self.time_zone)
        if self.cron is not None and self.begin is None and self.end is None:
            if self.lasts is None:
                raise ValueError("lasts: say how long the window is open, for example 2h")
            if _trigger(self.cron, self.time_zone).get_next_fire_time(None, _TRIED_FROM) is None:
                raise ValueError(f"cron: {self.cron!r} never begins")
        elif self.begin is not None and self.end is not None and self.cron is None and self.lasts is None:
            if _moment("begin", self.begin, self.time_zone) >= _moment("end", self.end, self.time_zone):
                raise ValueError(f"end: {self.end} is not behind begin, {self.begin}")
        else:
            raise ValueError("give either cron and lasts, or begin and end")

    def until(self, now: float) -> float | None:
        """Return the end of the window that is open at ``now``, None where none is. Unix seconds, in and out.

        Where a window begins anew before it has ended, the end is that of the older one; the next is open by then.
        """
        if self.cron is None:
            assert self.begin is not None
            assert self.end is not None
            end = _moment("end", self.end, self.time_zone).timestamp()
            return end if _moment("begin", self.begin, self.time_zone).timestamp() <= now < end else None
        assert self.lasts is not None
        after = datetime.fromtimestamp(now, UTC) - timedelta(seconds=self.lasts) + timedelta(microseconds=1)
        began = _trigger(self.cron, self.time_zone).get_next_fire_time(None, after)
        if began is None or began.timestamp() > now:
            return None
        return float(began.timestamp()) + self.lasts


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone.

    Raises:
        ValueError: there is none of this name.
    """
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"time_zone: {name!r} is no time zone; write for example Europe/Berlin") from None


def _moment(field: str, text: str, zone: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{field}: {text!r} is no time; write for example 2026-12-24T18:00") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=zone_of(zone))


def _trigger(cron: str, zone: str) -> Any:
    from apscheduler.triggers.cron import CronTrigger  # only who has such a window pays for the import

    fields = cron.split()
    if len(fields) == 5 and any(one.isdigit() for one in fields[4]):
        raise ValueError("cron: write weekdays by name (mon to sun): programs do not agree on their numbers")
    try:
        return CronTrigger.from_crontab(cron, timezone=zone_of(zone))
    except ValueError as error:
        raise ValueError(f"cron: {cron!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None


class Windows:
    """Which windows were told to the core. The first look takes back what an earlier configuration may have opened."""

    def __init__(self, windows: Sequence[Maintenance]) -> None:
        self._windows = tuple(windows)
        self._told: dict[int, float] = {}
        self._cleared = False

    def due(self, now: float) -> list[Command]:
        """Return what the core must be told now: that no window is open, at first, and each that has opened since."""
        found = []
        if not self._cleared:
            found.append(Command(name="maintenance", author=AUTHOR, time=now))
        for place, window in enumerate(self._windows):
            until = window.until(now)
            if until is not None and self._told.get(place) != until:
                found.append(
                    Command(
                        name="maintenance",
                        author=AUTHOR,
                        time=now,
                        comment=window.note,
                        matchers={"run": window.run},
                        until=until,
                    )
                )
        return found

    def told(self, command: Command) -> None:
        """Take note that the core has, or will have, this command of :meth:`due`."""
        if command.until is None:
            self._cleared = True
        for place, window in enumerate(self._windows):
            if command.matchers.get("run") == window.run and command.until == window.until(command.time):
                self._told[place] = command.until if command.until is not None else 0.0
