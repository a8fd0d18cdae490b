"""torch's own anomaly mode: on for a while, and afterwards as it was.

The switch is one of the whole process. Where the trainer has it on and wants NaN to raise, it is left alone: his is the stricter.
"""

from __future__ import annotations

import torch

State = tuple[bool, bool]


class Mode:
    """Switches the mode on and back. It is safe to call either twice."""

    def __init__(self, check_nan: bool = False) -> None:
        self._ours: State = (True, check_nan)
        self._before: State | None = None

    def on(self) -> None:
        """Switch it on, and remember how it was."""
        now = _now()
        if now == (True, True) or now == self._ours:
            return
        if self._before is None:
            self._before = now
        torch.set_anomaly_enabled(*self._ours)

    def off(self) -> bool:
        """Put back what was. False: the trainer has changed it meanwhile, and may yet put back what was ours; ask again."""
        if self._before is None:
            return True
        if _now() == self._ours:
            torch.set_anomaly_enabled(*self._before)
            self._before = None
            return True
        if _now() == self._before:
            self._before = None
            return True
        return False


def _now() -> State:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
