"""What the exporter says about itself is said once, counted always, and written where nobody trains."""

from __future__ import annotations

import logging
import threading

import pytest

from trainwarden.exporter.notices import Notices


def test_a_thing_is_said_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    threads = [
        threading.Thread(target=lambda: [notices.say("key", f"sentence {number}") for number in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notices.say("other", "another")
    assert notices.said == ["sentence 0", "another"]
    assert (notices.count("key"), notices.count("other"), notices.count("none")) == (2000, 1, 0)
    assert [record.getMessage() for record in caplog.records] == ["trainwarden: sentence 0", "trainwarden: another"]


def test_what_is_said_while_a_drain_thread_works_is_written_by_it(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    notices.deferred = True
    with caplog.at_level(logging.DEBUG, "trainwarden.exporter"):
        notices.fault("here", ValueError("wrong"))
        assert notices.said
        assert not caplog.records
        notices.write()
        notices.write()
    says, where = caplog.records
    assert says.getMessage().startswith("trainwarden: here: ValueError: wrong")
    assert where.exc_info is not None
    assert where.exc_info[0] is ValueError
