"""CSV: what a cell means, what is torn, and that one format is told from another."""

from __future__ import annotations

import math

import pytest

from trainwarden.rules.replay.readers import csv, recognise
from trainwarden.rules.replay.rows import Notices


def rows(data: bytes) -> tuple[list[dict[str, float]], list[dict[str, object]]]:
    notices = Notices()
    reader = csv.reader(notices)
    found = [row.values for row in reader.read(data.splitlines(keepends=True))]
    reader.end()
    return found, notices.rows()


def test_blank_cells_are_not_logged_and_nan_is() -> None:
    found, notices = rows(b"step,loss,grad_norm\n1,2.5,0.5\n2,nan,\n3,,-Infinity\n4,None,+inf\n")
    assert found[0] == {"step": 1, "loss": 2.5, "grad_norm": 0.5}
    assert found[1].keys() == {"step", "loss"}
    assert math.isnan(found[1]["loss"])
    assert found[2:] == [{"step": 3, "grad_norm": -math.inf}, {"step": 4, "grad_norm": math.inf}]
    assert [(row["kind"], row["signal"]) for row in notices] == [("blank", "grad_norm"), ("blank", "loss")]
    assert notices[1]["says"] == "loss is blank in 2 rows, first in line 4: not logged there."


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbfstep,loss\r\n1,2\r\n", b"step;loss\n1;2\n", b'"step"\t"loss"\n"1"\t"2"\n']
)
def test_a_byte_order_mark_line_ends_separators_and_quotes_make_no_difference(data: bytes) -> None:
    assert rows(data) == ([{"step": 1, "loss": 2}], [])
    assert recognise(data, "x.csv") == "csv"


def test_torn_lines_are_left_out_and_said_once() -> None:
    found, notices = rows(b"step,loss\n1,2\n2\n3,42,4\n5,2\n6,12")
    assert found == [{"step": 1, "loss": 2}, {"step": 5, "loss": 2}, {"step": 6}]
    (notice,) = notices
    assert notice["kind"] == "torn"
    assert notice["says"] == "Line 3 has 1 cells, the header 2: it was left out. And 2 more like it."


def test_a_header_that_a_restarted_writer_wrote_again_is_no_row() -> None:
    assert rows(b"step,loss\n1,2\nstep,loss\n1,2\n")[0] == [{"step": 1, "loss": 2}] * 2


def test_decimal_commas_are_said_and_not_guessed() -> None:
    found, notices = rows(b"step;loss\n1;2,5\n")
    assert found == [{"step": 1}]
    assert "a point as the decimal mark" in str(notices[0]["says"])


def test_words_among_numbers_are_said_and_a_column_of_words_is_not() -> None:
    found, notices = rows(b"step,loss,host\n1,2,a\n2,oops,b\n")
    assert found == [{"step": 1, "loss": 2}, {"step": 2}]
    assert [(row["kind"], row["signal"], row["says"]) for row in notices] == [
        ("unreadable", "loss", "Line 3: loss: 'oops' is no number and was left out.")
    ]


def test_of_two_columns_of_one_name_the_first_is_read() -> None:
    found, notices = rows(b"step,loss,loss\n1,2,3\n")
    assert found == [{"step": 1, "loss": 2}]
    assert notices[0]["kind"] == "duplicate_column"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"step,loss\n1,2\n", "x"),
        (b"step,loss\n", "x.csv"),
        (b"a,b\n1,2\n", "x"),
        (b"loss\n2.5\n2.4\n", "x"),
        (b"step,loss\n1,\n2,3\n4", "x"),
    ],
)
def test_is_recognised(data: bytes, name: str) -> None:
    assert recognise(data, name) == "csv"


@pytest.mark.parametrize(
    "data", [b"", b"hello\n", b"1,2\n3,4\n", b"{}\n", b"\x00\x01\x02", b"Dear all,\nhere, is\nno, log\n"]
)
def test_is_not_recognised(data: bytes) -> None:
    assert recognise(data, "x.txt") is None
