"""``trainwarden exec`` as a command: what it becomes, what it hands on, and what interpreters below it are like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.real import TRAINWARDEN, trainwarden

COMMAND = [*TRAINWARDEN, "exec"]
run = partial(trainwarden, "exec")


def test_it_becomes_its_command_with_its_process_its_code_and_its_signals(tmp_path: Path) -> None:
    process = subprocess.Popen([*COMMAND, "--", "sh", "-c", "echo $$; exit 7"], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert (int(out), process.returncode) == (process.pid, 7)
    assert run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    piped = run("sh", "-c", "yes | head -n 1")
    assert (piped.stdout, piped.stderr) == ("y\n", "")  # yes has died of the closed pipe, as in any shell
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_run_is_one_sentence_and_a_code_that_shells_know(tmp_path: Path) -> None:
    absent = run("--", "no-such-trainer", "x")
    assert (absent.returncode, absent.stderr) == (127, "trainwarden exec: no-such-trainer: no such command\n")
    empty = run("--", "")
    assert (empty.returncode, empty.stderr) == (127, "trainwarden exec: : no such command\n")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    refused = run("--", str(script))
    assert refused.returncode == 126
    assert refused.stderr == f"trainwarden exec: {script}: cannot be started: Permission denied\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--"],
        ["--rnu", "x", "--", "true"],
        ["--run", "a/b", "--", "true"],
        ["--port", "70000", "--", "true"],
        ["--cadence", "0", "--", "true"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_options_are_handed_on_and_paths_are_those_of_where_it_was_typed(tmp_path: Path) -> None:
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    done = run("--run", "r", "--dir", "runs", "--port", "0", "--", sys.executable, "-c", show, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["TRAINWARDEN_RUN"] == "r"
    assert found["TRAINWARDEN_DIR"] == str(tmp_path / "runs")
    assert json.loads(found["TRAINWARDEN_EXEC"]) == {"host": "127.0.0.1", "port": 0, "cadence": None}
    plain = json.loads(run("--", sys.executable, "-c", show, cwd=tmp_path, TRAINWARDEN_RUN="s", PYTHONPATH="/x").stdout)
    assert plain["TRAINWARDEN_RUN"] == "s"
    assert plain["TRAINWARDEN_DIR"] == str(tmp_path / ".trainwarden")
    assert plain["PYTHONPATH"].endswith(":/x")


def test_an_interpreter_below_is_as_it_would_be_without_but_for_one_module(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own = __file__\n")
    show = "import sys, json; print(json.dumps([own, sys.path, sorted(sys.modules), sys.modules['sitecustomize'].__file__]))"
    command = [sys.executable, "-c", show]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    alone = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    below = run("--", *command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    own, path, modules, customized = json.loads(alone.stdout)
    own_below, path_below, modules_below, customized_below = json.loads(below.stdout)
    assert own_below == customized_below == own == customized == str(tmp_path / "sitecustomize.py")
    assert path_below == path
    assert set(modules_below) - set(modules) <= {"__future__"}
    assert below.stderr == ""


def test_without_another_sitecustomize_hardly_anything_is_imported(tmp_path: Path) -> None:
    show = "import sys; print('torch' in sys.modules, 'trainwarden' in sys.modules, 'importlib.abc' in sys.modules)"
    assert run("--", sys.executable, "-c", show, cwd=tmp_path).stdout == "False False False\n"
    code = (
        "import os, sys\nos.execvpe = lambda *a: print('torch' in sys.modules, 'numpy' in sys.modules)\n"
        "sys.argv = ['trainwarden', 'exec', '--', 'true']\nfrom trainwarden.rules.cli import main\nmain()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"


def test_where_trainwarden_is_turned_off_nobody_waits_for_torch() -> None:
    show = "import sys; print(sum(type(one).__module__ == 'sitecustomize' for one in sys.meta_path))"
    assert run("--", sys.executable, "-c", show).stdout == "1\n"
    assert run("--", sys.executable, "-c", show, TRAINWARDEN_DISABLE="1").stdout == "0\n"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S", "-uI"])
def test_an_interpreter_that_takes_no_notice_of_the_environment_is_named(flag: str) -> None:
    done = run("--", sys.executable, flag, "-c", "pass")
    assert done.returncode == 0
    assert done.stderr.startswith(f"trainwarden exec: {sys.executable} -{flag[-1]} takes no notice of PYTHONPATH")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["-c", "pass", "-I"], ["-W", "ignore", "-c", "pass"], ["-Xutf8", "-c", "pass"], ["-uc", "I=1"]]
)
def test_one_that_does_is_not(words: list[str]) -> None:
    done = run("--", sys.executable, *words)
    assert (done.returncode, done.stderr) == (0, "")
