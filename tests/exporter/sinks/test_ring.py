"""ring: a fixed number of lines, found by sequence number."""

from __future__ import annotations

from trainwarden.exporter.sinks.ring import Ring


def filled(count: int, capacity: int = 10) -> Ring:
    ring = Ring(capacity)
    for seq in range(1, count + 1):
        ring.append(seq, str(seq).encode())
    return ring


def test_lines_after_a_number_are_given_in_order_up_to_the_limit() -> None:
    ring = filled(8)
    assert ring.after(3, 2) == [(4, b"4"), (5, b"5")]
    assert ring.after(0, 100) == [(seq, str(seq).encode()) for seq in range(1, 9)]
    assert (ring.first, ring.last) == (1, 8)


def test_beyond_the_newest_line_there_is_nothing() -> None:
    assert filled(8).after(8, 5) == []
    assert filled(8).after(99, 5) == []
    assert Ring().after(0, 5) == []


def test_what_is_no_longer_kept_is_said_to_be_so_and_not_passed_over() -> None:
    ring = filled(25)
    assert (ring.first, ring.last) == (16, 25)
    assert ring.after(14, 5) is None
    assert ring.after(15, 2) == [(16, b"16"), (17, b"17")]
