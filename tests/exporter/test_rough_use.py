"""What a trainer may do to an exporter without meaning to: odd arguments, steps that break off, optimizers that are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import by_group, events, lines, loss_of, make, norm64, steps, train, watch
from trainwarden.exporter import Exporter
from trainwarden.record import Step

ODD_LOSSES = [
    "3.5 or so",
    10**400,
    [1.0],
    object(),
    torch.tensor([]),
    torch.tensor(1 + 2j),
    torch.tensor([1.0, 0.0]).to_sparse(),
]


def begun(folder: Path, **settings: Any) -> tuple[Any, torch.optim.Optimizer, Exporter]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, watch(model, optimizer, folder, cadence=1, **settings)


def recorded(exporter: Exporter, folder: Path) -> list[Step]:
    exporter.close()
    return [line for line in lines(folder) if isinstance(line, Step)]


@pytest.mark.parametrize("odd", ODD_LOSSES, ids=lambda odd: str(odd)[:12])
def test_a_loss_that_cannot_be_read_costs_its_own_step_alone(tmp_path: Path, odd: Any) -> None:
    model, optimizer, exporter = begun(tmp_path)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        exporter.step(odd if step == 2 else loss)
    found = recorded(exporter, tmp_path)
    assert len(exporter.notices) == 1, exporter.notices
    assert ["loss" in record.signals for record in found] == [True, False, True]
    assert all("grad_norm" in record.signals for record in found)


class Spoiled(dict[str, Any]):
    """A batch whose parts are read from a file that is gone."""

    def get(self, *_: Any) -> Any:
        raise OSError("the file of this batch is gone")

    def values(self) -> Any:
        return self.get()


def test_a_batch_that_raises_when_it_is_looked_at_costs_its_own_step_alone(tmp_path: Path) -> None:
    model, optimizer, exporter = begun(tmp_path)
    ids = torch.randint(0, 31, (4, 12), generator=torch.Generator().manual_seed(1))
    good = {"input_ids": ids, "source": "web"}
    drawn = iter(exporter.wrap([good, good, Spoiled(good), good, Spoiled(good), good]))

    def draw(step: int) -> None:
        if step == 2:  # of two micro-batches the first can be read
            next(drawn)
        next(drawn)

    train(model, optimizer, exporter, 5, each=draw)
    found = recorded(exporter, tmp_path)
    said = [notice for notice in exporter.notices if "probe" in notice]
    assert len(said) == 2, exporter.notices  # by what reads tokens and what reads sources, once each
    assert all("the file of this batch is gone" in notice and "its step goes without" in notice for notice in said)
    for name in ("batch_hash", "batch_unique_token_ratio", "source_share"):
        assert [name in record.signals for record in found] == [True, False, True, False, True], name
    assert [record.value("tokens") for record in found] == [48, None, 96, None, 144]
    assert all("grad_norm" in record.signals and "loss" in record.signals for record in found)
    assert [record.value("samples_seen") for record in found] == [4, 9, 13, 14, 18]  # one that cannot be counted is one


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_token_ids_of_the_types_that_token_files_have_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer, exporter = begun(tmp_path)
    ids = torch.randint(0, 31, (4, 12), generator=torch.Generator().manual_seed(1))
    train(model, optimizer, exporter, 2, each=lambda step: exporter.batch(ids.to(dtype if step == 1 else torch.int64)))
    first, second = ({k: v for k, v in one.signals.items() if "batch" in k} for one in steps(exporter, tmp_path))
    assert first == second
    assert "batch_hash" in first


def test_a_batch_of_sparse_ids_costs_its_own_fingerprint_alone(tmp_path: Path) -> None:
    model, optimizer, exporter = begun(tmp_path)
    ids = torch.ones(4, 12, dtype=torch.int64)
    train(model, optimizer, exporter, 2, each=lambda step: exporter.batch(ids.to_sparse() if step == 1 else ids))
    assert ["batch_hash" in record.signals for record in steps(exporter, tmp_path)] == [False, True]


@pytest.mark.parametrize("step", ["x", 10**30, float("nan"), None, [1]])
def test_an_event_at_a_step_that_is_no_number_is_kept_and_its_journal_stays_readable(tmp_path: Path, step: Any) -> None:
    model, optimizer, exporter = begun(tmp_path)
    train(model, optimizer, exporter, 1)
    exporter.event("mine", step=step, value=1.5)
    exporter.event("mine", step=7.0, value=2.5)
    exporter.checkpoint(step, tmp_path / "checkpoint")
    exporter.checkpoint(1, tmp_path / "checkpoint")
    assert len(recorded(exporter, tmp_path)) == 1
    assert [(event.step, event.fields["value"]) for event in events(tmp_path, "mine")] == [(None, 1.5), (7, 2.5)]
    assert [event.step for event in events(tmp_path, "checkpoint")] == [1]
    assert len(exporter.notices) == 2


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        ("chekpoint", "checkpoint"),
        ("mixure", "mixture"),
        ("lr-phase", "lr_phase"),
        ("Batch Size", "batch_size"),
        ("falure", "failure"),
    ],
)
def test_a_misspelt_kind_of_event_is_said_once_with_the_one_that_may_be_meant(
    tmp_path: Path, kind: str, meant: str
) -> None:
    _, _, exporter = begun(tmp_path)
    for step in (1, 2):
        exporter.event(kind, step=step)
        exporter.step(1.0)
    exporter.close()
    assert [notice for notice in exporter.notices if f"did you mean {meant!r}?" in notice] == exporter.notices
    assert len(exporter.notices) == 1
    assert [event.step for event in events(tmp_path, kind)] == [1, 2]  # and recorded as it was told


def test_kinds_of_events_that_are_known_or_a_trainers_own_are_taken_without_a_word(tmp_path: Path) -> None:
    _, _, exporter = begun(tmp_path)
    kinds = [
        "checkpoint",
        "evaluation",
        "side_group",
        "guard",
        "state",
        "restart",
        "curriculum",
        "lr",
        "warm restart",
        "x" * 500,
    ]
    for kind in kinds:
        exporter.event(kind)
    exporter.step(1.0)
    exporter.close()
    assert exporter.notices == []
    assert {event.kind for event in events(tmp_path)} >= set(kinds)


def test_what_a_trainer_writes_into_the_norm_that_clipping_gave_back_is_not_recorded(tmp_path: Path) -> None:
    model, optimizer, exporter = begun(tmp_path)
    loss_of(model, 1).backward()
    norm = norm64([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).mul_(8)  # as a sum over ranks would
    optimizer.step()
    exporter.step(1.0)
    assert steps(exporter, tmp_path)[0].value("clip_ratio") == pytest.approx(norm / 0.5, rel=1e-5)


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_step_that_breaks_off_and_is_made_again_is_measured_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, optimizer, exporter = begun(tmp_path)
    broken: list[bool] = []

    def breaks(*_: Any) -> None:
        if len(broken) == 1:
            broken.append(True)
            raise RuntimeError("out of memory")

    if where == "before":
        optimizer.register_step_pre_hook(breaks)
    else:
        begins = optimizer._init_group  # type: ignore[attr-defined]  # torch's own, in the middle of a step
        monkeypatch.setattr(optimizer, "_init_group", lambda *given: (breaks(), begins(*given))[1])
    wanted = []
    for step in (1, 2, 3):
        broken.extend([True] if step == 2 else [])
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            norm = norm64([parameter.grad for parameter in by_group(model)["all"] if parameter.grad is not None])
            try:
                optimizer.step()
            except RuntimeError:
                continue
            break
        wanted.append(norm)
        exporter.step(loss)
    found = steps(exporter, tmp_path)
    assert len(broken) == 2
    assert [record.value("grad_norm") for record in found] == pytest.approx(wanted, rel=1e-5)
    assert all({"update_ratio", "update_applied_ratio", "moment_rms"} <= set(record.signals) for record in found)


def test_an_optimizer_that_is_replaced_is_missed_once(tmp_path: Path) -> None:
    model, optimizer, exporter = begun(tmp_path)
    train(model, optimizer, exporter, 2)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), exporter, 5)
    assert len(recorded(exporter, tmp_path)) == 7
    assert len(exporter.notices) == 1
    assert "Was it replaced?" in exporter.notices[0]
