"""TensorBoard event files, made by torch's own writer where it is there and by hand for what that never writes."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.replay.logs import placed_of, read_rows, rows_of
from trainwarden.record import Step
from trainwarden.rules.replay.crc32c import crc32c, masked


def field(number: int, kind: int, data: bytes) -> bytes:
    return bytes([number << 3 | kind]) + (varint(len(data)) if kind == 2 else b"") + data


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def event(step: int, *values: bytes, time: float = 1.7e9) -> bytes:
    summary = b"".join(field(1, 2, value) for value in values)
    body = field(1, 1, struct.pack("<d", time)) + field(2, 0, varint(step)) + field(5, 2, summary)
    return record(body)


def record(body: bytes) -> bytes:
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", masked(length)) + body + struct.pack("<I", masked(body))


def simple(tag: str, value: float) -> bytes:
    return field(1, 2, tag.encode()) + field(2, 5, struct.pack("<f", value))


def tensor(tag: str, content: bytes) -> bytes:
    return field(1, 2, tag.encode()) + field(8, 2, content)


VERSION = record(field(1, 1, struct.pack("<d", 1.7e9)) + field(3, 2, b"brain.Event:2"))
FILE = VERSION + b"".join(event(n, simple("train/loss", 2.5)) + event(n, simple("train/lr", 0.5)) for n in range(1, 21))


def test_the_checksum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_scalars_of_both_generations_are_read() -> None:
    new = tensor("loss", field(1, 0, b"\x01") + field(4, 2, struct.pack("<f", 1.5)))
    packed = tensor("norm", field(1, 0, b"\x01") + field(5, 2, struct.pack("<f", 0.25)))
    double = tensor("lr", field(1, 0, b"\x02") + field(4, 2, struct.pack("<d", 1e-4)))
    vector = tensor("histogram", field(1, 0, b"\x01") + field(5, 2, struct.pack("<2f", 1, 2)))
    text = tensor("note", field(1, 0, b"\x07") + field(8, 2, b"hello"))
    rows, notices = rows_of("tensorboard", VERSION + event(300, new, packed, double, vector, text, simple("step", 4)))
    assert notices == []
    assert rows == [{"loss": 1.5, "norm": 0.25, "lr": 1e-4, "tag/step": 4, "time": 1.7e9, "step": 300}]


def test_what_megatron_writes_against_samples_is_left_out() -> None:
    rows, _ = rows_of(
        "tensorboard", VERSION + event(1, simple("lm loss", 2)) + event(4096, simple("lm loss vs samples", 2))
    )
    assert [row["step"] for row in rows] == [1]


def test_a_damaged_record_is_left_out_and_behind_a_damaged_length_nothing_is_read() -> None:
    rows, _ = rows_of("tensorboard", FILE)
    assert len(rows) == 40
    hurt = bytearray(FILE)
    hurt[len(VERSION) + 14] ^= 1
    rows, notices = rows_of("tensorboard", bytes(hurt))
    assert (len(rows), [row["kind"] for row in notices]) == (39, ["damaged"])
    hurt[len(VERSION) + 1] ^= 1
    rows, notices = rows_of("tensorboard", bytes(hurt))
    assert (rows, [row["kind"] for row in notices]) == ([], ["damaged"])


@given(st.integers(0, len(FILE)), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_torn_at_any_byte_it_gives_the_events_before(cut: int, piece: int) -> None:
    whole, _ = read_rows("tensorboard", FILE)
    rows, _ = read_rows("tensorboard", FILE[:cut])
    assert rows == whole[: len(rows)]
    assert len(rows) >= (cut - len(VERSION)) * 40 // (len(FILE) - len(VERSION)) - 1


def test_a_folder_of_event_files_is_one_log_with_a_start_for_each_step_back(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1700000000.host.1.0").write_bytes(FILE)
    (tmp_path / "events.out.tfevents.1700000100.host.2.0").write_bytes(
        VERSION + b"".join(event(n, simple("train/loss", 2.4), time=1.7e9 + 100) for n in range(11, 31))
    )
    lines, _ = placed_of(tmp_path)
    assert [(start.attempt, line.step) for start, _, line in lines if isinstance(line, Step)] == [
        *((0, n) for n in range(1, 21)),
        *((1, n) for n in range(11, 31)),
    ]
    assert lines[0][0].run == tmp_path.name


# Written by tensorboard 2's EventFileWriter: train/loss as a simple value, grad_norm as the scalar plugin's tensor.
WRITTEN = zlib.decompress(
    base64.b64decode(
        "eNrzYICAf5M85nI2/j9UInb4lqMUb1JRYmaenmtZal6JlVGQHpdOSWpecX5RUn5iUYpecWlubmJRpV55UWZJapFeKkhVfFpmTmo8RGTZjfpTCl"
        "BzNd+uDOBkYHBw+BNy01GAUUuYS5CLqwRkun5OfnGxKNd1ewfphzOeG0PV8yxXCENWr8alwsWZXpSYEp+XX5TrxMXBKMSgxcLAcMDei5uLk4u9"
        "ODkxJ7GoWMxkvSWalQ0QI5gwrBRZZ++w5Lp2NJqVcPVEWvltxYIjilAjGKvffAMawdANNmINpp0MDAIOHKnJu02gGuKMxWNQNBBpqdX1eC40Sx"
        "0gZqzFZumBevV12r8A01eG4A=="
    )
)


def test_a_file_of_tensorboards_own_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    path.write_bytes(WRITTEN)
    lines, notices = placed_of(path)
    records = [line for _, _, line in lines if isinstance(line, Step)]
    assert [(line.step, line.time, line.value("grad_norm")) for line in records] == [
        (1, 1.7e9 + 1, 1.5),
        (2, 1.7e9 + 2, 1.5),
        (300, 1.7e9 + 300, 1.5),
        (301, 1.7e9 + 301, None),
    ]
    assert [line.value("loss") for line in records[:3]] == pytest.approx([2.9975, 2.995, 2.25])
    assert str(records[3].value("loss")) == "nan"
    assert [row["kind"] for row in notices] == ["gap"]
