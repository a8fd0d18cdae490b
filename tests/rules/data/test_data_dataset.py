"""Single rows of data sets of every kind, their text and where they lie, against writing them down in Python."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwarden.rules.data import dataset as readers
from trainwarden.rules.data.dataset import DataSet, open_dataset
from trainwarden.rules.data.records import DataError
from trainwarden.rules.data.tokenizer import of_bytes, open_tokenizer


def opened(named: str | Path, **arguments: Any) -> DataSet:
    return open_dataset(str(named), **{"context": None, "dtype": "uint16", "decode": None} | arguments)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_tokens_of_a_bin_file_are_rows_of_the_given_context(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(0, 100, dtype=dtype)
    tokens.tofile(tmp_path / "a.bin")
    (tokens + 1).astype(dtype)[:25].tofile(tmp_path / "b.bin")
    found = opened(tmp_path, context=10, dtype=dtype)
    assert len(found) == 12
    third = found.read(3)
    assert third.tokens == list(range(30, 40))
    assert (third.file, third.byte) == (str(tmp_path / "a.bin"), 30 * tokens.itemsize)
    assert found.read(11).tokens == list(range(11, 21))
    assert found.read(11).file == str(tmp_path / "b.bin")


def test_arrays_on_disk_have_their_own_rows(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.int64).reshape(4, 3)
    np.save(tmp_path / "rows.npy", rows)
    found = opened(tmp_path / "rows.npy")
    sample = found.read(2)
    assert (len(found), sample.tokens) == (4, [6, 7, 8])
    assert sample.byte is not None
    assert (tmp_path / "rows.npy").read_bytes()[sample.byte : sample.byte + 8] == struct.pack("<q", 6)
    np.save(tmp_path / "flat.npy", rows.reshape(-1))
    assert opened(tmp_path / "flat.npy", context=4).read(1).tokens == [4, 5, 6, 7]
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds float64 of shape"):
        opened(tmp_path / "floats.npy", context=1)


def test_a_megatron_data_set_is_read_by_its_index(tmp_path: Path) -> None:
    documents = [np.array(one, dtype=np.uint16) for one in ([1, 2, 3], [4], [5, 6])]
    np.concatenate(documents).tofile(tmp_path / "text.bin")
    lengths = np.array([len(one) for one in documents], dtype=np.int32)
    offsets = np.array([0, 6, 8], dtype=np.int64)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    (tmp_path / "text.idx").write_bytes(
        index + lengths.tobytes() + offsets.tobytes() + np.arange(4, dtype=np.int64).tobytes()
    )
    found = opened(tmp_path / "text.bin")
    assert [found.read(row).tokens for row in range(len(found))] == [[1, 2, 3], [4], [5, 6]]
    assert found.read(2).byte == 8
    (tmp_path / "text.idx").write_bytes(b"something else")
    with pytest.raises(DataError, match="is no index of a Megatron data set"):
        opened(tmp_path / "text.bin")


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_lines_are_found_wherever_pieces_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, ending: str
) -> None:
    monkeypatch.setattr(readers, "_PIECE", piece)
    texts = [["one", "", "three and more", "ü€"], ["five"], ["", "seven"]]
    for name, lines in zip("abc", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + ending)
    (tmp_path / "d.txt").write_text("")
    found = opened(tmp_path)
    wanted = [
        (text, name, number) for name, lines in zip("abc", texts, strict=True) for number, text in enumerate(lines, 1)
    ]
    assert len(found) == len(wanted)
    for row, (text, name, number) in enumerate(wanted):
        sample = found.read(row)
        assert (sample.text, Path(str(sample.file)).stem, sample.line) == (text, name, number)
        data = Path(str(sample.file)).read_bytes()
        assert data[sample.byte :].startswith(text.encode())


def test_lines_of_json_show_their_text_or_their_tokens(tmp_path: Path) -> None:
    lines = [
        {"text": "hello", "id": 1},
        {"meta": {}, "content": "there"},
        {"input_ids": [72, 105]},
        {"other": 1},
        "bare",
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{torn")
    found = opened(tmp_path / "a.jsonl", decode=of_bytes)
    assert [found.read(row).text for row in range(len(found))] == [
        "hello",
        "there",
        "Hi",
        '{"other": 1}',
        "bare",
        "{torn",
    ]
    assert opened(tmp_path / "a.jsonl").read(2).tokens == [72, 105]


MODULE = """
import numpy as np
import torch

class Rows(list):
    shards = [("a", 0, 2), ("b", 2, 4)]

def tensors(): return [torch.tensor([72, 105]), (torch.tensor([33]), torch.tensor([1]))]
def several(): return Rows([{"text": "t"}, {"x": np.array([65])}, b"raw", [66, 67]])
def of(folder): return [folder]
def broken(): raise RuntimeError("no data here")
def bare(): return iter(())
class Odd:
    def __len__(self): return 2
    def __getitem__(self, row):
        if row: raise KeyError(row)
        return torch.rand(3)
def odd(): return Odd()
value = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"data_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    return name


def test_a_function_of_ones_own_gives_the_data_set(module: str) -> None:
    tensors = opened(f"{module}:tensors", decode=of_bytes)
    assert [tensors.read(row).text for row in range(2)] == ["Hi", "!"]
    assert opened(f"{module}:tensors").read(0).tokens == [72, 105]
    several = opened(f"{module}:several", decode=of_bytes)
    assert [several.read(row).text for row in range(4)] == ["t", "A", "raw", "BC"]
    assert several.shards == [("a", 0, 2), ("b", 2, 4)]
    assert opened(f"{module}:of:some/folder:x").read(0).text == "some/folder:x"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("broken", "RuntimeError: no data here"),
        ("bare", "has no length"),
        ("value", "is no function"),
        ("missing", "cannot be imported: AttributeError"),
    ],
)
def test_a_function_that_gives_none_is_told_with_its_own_words(module: str, named: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        opened(f"{module}:{named}")


def test_a_row_that_cannot_be_read_says_what_it_is(module: str) -> None:
    found = opened(f"{module}:odd")
    with pytest.raises(DataError, match="row 0 is Tensor, in which no text and no token ids are found"):
        found.read(0)
    with pytest.raises(DataError, match="row 1: KeyError: 1"):
        found.read(1)


def test_what_is_no_data_set_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.bin: is empty"):
        opened(tmp_path, context=2)
    (tmp_path / "a.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match="say with --context"):
        opened(tmp_path)
    with pytest.raises(DataError, match="row 1 is not in this data set, which has 1"):
        opened(tmp_path, context=2).read(1)
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match=r"holds files of kind \.bin and \.txt"):
        opened(tmp_path)
    with pytest.raises(DataError, match="no such file or folder, and no module:function"):
        opened(tmp_path / "nothing")
    (tmp_path / "c.zip").write_text("x")
    with pytest.raises(DataError, match="name a file or folder of one of"):
        opened(tmp_path / "c.zip")


def test_ids_that_a_tokenizer_does_not_have_harm_nothing(tmp_path: Path) -> None:
    assert of_bytes([72, 105, -1, 300, 0xCB]) == "Hi\ufffd\ufffd\udccb"
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["some words and some more"], vocab_size=270, min_frequency=1)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made._tokenizer).save_pretrained(str(tmp_path / "tok"))
    decode = open_tokenizer(str(tmp_path / "tok"))
    ids = made.encode("some words").ids
    assert decode(ids) == "some words"
    assert decode([*ids, 10**12, -5, *ids]) == "some words\ufffd\ufffdsome words"
    with pytest.raises(DataError, match="cannot be loaded"):
        open_tokenizer(str(tmp_path / "nothing"))
