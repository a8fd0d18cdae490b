"""What holds for every test: one thread for torch, no settings of the caller's shell, properties without a clock."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: two cores are shared by training processes, daemons and the tests themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Under nohup, or behind a shell's `&`, these come in ignored, and every process of a test would inherit that.
for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# A property that holds is not made false by a slow machine, and CI looks at the same examples each time.
settings.register_profile(
    "house",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("house")

#: Where tests start processes. Those of one place are run one after another by one worker: the processes that train, and the servers.
TOGETHER = {
    "processes that train": ("tests/exporter",),
    "servers": (
        "tests/demo",
        "tests/e2e",
        "tests/receiver",
        "tests/rules/cli",
        "tests/rules/daemon",
        "tests/test_deploy_files.py",
        "tests/test_readme.py",
    ),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out among workers: by :data:`TOGETHER`, all others by file."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for name, places in TOGETHER.items() if file.startswith(places)), file)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a supervisor or an operator's shell has set for trainwarden out of the environment."""
    for name in [name for name in os.environ if name.startswith("TRAINWARDEN_")]:
        monkeypatch.delenv(name)
