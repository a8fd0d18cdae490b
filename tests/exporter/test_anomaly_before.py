"""The close look where a module's own forward makes what is not finite before it calls a child: the child is innocent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.planted import (
    Faulty,
    LogBeforeTheChild,
    LogOfNothingBeforeTheChild,
    ScaledBeforeTheChild,
    WrittenBeforeTheChild,
    forget_compiled,
    line_of,
    planted,
)
from tests.exporter.test_anomaly import found, looked, switched


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    forget_compiled()


@pytest.mark.parametrize(
    ("kind", "op"), [(LogBeforeTheChild, "log"), (LogOfNothingBeforeTheChild, "log"), (ScaledBeforeTheChild, "mul")]
)
@pytest.mark.parametrize("options", [{}, {"checkpointing": "plain"}])
def test_the_module_whose_own_forward_made_it_is_named_and_not_the_child_that_was_given_it(
    tmp_path: Path, kind: type[Faulty], op: str, options: dict[str, Any]
) -> None:
    model, fault = planted(kind, **options)
    fields = found(looked(tmp_path, model, each=switched(fault, 3))).fields
    assert (fields["module"], fields["stage"], fields["op"]) == ("h.1.mlp.1", "forward", op)
    assert fields["at"] == line_of(kind)
    assert "# here" in fields["traceback"][-1]


def test_what_was_written_by_no_operation_is_still_not_the_childs(tmp_path: Path) -> None:
    model, fault = planted(WrittenBeforeTheChild)
    fields = found(looked(tmp_path, model, each=switched(fault, 3))).fields
    assert (fields["module"], fields["stage"]) == ("h.1.mlp.1", "forward")
    assert "op" not in fields


def test_the_outermost_modules_own_arithmetic_is_that_of_the_model(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head, self.bad = nn.Linear(4, 4), nn.Linear(4, 1), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if self.bad:
                x = torch.log(-x.abs() - 1)
            answer: torch.Tensor = self.head(x)
            return answer

    model = Model()

    def loss_of(step: int) -> torch.Tensor:
        model.bad = step == 3
        loss: torch.Tensor = model(torch.ones(3, 4)).sum()
        return loss

    fields = found(looked(tmp_path, model, loss_of=loss_of)).fields
    assert (fields["module"], fields["stage"], fields["op"]) == ("the model", "forward", "log")
    assert fields["traceback"][-1].endswith("x = torch.log(-x.abs() - 1)")


def test_a_child_that_makes_it_of_a_mask_it_was_given_stays_the_one_that_is_named(tmp_path: Path) -> None:
    class Masking(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x, torch.log(torch.zeros(x.shape[-1])))
            return found

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.on = False

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x * self.weight + mask).softmax(-1) if self.on else x * self.weight

    model = gpt()
    taking, layer = Taking(), model.h[1]
    assert isinstance(layer.mlp, nn.Sequential)
    layer.mlp.append(Masking(taking))

    def loss_of(step: int) -> torch.Tensor:
        taking.on = step == 3
        return loss_on(model, batch(step))

    fields = found(looked(tmp_path, model, loss_of=loss_of)).fields
    assert fields["module"].endswith(".inner")
    assert fields["stage"] == "forward"
