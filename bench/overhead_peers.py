"""Two other ways of watching a training, as watchers of ``overhead.py``."""

from __future__ import annotations

import sys
import uuid

import torch
from torch import Tensor, nn

try:
    from trainscope import TrainScope, TrainScopeConfig
except ImportError:
    sys.exit(
        "bench/overhead.py --peers: trainscope is not installed; pip install trainscope, into an environment of its own"
    )


class Trainscope:
    """trainscope with the settings it comes with; called before the update, as its documentation recommends."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        config = TrainScopeConfig(run_dir=folder, run_name=f"trainscope-{uuid.uuid4()}")
        self.scope = TrainScope(model, optimizer, config=config).attach()

    def computed(self, loss: Tensor) -> None:
        """Record the step."""
        self.scope.step(loss.item())

    def updated(self, loss: Tensor, inputs: Tensor, labels: Tensor) -> None:
        """Nothing."""

    def close(self) -> None:
        """Detach."""
        self.scope.detach()


class ItemMonitor:
    """Asks for every parameter's norms one by one, as Composer's OptimizerMonitor does: gradient, weight, moments, update.

    At every step, and kept in a list; written to nowhere.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        self.model, self.optimizer = model, optimizer
        self.found: list[dict[str, float]] = []

    def computed(self, loss: Tensor) -> None:
        """Nothing."""

    @torch.no_grad()
    def updated(self, loss: Tensor, inputs: Tensor, labels: Tensor) -> None:
        """Take the norms."""
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        values = {"loss": loss.item()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            first, second, count = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
            root = (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
            update = first / (1 - beta1**count) / root * group["lr"] + parameter * group["lr"] * group["weight_decay"]
            assert parameter.grad is not None
            tensors = {
                "grad": parameter.grad,
                "param": parameter,
                "exp_avg": first,
                "exp_avg_sq": second,
                "update": update,
            }
            values.update(
                {f"{kind}/{name}": torch.linalg.vector_norm(tensor).item() for kind, tensor in tensors.items()}
            )
        self.found.append(values)

    def close(self) -> None:
        """Let go of the values."""
        self.found.clear()


PEERS = {"trainscope": Trainscope, "item_monitor": ItemMonitor}
