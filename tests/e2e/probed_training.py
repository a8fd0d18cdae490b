"""The demo's training script, whose optimizer's moments are damaged once, in attempt 0 at the step of the first argument (0: never).

No step takes less than ``PACE`` seconds: a daemon that polls five times a second must see the run before it is over, on a fast machine too.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import torch

from trainwarden.demo import train

PACE = 0.02


def damage_at(step: int) -> None:
    """Have the first moment of every parameter grow and the second shrink just before this update (0: have no step damaged)."""
    real = torch.optim.AdamW.step
    done = [0]

    @functools.wraps(real)
    def damaged(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        done[0] += 1
        time.sleep(PACE)
        if done[0] == step:
            for state in self.state.values():
                state["exp_avg"].mul_(20.0)
                state["exp_avg_sq"].mul_(1e-8)
        return real(self, *args, **kwargs)

    torch.optim.AdamW.step = damaged  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    damage_at(int(sys.argv[1]) if os.environ.get("TRAINWARDEN_ATTEMPT") == "0" else 0)
    train.main(sys.argv[2:])
