from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwarden.exporter.resume import Resume
from trainwarden.plan import Exclusion, Ledger, LedgerEntry, Plan, Target
from trainwarden.record import Event, Header, encode_line
from trainwarden.runfolder import RunFolder


class Run:
    """A run's folder with checkpoints that were really written."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folder = RunFolder("r", base)
        self.uid = self.folder.open_identity().run_uid
        self.clock = 0

    def file(self, attempt: int, step: int) -> str:
        return str(self.base / f"a{attempt}-s{step}.pt")

    def saved(self, attempt: int, step: int, *, path: str | None = None, **fields: Any) -> str:
        path = path or self.file(attempt, step)
        Path(path).write_bytes(b"state")
        self.said(attempt, step, path, **({"complete": True, "finite": True} | fields))
        return path

    def said(self, attempt: int, step: int, path: str, **fields: Any) -> None:
        self.clock += 1
        file = self.folder.journal(attempt, f"start-of-{attempt}", 0) / "00001.ndjson"
        if not file.exists():
            file.parent.mkdir(parents=True)
            header = Header(run_uid=self.uid, run="r", attempt=attempt, start_id=f"start-of-{attempt}")
            file.write_bytes(encode_line(header) + b"\n")
        event = Event(kind="checkpoint", time=float(self.clock), step=step, fields={"path": path, **fields})
        file.write_bytes(file.read_bytes() + encode_line(event) + b"\n")

    def rolled_back(self, to: Target | None, for_attempt: int, *, note: bool = True, **fields: Any) -> Plan:
        plan = Plan(plan_id=f"p{for_attempt}", run_uid=self.uid, for_attempt=for_attempt, target=to, **fields)
        self.folder.write_plan(plan)
        if note:
            ledger = self.folder.ledger() or Ledger(run_uid=self.uid)
            ledger.entries.append(
                LedgerEntry(
                    plan_id=plan.plan_id,
                    for_attempt=for_attempt,
                    target_step=to.step if to else 0,
                    skip_samples=plan.skip_samples,
                    skip_epoch=plan.skip_epoch,
                    exclude=plan.exclude,
                    skip_mode=plan.skip_mode,
                )
            )
            self.folder.write_ledger(ledger)
        return plan

    def target(self, attempt: int, step: int) -> Target:
        return Target(attempt=attempt, step=step, path=self.file(attempt, step))

    def resume(self, attempt: int, roots: list[Path] | None = None) -> Resume:
        return Resume.read(self.folder, attempt, roots)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def chosen(resume: Resume) -> tuple[int, int] | None:
    return None if resume.target is None else (resume.target.attempt, resume.target.step)


def test_a_new_run_begins_from_scratch_without_a_word(tmp_path: Path) -> None:
    resume = Resume.read(RunFolder("new", tmp_path), 0)
    assert (resume.target, resume.plan, resume.notices) == (None, None, [])
    assert not resume.skips
    assert resume.apply([], 1) is None
    assert resume.lr_factor(1) == 1.0
    assert not (tmp_path / "new").exists()


def test_a_crash_without_any_plan_resumes_from_the_newest_checkpoint(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    assert chosen(run.resume(0)) == (0, 20)
    assert chosen(run.resume(1)) == (0, 20)


@pytest.mark.parametrize("fields", [{"complete": False}, {"finite": False}, {"deleted": True}, {"abandoned": True}])
def test_a_checkpoint_that_may_not_be_loaded_is_passed_over(run: Run, fields: dict[str, Any]) -> None:
    run.saved(0, 10)
    run.saved(0, 20, **fields)
    assert chosen(run.resume(1)) == (0, 10)


def test_a_checkpoint_that_nobody_looked_into_may_be_loaded(run: Run) -> None:
    run.saved(0, 20, finite=None)
    assert chosen(run.resume(1)) == (0, 20)


def test_a_checkpoint_that_is_gone_or_empty_is_passed_over_and_said(run: Run) -> None:
    run.saved(0, 10)
    Path(run.saved(0, 20)).unlink()
    Path(run.saved(0, 30)).write_bytes(b"")
    Path(run.saved(0, 40)).unlink()
    Path(run.file(0, 40)).mkdir()
    resume = run.resume(1)
    assert chosen(resume) == (0, 10)
    assert [sentence.rpartition(": ")[2] for sentence in resume.notices] == [
        "it is not there (No such file or directory)",
        "its file is empty",
        "its folder is empty",
    ]


def test_the_plan_of_this_attempt_says_what_to_load(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    run.saved(0, 30)
    plan = run.rolled_back(run.target(0, 10), 1)
    resume = run.resume(1)
    assert (resume.plan, chosen(resume)) == (plan, (0, 10))


def test_the_checkpoint_that_a_signal_handler_wrote_in_the_abandoned_attempt_is_never_chosen(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    run.rolled_back(run.target(0, 10), 1)
    run.saved(0, 27)  # written after the decision, with a higher step than anything attempt 1 has
    run.saved(1, 12)
    for attempt in (1, 2, 3):
        assert chosen(run.resume(attempt)) == (1, 12)
    Path(run.file(1, 12)).unlink()
    assert chosen(run.resume(2)) == (0, 10)
    Path(run.file(0, 10)).unlink()
    resume = run.resume(2)
    assert chosen(resume) is None
    assert "begins from scratch" in resume.notices[-1]


def test_a_crash_before_the_first_checkpoint_after_the_rollback_applies_the_plan_again(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    plan = run.rolled_back(run.target(0, 10), 1, reset_optimizer=True, rewarmup_steps=20)
    for attempt in (1, 2, 3):
        resume = run.resume(attempt)
        assert (resume.plan, chosen(resume)) == (plan, (0, 10))


def test_a_crash_after_the_first_checkpoint_after_the_rollback_resumes_from_that_one(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    run.rolled_back(run.target(0, 10), 1, reset_optimizer=True, rewarmup_steps=20)
    run.saved(1, 12)
    for attempt in (1, 2):  # 1: torchrun started the trainer again in place
        resume = run.resume(attempt)
        assert (resume.plan, chosen(resume)) == (None, (1, 12))
    run.saved(2, 14)
    assert chosen(run.resume(3)) == (2, 14)


def test_an_unfinished_or_broken_checkpoint_of_the_new_attempt_is_none_of_its_own(run: Run) -> None:
    run.saved(0, 10)
    plan = run.rolled_back(run.target(0, 10), 1)
    run.saved(1, 12, complete=False)
    run.saved(1, 13, finite=False)
    assert run.resume(2).plan == plan


def test_a_second_rollback_goes_further_back_and_abandons_both_lines(run: Run) -> None:
    run.saved(0, 5)
    run.saved(0, 10)
    run.saved(0, 20)
    run.rolled_back(run.target(0, 10), 1)
    run.saved(1, 12)
    run.rolled_back(run.target(0, 5), 2)
    assert chosen(run.resume(2)) == (0, 5)
    run.saved(2, 6)
    assert chosen(run.resume(3)) == (2, 6)
    Path(run.file(2, 6)).unlink()
    Path(run.file(0, 5)).unlink()
    assert chosen(run.resume(3)) is None


def test_a_plan_that_the_ledger_lacks_still_abandons_its_line_and_its_skips_hold(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    run.rolled_back(run.target(0, 10), 1, note=False, skip_samples=[(80, 160)])
    run.saved(1, 11)
    resume = run.resume(2)
    assert chosen(resume) == (1, 11)
    assert resume.skips.in_epoch(0) == [(80, 160)]


def test_a_plan_for_a_later_attempt_changes_nothing_yet(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    run.rolled_back(run.target(0, 10), 1, skip_samples=[(0, 8)])
    resume = run.resume(0)
    assert (resume.plan, chosen(resume)) == (None, (0, 20))
    assert not resume.skips


def test_soft_plans_and_stops_choose_no_target(run: Run) -> None:
    run.saved(0, 10)
    run.rolled_back(None, 1, note=False, action="lower_lr", lr_factor=0.5, at_step=30)
    run.rolled_back(None, 2, note=False, action="stop")
    resume = run.resume(2)
    assert (resume.plan, chosen(resume)) == (None, (0, 10))


def test_skips_and_exclusions_of_all_plans_hold_for_all_later_attempts(run: Run) -> None:
    run.saved(0, 10)
    first = Exclusion(dataset="d", shard="a", first=0, end=5)
    run.rolled_back(run.target(0, 10), 1, skip_samples=[(80, 160)], exclude=[first])
    run.saved(1, 12)
    run.rolled_back(run.target(1, 12), 2, skip_samples=[(0, 8)], skip_epoch=3, skip_mode="shift")
    run.saved(2, 14)
    skips = run.resume(5).skips
    assert (skips.in_epoch(0), skips.in_epoch(3, "shift")) == ([(80, 160)], [(0, 8)])
    assert [entry.what for entry in skips.exclude] == [first]
    assert run.resume(1).skips.in_epoch(3) == []


def test_a_target_that_cannot_be_read_gives_way_to_a_fallback_and_the_plan_stays_in_force(run: Run) -> None:
    run.saved(0, 5)
    run.saved(0, 8)
    run.saved(0, 10)
    plan = run.rolled_back(
        run.target(0, 10), 1, fallback_targets=[run.target(0, 8), run.target(0, 5)], reset_optimizer=True
    )
    Path(run.file(0, 10)).unlink()
    resume = run.resume(1)
    assert (resume.plan, chosen(resume)) == (plan, (0, 8))
    assert "fallback" in resume.notices[-1]
    Path(run.file(0, 8)).unlink()
    assert chosen(run.resume(1)) == (0, 5)


def test_without_any_target_of_the_plan_an_older_checkpoint_is_taken_never_a_newer_one(run: Run) -> None:
    run.saved(0, 5)
    run.saved(0, 10)
    run.saved(0, 20)
    run.rolled_back(run.target(0, 10), 1)
    Path(run.file(0, 10)).unlink()
    resume = run.resume(1)
    assert chosen(resume) == (0, 5)
    assert "none of its targets can be loaded" in resume.notices[-1]


def test_a_target_whose_file_was_overwritten_since_is_not_loaded(run: Run) -> None:
    run.saved(0, 5)
    path = run.saved(0, 10, path=str(run.base / "last.pt"))
    run.rolled_back(Target(attempt=0, step=10, path=path), 1)
    run.saved(0, 27, path=path)  # a signal handler used the same name
    resume = run.resume(1)
    assert chosen(resume) == (0, 5)
    assert any("written again, by attempt 0 at step 27" in sentence for sentence in resume.notices)


def test_paths_must_lie_inside_the_roots_also_through_links(run: Run, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    run.saved(0, 10, path=str(inside / "a.pt"))
    run.saved(0, 20, path=str(outside / "b.pt"))
    (inside / "link.pt").symlink_to(outside / "b.pt")
    run.said(0, 30, str(inside / "link.pt"), complete=True)
    run.said(0, 40, str(inside / ".." / "out" / "b.pt"), complete=True)
    run.said(0, 50, "s3://bucket/c", complete=True)
    resume = run.resume(1, [inside])
    assert chosen(resume) == (0, 10)
    assert len([sentence for sentence in resume.notices if "roots" in sentence]) == 4
    plan_outside = Target(attempt=0, step=20, path=str(outside / "b.pt"))
    run.rolled_back(plan_outside, 1)
    assert chosen(run.resume(1, [inside])) == (0, 10)
    assert chosen(run.resume(1)) == (0, 20)


def test_a_plan_that_is_not_to_be_trusted_is_refused_and_said(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    plan = run.rolled_back(run.target(0, 10), 1, note=False)
    file = run.folder.plan_folder / f"1-{plan.plan_id}.json"
    file.chmod(0o644)
    resume = run.resume(1)
    assert (resume.plan, chosen(resume)) == (None, (0, 20))
    assert "must be 0600" in resume.notices[0]


@pytest.mark.parametrize(
    "name", ["ledger.json", "run.json", "plans/1-p1.json", "attempt-0/start-of-0/rank-0/00001.ndjson"]
)
@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[1, 2]", b"[" * 100_000])
def test_no_damage_to_a_file_raises(run: Run, name: str, damage: bytes) -> None:
    run.saved(0, 10)
    run.rolled_back(run.target(0, 10), 1, skip_samples=[(0, 8)])
    (run.folder.path / name).write_bytes(damage)
    resume = run.resume(1)
    if name != "attempt-0/start-of-0/rank-0/00001.ndjson":
        assert resume.notices
    resume.apply([], 11)


def test_a_lost_ledger_is_made_up_for_by_the_plans(run: Run) -> None:
    run.saved(0, 10)
    run.rolled_back(run.target(0, 10), 1, skip_samples=[(0, 8)])
    run.saved(0, 27)
    (run.folder.path / "ledger.json").write_bytes(b"{")
    resume = run.resume(2)
    assert chosen(resume) == (0, 10)
    assert resume.skips.in_epoch(0) == [(0, 8)]
    assert "ledger not read" in resume.notices[0]


def test_a_ledger_of_another_run_is_not_used(run: Run) -> None:
    run.saved(0, 10)
    entry = LedgerEntry(plan_id="x", for_attempt=1, target_step=2, skip_samples=[(0, 8)])
    run.folder.write_ledger(Ledger(run_uid="another", entries=[entry]))
    resume = run.resume(1)
    assert chosen(resume) == (0, 10)
    assert not resume.skips
    assert "is of run another" in resume.notices[0]


def test_of_two_plans_for_one_attempt_the_ledgers_is_followed(run: Run) -> None:
    run.saved(0, 10)
    run.saved(0, 20)
    noted = run.rolled_back(run.target(0, 20), 1)
    stray = Plan(plan_id="a-stray", run_uid=run.uid, for_attempt=1, target=run.target(0, 10))
    run.folder.write_plan(stray)
    assert run.resume(1).plan == noted
