"""systemd's readiness protocol: one datagram to the socket that it names (``Type=notify``)."""

from __future__ import annotations

import os
import socket


def notify(word: str) -> bool:
    """Tell systemd ``word`` (``READY=1``, ``STOPPING=1``); False where no systemd asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(word.encode(), address)
        except OSError:
            return False
    return True
