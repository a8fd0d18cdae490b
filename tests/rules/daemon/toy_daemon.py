"""The daemon with the toy core as a process: ``python -m tests.rules.daemon.toy_daemon CONFIG [KILL_POINT]``.

At the kill point it kills itself with SIGKILL, the first time only (a file beside the configuration remembers).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.rules.daemon.toy import TOY_CORE
from trainwarden.rules.config import load_config
from trainwarden.rules.daemon.live import Live
from trainwarden.rules.daemon.process import Daemon
from trainwarden.rules.logs import set_up
from trainwarden.rules.notifiers.webhook import WebhookNotifier
from trainwarden.rules.outbox import Outbox
from trainwarden.rules.store import Store

#: Where the daemon can be killed: class, method, whether the method has run by then.
POINTS: dict[str, tuple[Any, str, bool]] = {
    "before the messages are committed": (Store, "commit", False),
    "after the messages are committed": (Store, "commit", True),
    "after a message is claimed, before it is sent": (WebhookNotifier, "deliver", False),
    "after a message is sent, before that is settled": (WebhookNotifier, "deliver", True),
    "after it is settled, before the core has the receipt": (Outbox, "settle", True),
    "before the end of the request is settled": (WebhookNotifier, "follow", True),
}


def arm(point: str, marker: Path) -> None:
    """Kill this process at ``point``, once."""
    owner, name, after = POINTS[point]
    real = getattr(owner, name)

    def kill() -> None:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def armed(self: Any, *arguments: Any, **named: Any) -> Any:
        # A commit counts only when it holds messages: earlier ones have nothing to lose.
        due = name != "commit" or bool(arguments[0].messages)
        if due and not after:
            kill()
        result = real(self, *arguments, **named)
        if due and after:
            kill()
        return result

    setattr(owner, name, armed)


def main() -> None:
    config = Path(sys.argv[1])
    marker = config.with_name("killed")
    if len(sys.argv) > 2 and not marker.exists():
        arm(sys.argv[2], marker)
    set_up("info")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    daemon = Daemon(load_config(config), None, core=TOY_CORE)
    assert isinstance(daemon._live, Live)
    daemon.start()
    print(daemon.address, flush=True)
    stop.wait()
    daemon.stop()


if __name__ == "__main__":
    main()
