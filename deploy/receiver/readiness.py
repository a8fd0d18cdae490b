"""Tells systemd how a service is (sd_notify(3)), where it asked to be told; elsewhere nothing happens."""

from __future__ import annotations

import os
import socket


def notify(text: str) -> None:
    """Send one datagram such as ``READY=1`` to ``$NOTIFY_SOCKET``; never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(text.encode(), address)
    except OSError:
        return
