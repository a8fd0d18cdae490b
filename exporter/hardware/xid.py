"""XID numbers: what the driver means by them, in few words, and what each speaks for.

Source: NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog") and its memory error
management guide for A100 and later. Which are faults is our reading of the action that they ask for: a reset, a repair or an
exchange of the device or its link, whatever the program did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Points = Literal["device", "program", "unclear"]


@dataclass(frozen=True, slots=True)
class Xid:
    """What a number means. ``fault``: the device is not to be trusted before somebody saw to it."""

    meaning: str
    points_to: Points
    fault: bool = False


_UNKNOWN = Xid("not among the well-known ones: look it up in NVIDIA's XID catalogue", "unclear")

KNOWN: dict[int, Xid] = {
    8: Xid("the GPU stopped processing", "unclear"),
    13: Xid("exception in a compute engine: an instruction or address of the program, seldom the device", "program"),
    31: Xid("page fault of GPU memory: the program used an address that is not its own", "program"),
    32: Xid("damaged command buffer: the driver, the program, or the link to the host", "unclear"),
    38: Xid("error in the driver's firmware", "unclear"),
    43: Xid("the GPU stopped the program after a fault of its own", "program"),
    44: Xid("fault while a context was switched", "unclear"),
    45: Xid("the program's work was cleared away after an earlier error, or because it was killed", "program"),
    46: Xid("the GPU no longer answers to its timer", "device", fault=True),
    48: Xid("two flipped bits in one word of memory: ECC could not correct it", "device", fault=True),
    61: Xid("warning of the GPU's internal controller", "unclear"),
    62: Xid("the GPU's internal controller halted", "device", fault=True),
    63: Xid("a bad row of memory was marked: it is remapped at the next reset", "device"),
    64: Xid("a bad row of memory could not be marked for remapping", "device", fault=True),
    68: Xid("exception in the video decoder", "unclear"),
    69: Xid("a compute engine refused a command", "program"),
    74: Xid("error on an NVLink", "device", fault=True),
    79: Xid("the GPU fell off the bus: the host no longer reaches it", "device", fault=True),
    92: Xid("corrected bit flips come at a high rate", "device"),
    94: Xid("uncorrectable memory error, contained: the program that read it is ended", "device"),
    95: Xid("uncorrectable memory error, not contained: any program's data may be wrong", "device", fault=True),
    109: Xid("a context switch timed out", "unclear"),
    119: Xid("the GPU's system processor did not answer in time", "device", fault=True),
    120: Xid("error in the GPU's system processor", "device", fault=True),
    121: Xid("corrected error on the link between chips", "device"),
    136: Xid("an NVLink could not be trained", "device"),
    137: Xid("an access over NVLink was refused, most often after a fault at its other end", "unclear"),
    140: Xid("ECC error that was not recovered", "device", fault=True),
    143: Xid("the GPU could not be initialised", "device", fault=True),
    144: Xid("NVLink: error in the links' shared logic", "unclear"),
    145: Xid("NVLink: error where requests enter a link", "unclear"),
    146: Xid("NVLink: error where requests leave a link", "unclear"),
    147: Xid("NVLink: error in the links' traffic generator", "unclear"),
    148: Xid("NVLink: error in the links' power control", "unclear"),
    149: Xid("NVLink: error of a link itself", "device"),
    150: Xid("NVLink: error in the links' logic", "unclear"),
    154: Xid("the driver changed what it asks to be done about the GPU: reset, drain or reboot", "device"),
}


def lookup(code: int) -> Xid:
    """Return what is known of an XID."""
    return KNOWN.get(code, _UNKNOWN)
