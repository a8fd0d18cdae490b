"""A close look changes nothing: not a bit of the training, not torch's modes, not what happens where an exception goes through."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from tests.exporter.gpt import GPT, batch, gpt, loss_on
from tests.exporter.planted import LogOfNegative, RootAtZero, forget_compiled, planted
from tests.exporter.runs import events, steps, watch
from tests.exporter.seams import Watch
from tests.exporter.test_no_host_sync import Spy

ANOMALY = (False, True)


def mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    forget_compiled()


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Any:
    engine = vars(torch.autograd)["_engine_run_backward"]
    assert mode() == ANOMALY
    yield
    assert mode() == ANOMALY
    assert vars(torch.autograd)["_engine_run_backward"] is engine
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]


def trained(folder: Path | None, make: Callable[[], nn.Module], **options: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Train six steps, of which four are looked at closely where there is a folder; return losses and parameters."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = None if folder is None else watch(model, optimizer, folder, anomaly=(2, 4))
    losses = []
    for step in range(1, 7):
        optimizer.zero_grad()
        for part in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
                loss = loss_on(model, batch(10 * step + part)) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if exporter is not None:
            exporter.step(loss.detach())
        losses.append(loss.detach())
    if exporter is not None:
        assert mode() == ANOMALY
        assert folder is not None
        steps(exporter, folder)
        told = events(folder, "anomaly")
        assert [event.fields["state"] for event in told] == ["begun", "ended"]
        assert told[-1].fields["looked"] == 4
    return losses, [parameter.detach() for parameter in model.parameters()] + [torch.get_rng_state()]


class Dropping(GPT):
    """Draws random numbers on the way."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(ids), 0.1)


def encoder() -> nn.Module:
    """torch's own layers, which have a faster way through themselves."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(31, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 31)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.encoder(self.wte(ids)))
            return found

    return Model()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": GPT,
    "by hand": lambda: GPT(by_hand=True),
    "dropout": Dropping,
    "checkpointing": lambda: GPT(checkpointing="plain"),
    "reentrant": lambda: GPT(checkpointing="reentrant"),
    "tied": lambda: GPT(tied=True),
    "bfloat16": lambda: GPT().bfloat16(),
    "encoder": encoder,
    "no blocks": lambda: nn.Sequential(nn.Embedding(31, 8), nn.Tanh(), nn.Linear(8, 31)),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_losses_parameters_and_random_numbers_are_the_same_to_the_bit(
    tmp_path: Path, name: str, autocast: bool
) -> None:
    alone, watched = trained(None, MODELS[name], autocast=autocast), trained(tmp_path, MODELS[name], autocast=autocast)
    for ours, theirs in zip(alone[0] + alone[1], watched[0] + watched[1], strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_is_full_of_nan_goes_on_as_without(tmp_path: Path) -> None:
    def run(folder: Path | None) -> list[torch.Tensor]:
        model, fault = planted(RootAtZero)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        exporter = None if folder is None else watch(model, optimizer, folder, anomaly=(1, 5))
        for step in range(1, 6):
            optimizer.zero_grad()
            fault.on = step == 3
            loss = loss_on(model, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if exporter is not None:
                exporter.step(loss.detach())
        if exporter is not None:
            steps(exporter, tmp_path)
        return [parameter.detach() for parameter in model.parameters()]

    alone, watched = run(None), run(tmp_path)
    assert any(bool(parameter.isnan().any()) for parameter in alone)
    assert all(
        torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(alone, watched, strict=True)
    )


def begun(folder: Path, model: nn.Module, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, folder, **settings)
    return exporter, optimizer


def step_of(model: nn.Module, exporter: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss = loss_on(model, batch(step))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    exporter.step(loss.detach())


def test_the_mode_is_on_in_the_steps_that_were_asked_for_alone_and_every_hook_goes(tmp_path: Path) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(3, 2))
    usual, seen = hooks_of(model), []
    for step in range(1, 7):
        seen.append(mode())
        step_of(model, exporter, optimizer, step)
    assert seen == [ANOMALY, ANOMALY, (True, False), (True, False), ANOMALY, ANOMALY]
    assert hooks_of(model) == usual
    steps(exporter, tmp_path)


@pytest.mark.parametrize("trainers", [(True, True), (True, False)])
def test_where_the_trainer_has_the_mode_on_it_stays_on_as_he_has_it(
    tmp_path: Path, trainers: tuple[bool, bool]
) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(2, 2))
    torch.set_anomaly_enabled(*trainers)
    try:
        for step in range(1, 6):
            assert mode() == trainers
            step_of(model, exporter, optimizer, step)
        assert mode() == trainers
    finally:
        torch.set_anomaly_enabled(*ANOMALY)
    steps(exporter, tmp_path)


def test_a_mode_of_the_trainers_that_ends_behind_the_look_leaves_nothing_of_ours(tmp_path: Path) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(2, 2))
    step_of(model, exporter, optimizer, 1)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        trainers = torch.autograd.detect_anomaly()
    with trainers:
        for step in range(2, 5):
            step_of(model, exporter, optimizer, step)
        assert mode() == (True, True)
    step_of(model, exporter, optimizer, 5)  # it puts back what it found: ours
    assert mode() == ANOMALY
    steps(exporter, tmp_path)


class Stop(Exception):
    pass


def failing(where: str, model: GPT, ids: torch.Tensor) -> None:
    """Run a step that breaks off."""

    def stop(*_: Any) -> None:
        raise Interrupt if where == "interrupt" else Stop

    block: Any = model.h[1]
    if where == "backward":
        block.register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
    elif where in ("forward", "interrupt"):
        block.mlp.register_forward_pre_hook(stop)
    loss = loss_on(model, ids)
    loss.backward()  # type: ignore[no-untyped-call]


class Interrupt(BaseException):
    """As KeyboardInterrupt: no hook of a module's is called for it."""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_that_goes_through_finds_the_mode_as_it_was_and_the_next_pass_is_looked_at_again(
    tmp_path: Path, where: str
) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(1, 3))
    step_of(model, exporter, optimizer, 1)
    block: Any = model.h[1]
    before = [(kind, list(kind)) for kind in (block._forward_hooks, block.mlp._forward_pre_hooks)]
    with pytest.raises(Stop):
        failing(where, model, batch(2))
    assert mode() == ANOMALY
    assert _get_current_function_mode_stack() == []  # type: ignore[no-untyped-call]
    for kind, known in before:
        for key in [key for key in kind if key not in known]:
            del kind[key]
    for step in (2, 3, 4):
        step_of(model, exporter, optimizer, step)
    steps(exporter, tmp_path)
    assert events(tmp_path, "anomaly")[-1].fields["looked"] == 3


def test_an_interrupt_in_the_middle_leaves_a_mode_that_the_next_pass_or_the_end_takes_away(tmp_path: Path) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(1, 3))
    step_of(model, exporter, optimizer, 1)
    with pytest.raises(Interrupt):
        failing("interrupt", model, batch(2))
    exporter.close()
    assert mode() == ANOMALY
    assert exporter.notices == []


def test_closing_in_the_middle_ends_the_look_and_says_so_before_the_exit(tmp_path: Path) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(2, 100))
    for step in (1, 2, 3):
        step_of(model, exporter, optimizer, step)
    steps(exporter, tmp_path)
    kinds = [(event.kind, event.fields.get("state")) for event in events(tmp_path)]
    assert kinds[-2:] == [("anomaly", "ended"), ("exit", None)]
    assert events(tmp_path, "anomaly")[-1].fields["looked"] == 2


def test_with_check_nan_torch_raises_and_what_was_found_is_told_all_the_same(tmp_path: Path) -> None:
    model, fault = planted(RootAtZero)
    exporter, optimizer = begun(tmp_path, model)
    exporter.look_closely(3, check_nan=True)
    step_of(model, exporter, optimizer, 1)
    fault.on = True
    # torch names the first NaN, which is zero times the infinity that we name.
    with pytest.warns(UserWarning, match="MulBackward0"), pytest.raises(RuntimeError, match="returned nan values"):
        step_of(model, exporter, optimizer, 2)
    assert mode() == ANOMALY
    steps(exporter, tmp_path)
    (found,) = [event for event in events(tmp_path, "anomaly") if event.fields["state"] == "found"]
    assert (found.step, found.fields["op"], found.fields["module"]) == (2, "SqrtBackward0", "h.1.mlp.1")


def test_a_fault_of_its_own_ends_the_look_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(2, 3))
    from trainwarden.exporter.anomaly import look

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(look, "row", broken)
    usual = hooks_of(model)
    for step in range(1, 7):
        step_of(model, exporter, optimizer, step)
    assert mode() == ANOMALY
    assert hooks_of(model) == usual
    exporter.close()
    assert [notice for notice in exporter.notices if notice.startswith("looking closely: RuntimeError: a fault")]
    assert "everything after a fault: RuntimeError" in events(tmp_path, "anomaly")[-1].fields["absent"]


def test_evaluations_and_other_models_are_not_looked_at(tmp_path: Path) -> None:
    model, fault = planted(LogOfNegative)
    exporter, optimizer = begun(tmp_path, model, anomaly=(1, 3))
    for step in (1, 2, 3):
        fault.on = True
        with torch.no_grad():
            loss_on(model, batch(step))
        with exporter.phase("evaluation"):
            loss_on(model, batch(step))
        model.eval()
        loss_on(model, batch(step))  # with gradients, and none goes back through it
        model.train()
        fault.on = False
        step_of(model, exporter, optimizer, step)
    steps(exporter, tmp_path)
    assert [event.fields["state"] for event in events(tmp_path, "anomaly")] == ["begun", "ended"]
    (file,) = tmp_path.rglob("anomaly.jsonl")
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert {one["elements"] for one in told if (one["what"], one.get("name")) == ("output", "h.1")} == {2 * 12 * 16}


def test_a_model_that_is_trained_in_evaluation_mode_is_looked_at(tmp_path: Path) -> None:
    model, fault = planted(LogOfNegative)
    model.eval()
    exporter, optimizer = begun(tmp_path, model, anomaly=(1, 2))
    for step in (1, 2):
        fault.on = step == 2
        step_of(model, exporter, optimizer, step)
    steps(exporter, tmp_path)
    (found,) = [event for event in events(tmp_path, "anomaly") if event.fields["state"] == "found"]
    assert (found.step, found.fields["op"]) == (2, "log")


def test_a_copy_of_the_model_made_meanwhile_is_not_looked_at_and_carries_nothing(tmp_path: Path) -> None:
    model = gpt()
    exporter, optimizer = begun(tmp_path, model, anomaly=(1, 2))
    step_of(model, exporter, optimizer, 1)
    other = copy.deepcopy(model)
    loss_on(other, batch(1)).backward()  # type: ignore[no-untyped-call]
    step_of(model, exporter, optimizer, 2)
    steps(exporter, tmp_path)
    loss_on(other, batch(1)).backward()  # type: ignore[no-untyped-call]
    assert events(tmp_path, "anomaly")[-1].fields["looked"] == 2


def test_nothing_of_it_is_imported_or_hooked_where_nobody_asks(tmp_path: Path) -> None:
    script = """
import sys, torch
from pathlib import Path
from tests.exporter.runs import make, steps, train, watch
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = watch(model, optimizer, Path(sys.argv[1]))
train(model, optimizer, exporter, 5)
steps(exporter, Path(sys.argv[1]))
print([name for name in sys.modules if name.startswith("trainwarden.exporter.anomaly")])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRAINWARDEN_ANOMALY"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_value_is_read_on_the_training_thread(tmp_path: Path) -> None:
    seen = []
    for watched in (False, True):
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        exporter = watch(model, optimizer, tmp_path, anomaly=(1, 4)) if watched else None
        with Spy() as spy:
            for step in range(1, 5):
                loss = loss_on(model, batch(step))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if exporter is not None:
                    exporter.step(loss.detach())
        if exporter is not None:
            steps(exporter, tmp_path)
        seen.append(spy.seen)
    assert seen[0] == seen[1]


def test_on_meta_where_reading_a_value_raises_a_look_goes_through(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = GPT(checkpointing="plain", by_hand=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        exporter = watch(model, optimizer, tmp_path, anomaly=(1, 3))
        for _ in range(4):
            ids = torch.zeros(2, 12, dtype=torch.int64)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            exporter.step(loss)
    assert len(steps(exporter, tmp_path)) == 4


def test_no_call_of_it_waits_for_a_lock_a_file_or_a_socket(tmp_path: Path) -> None:
    with Watch() as watching:
        model = gpt()
        exporter, optimizer = begun(tmp_path, model)
        for step in range(1, 4):
            step_of(model, exporter, optimizer, step)
        exporter.look_closely(3)
        watching.caught.clear()
        for step in range(4, 9):
            step_of(model, exporter, optimizer, step)
        found = list(watching.caught)
    steps(exporter, tmp_path)
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_compiled_model_is_not_compiled_anew_by_it_and_learns_the_same(tmp_path: Path, when: str) -> None:
    from torch._dynamo.utils import counters

    def run(folder: Path | None) -> tuple[list[float], int]:
        torch._dynamo.reset()
        counters.clear()
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter = watch(model, optimizer, tmp_path / "off") if folder is None else watch(model, optimizer, folder)
        compiled: Any = torch.compile(model, backend="aot_eager") if when == "before" else model
        losses = []
        for step in range(1, 8):
            if step == 3 and folder is not None:
                exporter.look_closely(3)
            if step == 4 and when == "within":
                compiled = torch.compile(model, backend="aot_eager")
            optimizer.zero_grad()
            loss = loss_on(compiled, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            exporter.step(loss.detach())
            losses.append(loss.item())
        steps(exporter, folder or tmp_path / "off")
        return losses, counters["stats"]["unique_graphs"]

    alone, watched = run(None), run(tmp_path)
    assert alone[0] == watched[0]
    assert watched[1] - alone[1] == (0 if when == "before" else 1)  # hooks that were part of the first graph are gone
    ended = events(tmp_path, "anomaly")[-1].fields
    assert ended["looked"] == 3
    assert any("compiled" in sentence for sentence in ended["absent"])
