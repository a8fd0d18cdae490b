"""Which ids of a vocabulary are digits and padding, read off tokenizers of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwarden.exporter import Exporter, token_classes
from trainwarden.exporter.vocabulary import TokenClasses


class Encoding:
    """Speaks as tiktoken's encodings do, with a hole in its numbers."""

    n_vocab = 6

    def decode_single_token_bytes(self, token: int) -> bytes:
        if token == 3:
            raise KeyError(token)
        return {0: b"a", 1: b" 12", 2: b"7", 4: b"\xff", 5: b"1a"}[token]


class Pieces:
    """Speaks as SentencePiece's processors do."""

    texts = ("<pad>", "▁1", "9", "▁", "▁1a")

    def get_piece_size(self) -> int:
        return len(self.texts)

    def id_to_piece(self, id: int) -> str:
        return self.texts[id]

    def pad_id(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("tokenizer", "padding", "found"),
    [
        ("bytes", None, {"digit": list(range(48, 58))}),
        ("bytes", 0, {"digit": list(range(48, 58)), "padding": [0]}),
        ("a1b2", None, {"digit": [1, 3]}),
        (["the", "Ġ12", "▁7", "##9", "1st", ""], None, {"digit": [1, 2, 3]}),
        ({"a": 0, "5": 7}, None, {"digit": [7]}),
        ({0: "a", 7: "5"}, None, {"digit": [7]}),
        (Encoding(), None, {"digit": [1, 2]}),
        (Pieces(), None, {"digit": [1, 2], "padding": [0]}),
    ],
)
def test_digits_and_padding_of_each_kind_of_vocabulary(tokenizer: Any, padding: int | None, found: Any) -> None:
    assert token_classes(tokenizer, padding) == found


def bpe(folder: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ["year 1999 and 2000", "1999 2000 12 words and more words"] * 20, vocab_size=300, min_frequency=2
    )
    return made


def test_a_tokenizer_of_transformers_and_the_one_within_it_say_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    inner = bpe(tmp_path)._tokenizer
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    found = token_classes(fast)
    assert found["padding"] == [fast.pad_token_id]
    assert {fast.decode([number]).strip() for number in found["digit"]} >= {"0", "9", "1999", "2000"}
    assert all(fast.decode([number]).strip().isdecimal() for number in found["digit"])
    others = set(range(len(fast))) - set(found["digit"])
    assert not any(fast.decode([number]).strip().isdecimal() for number in others)
    assert token_classes(inner)["digit"] == found["digit"]
    inner.enable_padding(pad_id=3)
    assert token_classes(inner)["padding"] == [3]


@pytest.mark.parametrize("ids", [[2, 5], np.array([5, 2]), torch.tensor([2, 5]), range(2, 6, 3), {2, 5}])
def test_ids_are_taken_in_any_form(ids: Any) -> None:
    table = TokenClasses({"digit": ids}).table()
    assert table.tolist() == [[0], [0], [0], [1], [0], [0], [1], [0]]


def test_one_truth_value_an_id_will_do_as_well() -> None:
    mask = torch.tensor([False, False, True])
    assert torch.equal(TokenClasses({"digit": mask}).table(), TokenClasses({"digit": 2}).table())
    assert TokenClasses({"padding": 1, "digit": []}).names == ("digit", "padding")


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"digits": [1]}, ValueError, "'digits' is none of digit, padding"),
        ({"digit": 0.5}, TypeError, "ids are whole numbers"),
        ({"digit": ["7"]}, TypeError, "ids are whole numbers"),
        ({"padding": -100}, ValueError, "not within 0"),
        ({"padding": 2**40}, ValueError, "not within 0"),
        (object(), TypeError, "object is no tokenizer that is known"),
    ],
)
def test_what_is_no_mapping_of_classes_is_refused_when_the_exporter_is_made(
    tmp_path: Path, given: Any, error: type[Exception], says: str
) -> None:
    model = nn.Embedding(4, 2)
    with pytest.raises(error, match=says):
        Exporter(model, torch.optim.SGD(model.parameters(), lr=0.1), dir=tmp_path, port=0, token_classes=given)
