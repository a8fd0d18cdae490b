"""metrics.csv of Lightning's CSVLogger."""

from __future__ import annotations

from pathlib import Path

from tests.rules.replay.logs import events_of, placed_of, records_of

METRICS = """epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss
,0.0003,0,,,
0,,49,,2.5,
,0.0003,50,,,
0,,99,,2.4,
0,,124,,,2.6
0,,124,2.45,,
,0.0003,100,,,
1,,149,,2.3,
1,,199,,2.2,
"""


def test_rows_of_a_step_are_one_record_and_blank_cells_go_without_saying(tmp_path: Path) -> None:
    folder = tmp_path / "version_0"
    folder.mkdir()
    path = folder / "metrics.csv"
    path.write_text(METRICS)
    lines, notices = placed_of(path)
    records = records_of(path)
    losses = {record.step: record.value("loss") for record in records if record.value("loss") is not None}
    assert losses == {49: 2.5, 99: 2.4, 149: 2.3, 199: 2.2}
    assert [record.stride for record in records if record.step in losses] == [50] * 4
    assert next(record for record in records if record.step == 0).value("lr") == 0.0003
    assert len({start.start_id for start, _, _ in lines}) == 1
    assert [row["kind"] for row in notices] == [
        "unordered"
    ]  # the learning rate of step 100 after the validation at 124
    assert [event.step for event in events_of(path) if event.kind == "evaluation"] == [124]
    assert lines[0][0].run == "version_0"
