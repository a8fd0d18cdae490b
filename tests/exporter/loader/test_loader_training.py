"""Real training through the wrapped loader: what a resume and a skip do to batches and losses, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainwarden.exporter.loader import Skip, Skips, watch
from trainwarden.exporter.resume import Resume
from trainwarden.plan import Ledger, LedgerEntry, Plan, Target
from trainwarden.record import Event, Header, encode_line
from trainwarden.runfolder import RunFolder

torch.set_num_threads(1)
ROWS, BATCH, STEPS = 230, 8, 70  # two and a half epochs
SHARDS = [(f"part-{number}", 23 * number, 23 * number + 23) for number in range(10)]


class Text(Dataset[Tensor]):
    """Rows of 12 tokens."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        return torch.randint(0, 32, (12,), generator=torch.Generator().manual_seed(row))


def forever(loader: Any) -> Iterator[Tensor]:
    while True:
        yield from loader


class Trainer:
    """A small language model with dropout, so that the global generator counts, too."""

    def __init__(self, *, workers: int = 0, skips: Skips | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.1), nn.Linear(16, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        given = DataLoader(Text(), batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        self.loader = watch(given, seed=5, order="blocks", shards=SHARDS, reserve=0.1, dataset="text", skips=skips)
        self.stream = forever(self.loader)
        self.step = 0
        self.losses: dict[int, float] = {}
        self.batches: dict[int, Tensor] = {}
        self.samples: dict[int, Any] = {}

    def train(self, until: int = STEPS) -> Trainer:
        for batch in self.stream:
            self.step += 1
            loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.losses[self.step], self.batches[self.step] = loss.item(), batch
            self.samples[self.step] = self.loader.consumed()
            if self.step == until:
                return self
        return self

    def save(self, path: Path) -> None:
        parts = ("model", "optimizer", "schedule", "loader")
        state = {name: getattr(self, name).state_dict() for name in parts}
        torch.save(state | {"step": self.step, "random": torch.get_rng_state()}, path)

    def load(self, path: Path) -> Trainer:
        state = torch.load(path, weights_only=True)
        for name in ("model", "optimizer", "schedule", "loader"):
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
        torch.set_rng_state(state["random"])
        return self


@pytest.fixture(scope="module")
def whole() -> Trainer:
    return Trainer().train()


@pytest.mark.parametrize(("workers", "resumed_with"), [(0, 0), (0, 2), (2, 0)])
@pytest.mark.parametrize("at", [17, 26])  # within an epoch, and at the end of one
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    whole: Trainer, tmp_path: Path, workers: int, resumed_with: int, at: int
) -> None:
    assert len(whole.loader) == 26
    Trainer(workers=workers).train(at).save(tmp_path / "c.pt")
    resumed = Trainer(workers=resumed_with).load(tmp_path / "c.pt").train()
    assert sorted(resumed.losses) == list(range(at + 1, STEPS + 1))
    for step, loss in resumed.losses.items():
        assert torch.equal(resumed.batches[step], whole.batches[step])
        assert resumed.samples[step].samples == whole.samples[step].samples
        assert loss == whole.losses[step]


def test_a_substituted_skip_leaves_every_other_batch_and_all_losses_before_it_unchanged(
    whole: Trainer, tmp_path: Path
) -> None:
    skipped = [(160, 190)]  # steps 21 to 24
    Trainer().train(17).save(tmp_path / "c.pt")
    patched = Trainer(workers=2, skips=Skips((Skip(0, skipped),))).load(tmp_path / "c.pt").train()
    changed = [step for step in patched.batches if not torch.equal(patched.batches[step], whole.batches[step])]
    assert changed == [21, 22, 23, 24]
    assert {step: patched.samples[step].substituted for step in changed} == {21: 8, 22: 8, 23: 8, 24: 6}
    assert all(patched.losses[step] == whole.losses[step] for step in range(18, 22 - 1))
    wider = Trainer(skips=Skips((Skip(0, [(150, 200)]),))).load(tmp_path / "c.pt").train(30)
    assert torch.equal(wider.batches[22], patched.batches[22])


def test_a_rolled_back_run_does_as_its_plan_says(whole: Trainer, tmp_path: Path) -> None:
    folder = RunFolder("r", tmp_path)
    uid = folder.open_identity().run_uid
    first = Trainer()
    journal = folder.journal(0, "s", 0) / "00001.ndjson"
    journal.parent.mkdir(parents=True)
    lines = [encode_line(Header(run_uid=uid, run="r", attempt=0, start_id="s"))]
    for until in (10, 20, 33):  # the last is what a signal handler writes
        path = tmp_path / f"{until}.pt"
        first.train(until).save(path)
        fields = {"path": str(path), "complete": True, "finite": True}
        lines.append(encode_line(Event(kind="checkpoint", time=float(until), step=until, fields=fields)))
    journal.write_bytes(b"\n".join([*lines, b""]))
    target = Target(attempt=0, step=20, path=str(tmp_path / "20.pt"))
    skip = [(168, 200)]
    plan = Plan(
        plan_id="p",
        run_uid=uid,
        for_attempt=1,
        target=target,
        reset_optimizer=True,
        lr_factor=0.5,
        rewarmup_steps=15,
        skip_samples=skip,
    )
    folder.write_plan(plan)
    entry = LedgerEntry(plan_id="p", for_attempt=1, target_step=20, skip_samples=skip)
    folder.write_ledger(Ledger(run_uid=uid, entries=[entry]))

    resume = Resume.read(folder, 1, [tmp_path])
    assert resume.target == target
    second = Trainer(skips=resume.skips).load(Path(resume.target.path))
    applied = resume.apply(second.optimizer, second.step + 1, second.loader)
    assert applied is not None
    assert (applied.start_step, applied.reset_optimizer, applied.lr_factor, applied.rewarmup_steps) == (
        21,
        True,
        0.5,
        15,
    )
    assert applied.skip_samples == skip
    assert applied.not_applied == {}
    scheduled = second.schedule.get_last_lr()[0]
    before = [parameter.detach().clone() for parameter in second.model.parameters()]
    second.train(21)
    assert second.losses[21] == whole.losses[21]  # same state, same batch: the skip begins at step 22
    decay = 1 - scheduled * 0.5 / 15 * 0.01
    largest = max(
        float((after.detach() - start * decay).abs().max())
        for after, start in zip(second.model.parameters(), before, strict=True)
    )
    assert largest == pytest.approx(scheduled * resume.lr_factor(21), rel=0.01)
    assert {float(state["step"]) for state in second.optimizer.state.values()} == {1.0}
    second.train(40)
    assert second.schedule.get_last_lr() == Trainer().train(40).schedule.get_last_lr()
    assert [step for step in range(21, 41) if second.samples[step].substituted] == [22, 23, 24, 25]
    assert [resume.lr_factor(step) for step in (21, 28, 35, 36)] == pytest.approx([0.5 / 15, 4 / 15, 0.5, 0.5])


def test_after_its_first_own_checkpoint_the_rate_goes_on_as_in_the_attempt_before(tmp_path: Path) -> None:
    folder = RunFolder("r", tmp_path)
    uid = folder.open_identity().run_uid
    path = tmp_path / "own.pt"
    path.write_bytes(b"state")
    target = Target(attempt=0, step=20, path=str(tmp_path / "gone.pt"))
    folder.write_plan(Plan(plan_id="p", run_uid=uid, for_attempt=1, target=target, lr_factor=0.5, rewarmup_steps=10))
    journal = folder.journal(1, "s", 0) / "00001.ndjson"
    journal.parent.mkdir(parents=True)
    fields = {"path": str(path), "complete": True}
    journal.write_bytes(encode_line(Event(kind="checkpoint", time=1.0, step=24, fields=fields)) + b"\n")
    resume = Resume.read(folder, 2)
    assert resume.target == Target(attempt=1, step=24, path=str(path))
    assert resume.plan is None
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    assert resume.apply(optimizer, 25) is None
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = net.bias.detach().clone()
    optimizer.step()
    assert torch.allclose(before - net.bias, torch.full((2,), 0.25))
    assert resume.lr_factor(25) == 0.25
    assert "go on from the checkpoint" in resume.notices[-1]
