"""Lines to inputs: each once, in order; what is missing or cannot be read is counted and passed over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwarden.record import Event, Step, encode_line
from trainwarden.rules.core.inputs import Happened, Start, Steps
from trainwarden.rules.sources.lines import Page, decode_lines

START = Start("u", "r", 0, "s")


def line(seq: int, kind: str = "step") -> bytes:
    if kind == "step":
        return encode_line(Step(seq=seq, step=seq, time=1.0)) + b"\n"
    return encode_line(Event(kind=kind, time=1.0, seq=seq)) + b"\n"


def seqs(page: Page) -> list[int]:
    found: list[int] = []
    for value in page.inputs:
        if isinstance(value, Steps):
            found += [record.seq for record in value.records]
        elif isinstance(value, Happened):
            found.append(value.event.seq)
    return found


def test_steps_are_grouped_between_events() -> None:
    page = decode_lines(START, 0, line(1, "start") + line(2) + line(3) + line(4, "exit") + line(5), 0)
    assert [type(value).__name__ for value in page.inputs] == ["Happened", "Steps", "Happened", "Steps"]
    assert seqs(page) == [1, 2, 3, 4, 5]


def test_a_torn_end_is_left_for_the_next_time() -> None:
    page = decode_lines(START, 0, line(1) + line(2)[:-5], 0)
    assert (page.upto, page.malformed) == (1, 0)


def test_lines_that_cannot_be_read_are_passed_over_but_not_beyond_what_there_is() -> None:
    assert decode_lines(START, 0, b"x\n" * 50, 0, last=3).upto == 3
    page = decode_lines(START, 0, line(1) + b"x\n" + line(3), 0, last=3)
    assert (page.upto, page.malformed, page.missing) == (3, 1, 0)


def test_what_the_peer_no_longer_has_is_counted() -> None:
    assert decode_lines(START, 0, line(8) + line(11), 4, last=11).missing == 5


@given(
    st.lists(
        st.one_of(st.integers(1, 30).map(line), st.sampled_from([b"{}\n", b"\xff\n", b"\n", b"[1]\n"])), max_size=40
    ),
    st.integers(0, 30),
)
def test_whatever_comes_the_numbers_only_grow(lines: list[bytes], after: int) -> None:
    page = decode_lines(START, 0, b"".join(lines), after, last=30)
    found = seqs(page)
    assert found == sorted(set(found))
    assert all(seq > after for seq in found)
    assert page.upto >= max([after, *found])
    assert page.upto <= max(30, after)
