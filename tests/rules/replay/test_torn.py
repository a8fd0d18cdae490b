"""Torn at any byte, or with any byte changed, every format gives only what was written, and never raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.replay.logs import read_rows
from tests.rules.replay.readers import (
    test_deepspeed,
    test_huggingface,
    test_lightning,
    test_llmc,
    test_megatron,
    test_nanogpt,
    test_tensorboard,
    test_text,
    test_torchtitan,
    test_wandb,
)
from trainwarden.rules.replay.attempts import Attempts
from trainwarden.rules.replay.columns import Columns
from trainwarden.rules.replay.readers import FORMATS, make_reader, recognise
from trainwarden.rules.replay.rows import Notices

SAMPLES = {
    "csv": b"step,loss,lr\n1,2.5,1e-05\n2,,1e-06\n3,nan,1e-07\n",
    "jsonl": b'{"step": 1, "train": {"loss": 2.25}}\n{"step": 2, "train": {"loss": NaN}}\n{"step": 13, "loss": 2}\n',
    "huggingface": json.dumps(test_huggingface.STATE, indent=2).encode(),
    "lightning": test_lightning.METRICS.encode(),
    "tensorboard": test_tensorboard.WRITTEN,
    "wandb": test_wandb.CHART,
    "megatron": test_megatron.LOG,
    "deepspeed": test_deepspeed.LOG,
    "llmc": test_llmc.PRINTED + test_llmc.LOGGED,
    "nanogpt": test_nanogpt.LOG,
    "torchtitan": test_torchtitan.COLOURED,
    "text": test_text.LOG,
}


def test_every_format_is_tried() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("format", SAMPLES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_torn_anywhere_it_gives_what_was_written_before(format: str, data: st.DataObject) -> None:
    whole, _ = read_rows(format, SAMPLES[format])
    cut = data.draw(st.integers(0, len(SAMPLES[format])))
    torn, _ = read_rows(format, SAMPLES[format][:cut])
    assert len(torn) <= len(whole)
    for row, expected in zip(torn, whole, strict=False):
        # The last row may lack values, and has no others.
        assert all(repr(expected[name]) == repr(value) for name, value in row.items())
    assert [repr(row) for row in torn[:-1]] == [repr(row) for row in whole[: max(0, len(torn) - 1)]]


@pytest.mark.parametrize("format", SAMPLES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_with_anything_in_between_it_raises_nothing(format: str, data: st.DataObject) -> None:
    sample = SAMPLES[format]
    at = data.draw(st.integers(0, len(sample)))
    length = data.draw(st.integers(0, 8))
    hurt = sample[:at] + data.draw(st.binary(max_size=24)) + sample[at + length :]
    recognise(hurt, "x.csv")
    notices = Notices()
    attempts = Attempts("u", "r", Columns({}, notices), notices)
    reader = make_reader(format, notices)
    for _ in attempts.feed(reader.read(hurt.splitlines(keepends=True))):
        pass
    reader.end()
    list(attempts.end())
    notices.rows()
