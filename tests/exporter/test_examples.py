"""The examples run, and the toy's numbers are the ones that arithmetic gives."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.runs import events, lines
from trainwarden.record import Step

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def toy() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "toy_clip.py"))


@pytest.mark.parametrize(("max_norm", "after_6", "after_7"), [(None, "2.789", "2.259"), (1.0, "0.120", "0.097")])
def test_the_toys_gradient_is_29_5_either_way_and_its_loss_is_not(
    tmp_path: Path, toy: dict[str, Any], max_norm: float | None, after_6: str, after_7: str
) -> None:
    records = toy["train"]("toy", tmp_path, max_norm)
    assert [record.step for record in records] == list(range(1, 9))
    assert f"{records[5].value('grad_norm'):.1f}" == "29.5"
    assert records[5].value("grad_norm") == pytest.approx(50 * 0.9**5, rel=1e-6)
    assert f"{records[6].value('loss'):.3f}" == after_6
    assert f"{records[7].value('loss'):.3f}" == after_7
    assert [record.value("clipped_steps") for record in records] == [None if max_norm is None else 0.0] * 5 + [
        None if max_norm is None else 1.0
    ] + [None if max_norm is None else 0.0] * 2


def test_the_toy_prints_both_runs(toy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    toy["main"]()
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("   6"))
    assert row.split()[1:5] == ["29.52", "2.789", "29.52", "0.120"]


def test_the_minimal_script_leaves_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINWARDEN_DIR", str(tmp_path))
    runpy.run_path(str(EXAMPLES / "minimal.py"))["main"](25)
    records = [line for line in lines(tmp_path, "minimal") if isinstance(line, Step)]
    assert [record.step for record in records] == list(range(1, 26))
    assert all(record.value("batch_unique_token_ratio") and record.value("sample_position") for record in records)
    assert events(tmp_path, "start", "minimal")[0].fields["replayable"] is True
    assert "http://127.0.0.1:" in capsys.readouterr().out


def test_the_loop_with_accumulation_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "accumulation.py"))["main"]
    for name, parts in (("whole", (20,)), ("parts", (10, 10))):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TRAINWARDEN_DIR", str(folder))
        for steps in parts:
            main(steps)
    whole, parts_of_it = (
        [line for line in lines(tmp_path / name, "accumulation") if isinstance(line, Step)]
        for name in ("whole", "parts")
    )
    assert [record.step for record in parts_of_it] == list(range(1, 21))
    for one, other in zip(whole, parts_of_it, strict=True):
        assert (one.value("loss"), one.samples, one.value("skipped")) == (other.value("loss"), other.samples, 0.0)
        assert one.value("grad_norm") == other.value("grad_norm")
        assert one.value("loss_scale") == other.value("loss_scale")
    assert "steps 11 to 20" in capsys.readouterr().out
