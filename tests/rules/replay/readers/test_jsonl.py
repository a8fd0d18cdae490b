"""JSON lines: nested objects, words for non-finite numbers, torn lines."""

from __future__ import annotations

import math

from tests.rules.replay.logs import rows_of


def test_nested_objects_become_names_with_slashes_and_texts_are_left_out() -> None:
    rows, notices = rows_of(
        "jsonl",
        b'{"step": 1, "train": {"loss": 2.5, "norms": {"all": 1}}, "host": "a", "tags": [1], "skipped": false}\n\n',
    )
    assert rows == [{"step": 1, "train/loss": 2.5, "train/norms/all": 1, "skipped": 0}]
    assert notices == []


def test_all_ways_to_write_a_non_finite_number_are_read_and_null_is_not_logged() -> None:
    rows, _ = rows_of(
        "jsonl",
        b'{"step":1,"loss":NaN}\n{"step":2,"loss":"NaN"}\n{"step":3,"loss":-Infinity}\n{"step":4,"loss":"+Inf"}\n{"step":5,"loss":null}\n',
    )
    assert math.isnan(rows[0]["loss"])
    assert math.isnan(rows[1]["loss"])
    assert (rows[2]["loss"], rows[3]["loss"]) == (-math.inf, math.inf)
    assert rows[4] == {"step": 5}


def test_a_byte_order_mark_line_ends_and_a_whole_last_line_without_its_end_make_no_difference() -> None:
    rows, notices = rows_of("jsonl", b'\xef\xbb\xbf{"step":1,"loss":2}\r\n{"step":2,"loss":2}')
    assert [row["step"] for row in rows] == [1, 2]
    assert notices == []


def test_torn_lines_are_left_out_and_said() -> None:
    rows, notices = rows_of("jsonl", b'{"step":1,"loss":2}\n{"step":2,"lo\n{"step":3,"loss":2}\n{"step":4,"loss":2')
    assert [row["step"] for row in rows] == [1, 3]
    assert [row["says"] for row in notices] == ["Line 2 is no JSON object: it was left out. And 1 more like it."]
