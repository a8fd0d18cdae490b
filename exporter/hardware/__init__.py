"""The GPU that a rank computes on, asked about its health through NVML: which one it is, what it says of itself, when.

Read on a thread of its own, through the driver's management library. No CUDA call is made here but one: the training thread asks
torch once which device its parameters lie on. Nothing in here waits for the training, and the training waits for nothing in here.
"""

from __future__ import annotations

from .poller import Hardware
from .used import Used, used_by

__all__ = ["Hardware", "Used", "used_by"]
