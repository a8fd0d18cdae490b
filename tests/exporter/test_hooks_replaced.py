"""What hooks replace in torch they give back, and what somebody else has put around it stays."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad

from trainwarden.exporter.hooks import attention, autocast, backward, clipping, replaced, scaler


class Listener:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._tell

    def _tell(self, *arguments: Any) -> None:
        self.told += 1


def enter_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        pass


def go_backward() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


def clip() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    clip_grad.clip_grad_norm_([weight], 1.0)


def take_softmax() -> None:
    functional.softmax(torch.ones(1, 2, 2), dim=-1)


def step_scaled() -> None:
    weight = nn.Parameter(torch.ones(2))
    scaling = torch.amp.GradScaler("cpu")
    scaling.scale(weight.sum()).backward()
    scaling.step(torch.optim.SGD([weight], lr=0.1))


PLACES = [
    (autocast, torch.autocast, "__enter__", enter_autocast),
    (backward, torch.autograd, "backward", go_backward),
    (clipping, clip_grad, "_clip_grads_with_norm_", clip),
    (attention, functional, "softmax", take_softmax),
    (scaler, torch.amp.GradScaler, "step", step_scaled),
]


@pytest.mark.parametrize(("hook", "owner", "name", "use"), PLACES, ids=[place[2] for place in PLACES])
def test_a_wrapper_that_somebody_else_put_around_ours_stays_and_nothing_is_told_twice(
    hook: Any, owner: Any, name: str, use: Callable[[], None]
) -> None:
    original = vars(owner)[name]
    first, second = Listener(), Listener()
    hook.listen(first)
    ours, calls = vars(owner)[name], []
    assert ours is not original
    use()
    usual = first.told
    assert usual > 0

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return ours(*args, **kwargs)

    setattr(owner, name, theirs)
    try:
        hook.forget(first)
        assert vars(owner)[name] is theirs
        use()
        assert calls == [name]
        assert first.told == usual
        hook.listen(second)
        use()
        assert second.told == usual, "told through what is still there, once"
    finally:
        setattr(owner, name, ours)  # they take theirs away
        hook.forget(second)
    assert vars(owner)[name] is original


class Soft(nn.Module):
    """Keeps functions of torch's, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = functional.softmax
        self.attend = functional.scaled_dot_product_attention
        self.clamp = clip_grad.clip_grad_value_


def test_a_model_that_keeps_a_function_of_torchs_can_be_saved_while_somebody_listens() -> None:
    listener = Listener()
    attention.listen(listener)
    clipping.listen(listener)
    try:
        model = Soft()
        file = io.BytesIO()
        torch.save(model, file)
    finally:
        attention.forget(listener)
        clipping.forget(listener)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.activation is functional.softmax is not model.activation
    assert loaded.attend is functional.scaled_dot_product_attention is not model.attend
    assert loaded.clamp is clip_grad.clip_grad_value_


def test_what_is_held_by_several_modules_is_replaced_in_each_and_given_back() -> None:
    def original() -> str:
        return "original"

    holders = [ModuleType(f"holder_{number}") for number in range(3)]
    for holder in holders:
        holder.held = original  # type: ignore[attr-defined]
    taken = replaced.Replaced()
    with pytest.MonkeyPatch.context() as patch:
        for holder in holders:
            patch.setitem(replaced.sys.modules, holder.__name__, holder)
        taken.put_everywhere({id(original): lambda: "wrapped"})
    assert taken.on
    assert [holder.held() for holder in holders] == ["wrapped"] * 3
    assert len(taken.give_back()) == 3
    assert not taken.on
    assert not taken
    assert all(holder.held is original for holder in holders)
