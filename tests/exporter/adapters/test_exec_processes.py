"""Real commands below ``trainwarden exec``: plain scripts, launchers, workers, loggers, and the trainers' libraries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.runs import events, lines
from tests.real import wait_until
from trainwarden.record import Step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
EXEC = [sys.executable, "-m", "trainwarden.rules", "exec", "--port", "0", "--"]

#: A model, its data and its optimizer, for scripts that have their own loop.
PLAIN = """
import os, sys
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 31))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def update(ids):
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
"""


def script(folder: Path, text: str, before: str = PLAIN) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(before) + textwrap.dedent(text))
    return str(path)


def run(*command: str, cwd: Path, code: int = 0, prefix: list[str] = EXEC, **environment: str) -> Any:
    done = subprocess.run(
        [*prefix, *command],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def records(cwd: Path, run: str = "run", rank: int = 0) -> list[Step]:
    return [line for line in lines(cwd / ".trainwarden", run, rank) if isinstance(line, Step)]


def said(done: Any) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("trainwarden exec:")]


def test_the_commands_of_the_page_record_the_unmodified_example_which_learns_what_it_learns_alone(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs/exec.md").read_text()
    watched, replayed = next(block for block in page.split("```")[1::2] if "examples/" in block).split("\n")[1:3]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    settings = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    alone = subprocess.run(
        [sys.executable, "examples/unmodified.py"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    done = run(*watched.split(), cwd=tmp_path, prefix=["env"], **settings)
    assert done.stdout == alone.stdout
    found = records(tmp_path, "unmodified")
    assert [record.step for record in found] == list(range(1, 101))
    assert done.stdout == f"100 steps, last loss {found[-1].value('loss'):.6f}\n"
    assert all(record.value("grad_norm") and record.value("clip_ratio") and record.value("lr") for record in found)
    (sentence,) = said(done)
    assert sentence.startswith(
        "trainwarden exec: Sequential with AdamW is run unmodified, attempt 0: http://127.0.0.1:"
    )
    assert "100 records" in run(*replayed.split(), cwd=tmp_path, prefix=["env"], **settings).stdout


def test_each_rank_below_torchrun_attaches_and_the_launcher_does_not(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        torch.manual_seed(dist.get_rank())
        for _ in range(4):
            update(torch.randint(0, 31, (4, 12)))
        dist.destroy_process_group()
        """,
    )
    done = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", path, cwd=tmp_path)
    assert len(said(done)) == 1
    starts = [events(tmp_path / ".trainwarden", "start", rank=rank)[0].fields for rank in (0, 1)]
    assert starts[0]["start_id"] == starts[1]["start_id"]
    assert [(start["rank"], start["world_size"], start["attached"]) for start in starts] == [
        (0, 2, "exec"),
        (1, 2, "exec"),
    ]
    first, second = (records(tmp_path, rank=rank) for rank in (0, 1))
    assert [record.step for record in first] == [record.step for record in second] == [1, 2, 3, 4]
    assert [one.value("grad_norm") for one in first] == pytest.approx(
        [one.value("grad_norm") for one in second], rel=1e-6
    )
    assert all(one.value("rank_loss") != two.value("rank_loss") for one, two in zip(first, second, strict=True))


def test_of_several_ranks_that_have_an_exporter_of_their_own_one_says_that_exec_stands_back(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch.distributed as dist
        from trainwarden.exporter import Exporter
        dist.init_process_group("gloo")
        exporter = Exporter(model, optimizer, run="own", port=0)
        for _ in range(4):
            update(torch.randint(0, 31, (4, 12)))
            exporter.step(1.0)
        exporter.close()
        dist.destroy_process_group()
        """,
    )
    done = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", path, cwd=tmp_path)
    assert done.stderr.count("stands back") == 1, done.stderr
    assert [record.step for rank in (0, 1) for record in records(tmp_path, "own", rank)] == [1, 2, 3, 4] * 2
    assert records(tmp_path) == []


def test_what_a_script_logs_is_recorded_and_written_as_ever_and_none_of_its_processes_attaches(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import subprocess
        import wandb
        from torch.utils.data import DataLoader, TensorDataset
        from torch.utils.tensorboard import SummaryWriter

        def main():
            logs = wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True))
            writer = SummaryWriter("board")
            rows = TensorDataset(torch.randint(0, 31, (12, 12)))
            loader = DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="spawn")
            for step, (ids,) in enumerate(loader, 1):
                loss = update(ids)
                wandb.log({"train/loss": loss, "speed": 10.0 * step, "nested": {"deep": step}})
                writer.add_scalar("board/value", torch.tensor(step / 2), step)
                writer.add_scalars("pair", {"a": step, "b": -step}, step)
            print(int(logs.summary["speed"]), logs.summary["train/loss"] == loss)
            writer.close()
            logs.finish()
            child = os.fork()
            if child == 0:
                update(ids)
                os._exit(0)
            os.waitpid(child, 0)
            subprocess.run([sys.executable, __file__, "below"], check=True)

        if __name__ == "__main__":
            update(torch.randint(0, 31, (4, 12))) if sys.argv[1:] else main()
        """,
    )
    done = run(sys.executable, path, cwd=tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.stdout.splitlines()[0] == "30 True"
    assert len(said(done)) == 1
    found = records(tmp_path)
    assert [record.step for record in found] == [1, 2, 3]
    assert len(events(tmp_path / ".trainwarden", "start")) == 1
    for step, record in enumerate(found, 1):
        assert record.value("speed") == 10.0 * step
        assert record.value("nested_deep") == step
        assert record.value("board_value") == step / 2
        assert (record.value("pair_a"), record.value("pair_b")) == (step, -step)
        assert "train_loss" not in record.signals
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(one.step, one.value) for one in board.Scalars("board/value")] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_where_the_interpreter_has_no_trainwarden_one_line_says_so_and_the_training_runs_on(tmp_path: Path) -> None:
    import torch

    venv.create(tmp_path / "venv", symlinks=True)
    packages = tmp_path / "packages"  # all that torch needs, and not trainwarden
    packages.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if "trainwarden" not in entry.name and not entry.name.endswith(".pth"):
            (packages / entry.name).symlink_to(entry)
    path = script(tmp_path, "print(update(torch.ones(4, 12, dtype=torch.int64)) > 0)")
    python = tmp_path / "venv/bin/python"
    done = run("sh", "-c", f"{python} {path} && {python} -c pass", cwd=tmp_path, PYTHONPATH=str(packages))
    assert done.stdout == "True\n"
    assert said(done) == [
        f"trainwarden exec: {python} has no trainwarden: the training goes on, not observed. Install it there: "
        f"{python} -m pip install ."
    ]
    assert not (tmp_path / ".trainwarden").exists()


def test_a_signal_ends_the_trainer_as_ever_and_all_but_the_open_step_is_there(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import time
        for step in range(5):
            update(torch.randint(0, 31, (4, 12)))
        print("trained", flush=True)
        time.sleep(100)
        """,
    )
    process = subprocess.Popen([*EXEC, sys.executable, path], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"
    wait_until(lambda: len(records(tmp_path)) == 4, what="the closed steps are in the journal")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    process.stdout.close()
    assert [record.step for record in records(tmp_path)] == [1, 2, 3, 4]


def test_a_supervised_run_has_its_attempts_and_an_exit_code_is_the_scripts(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        for step in range(3):
            update(torch.randint(0, 31, (4, 12)))
        if os.environ["TRAINWARDEN_ATTEMPT"] == "0":
            raise SystemExit(3)
        """,
    )
    supervise = [sys.executable, "-m", "trainwarden.rules", "supervise", "--run", "again", "--"]
    run(*EXEC, sys.executable, path, cwd=tmp_path, prefix=supervise)
    starts = events(tmp_path / ".trainwarden", "start", "again")
    assert [start.fields["attempt"] for start in starts] == [0, 1]
    assert [record.step for record in records(tmp_path, "again")] == [1, 2, 3, 1, 2, 3]
    assert len(events(tmp_path / ".trainwarden", "exit", "again")) == 2


def test_a_hugging_face_trainer_below_accelerate_launch(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        torch.set_num_threads(1)
        torch.manual_seed(0)
        sizes = dict(vocab_size=31, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 31, (24, 12))]
        arguments = TrainingArguments(
            "out", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, use_cpu=True,
            report_to="tensorboard", eval_strategy="steps", eval_steps=2, save_strategy="no", disable_tqdm=True,
        )
        trainer = Trainer(GPT2LMHeadModel(GPT2Config(**sizes)), arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        import json, pathlib
        pathlib.Path("log.json").write_text(json.dumps(trainer.state.log_history))
        """,
        before="",
    )
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    ]
    done = run(*launch, path, cwd=tmp_path)
    assert len(said(done)) == 1, done.stderr
    found = records(tmp_path)
    log = json.loads((tmp_path / "log.json").read_text())
    steps = [row for row in log if "grad_norm" in row]
    assert [record.step for record in found] == [1, 2, 3, 4]
    assert [record.value("loss") for record in found] == pytest.approx([row["loss"] for row in steps], abs=1e-4)
    assert [record.value("grad_norm") for record in found] == pytest.approx(
        [row["grad_norm"] for row in steps], rel=1e-4
    )
    assert [record.value("lr") for record in found] == pytest.approx([row["learning_rate"] for row in steps])
    assert [record.value("eval_loss") is not None for record in found] == [False, True, False, True]
    assert [record.value("tokens") for record in found] == [None, 48, 96, 144]
    assert events(tmp_path / ".trainwarden", "start")[0].fields["model"] == "GPT2LMHeadModel"


def test_a_lightning_trainer(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import lightning as L
        from torch.utils.data import DataLoader

        class Model(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model
                self.seen = []

            def training_step(self, ids, number):
                loss = nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                self.log("train_loss", loss)
                self.log("twice", 2 * float(self.global_step))
                self.seen.append(float(loss.detach()))
                return loss

            validation_step = training_step

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        loader = DataLoader(torch.randint(0, 31, (16, 12)), batch_size=2)
        learner = Model()
        trainer = L.Trainer(
            max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1, accelerator="cpu", log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=1,
        )
        trainer.fit(learner, loader)
        print([(one + two) / 2 for one, two in zip(learner.seen[::2], learner.seen[1::2])])
        """,
    )
    done = run(sys.executable, path, cwd=tmp_path)
    assert len(said(done)) == 1, done.stderr
    found = records(tmp_path)
    assert [record.step for record in found] == [1, 2, 3, 4]
    assert [record.value("loss") for record in found] == pytest.approx(
        json.loads(done.stdout.splitlines()[-1]), rel=1e-6
    )
    assert all((record.value("clip_ratio") or 0) > 1 for record in found)
    assert [record.value("tokens") for record in found][1:] != [None] * 3
