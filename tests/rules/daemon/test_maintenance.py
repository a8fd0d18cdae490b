"""The daemon tells its core of maintenance windows, through the journal of inputs, and takes back those of an older configuration."""

from __future__ import annotations

from collections.abc import Callable

from tests.real import wait_until
from tests.rules.daemon.toy import ToyExporter
from trainwarden.rules.core.inputs import Command
from trainwarden.rules.daemon.process import Daemon


def told(daemon: Daemon) -> list[tuple[dict[str, str], bool, str]]:
    commands = [value for value, _ in daemon._store.applied_inputs() if isinstance(value, Command)]
    assert all((one.name, one.author) == ("maintenance", "configuration") for one in commands)
    return [(one.matchers, one.until is not None, one.comment) for one in commands]


def test_a_window_that_is_open_is_told_once_and_taken_back_when_the_configuration_has_none(
    exporter: ToyExporter, start_daemon: Callable[..., Daemon]
) -> None:
    exporter.begin("s0", 0)
    exporter.step(1.0)
    window = '{begin: 2020-01-01T00:00, end: 2999-01-01T00:00, run: "toy*", note: storage}'
    later = "{begin: 2998-01-01T00:00, end: 2999-01-01T00:00}"
    daemon = start_daemon(f"maintenance: [{window}, {later}]")
    first = [({}, False, ""), ({"run": "toy*"}, True, "storage")]
    wait_until(lambda: told(daemon) == first)
    daemon.stop()
    daemon = start_daemon("")
    wait_until(lambda: told(daemon) == [*first, ({}, False, "")])
