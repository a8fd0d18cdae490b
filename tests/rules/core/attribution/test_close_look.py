from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import not_a_number
from trainwarden.record import Event
from trainwarden.rules.core.attribution.close_look import find
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.looked import MOST, Looked, first, sentence, take


def looked(stage: str, **more: str | bool | int) -> Looked:
    return Looked(**{"step": 301, "rank": 0, "module": "h.3.mlp", "stage": stage, **more})  # type: ignore[arg-type]


SAYS = [
    (
        looked("forward", op="log", at="train.py:88"),
        "First non-finite: the output of h.3.mlp at step 301, in the forward pass; made by log at train.py:88.",
    ),
    (
        looked("forward", parameter="h.3.mlp.weight"),
        "First non-finite: the output of h.3.mlp at step 301, in the forward pass. Its parameter h.3.mlp.weight was not finite before.",
    ),
    (looked("input", rank=2), "First non-finite: what the model was given at step 301, on rank 2."),
    (
        looked("loss", module="loss", op="AddBackward0", at="train.py:9"),
        "First non-finite: the loss at step 301, over modules that were all finite; the last of its operations is AddBackward0 at "
        "train.py:9.",
    ),
    (
        looked("backward", op="SqrtBackward0", at="train.py:88", scaled=True),
        "First non-finite: a gradient in h.3.mlp at step 301, in the backward pass; made by SqrtBackward0, of what was called at "
        "train.py:88. The gradients were scaled by a GradScaler.",
    ),
    (
        looked("backward", module="loss", op="DivBackward0"),
        "First non-finite: a gradient between the loss and the model at step 301, in the backward pass; made by DivBackward0.",
    ),
    (
        looked("accumulation", parameter="wte.weight"),
        "First non-finite: the gradient of wte.weight at step 301, which was finite in each pass and not once it was added up.",
    ),
    (
        looked("reduction", parameter="wte.weight"),
        "First non-finite: the gradient of wte.weight at step 301, which was finite on this rank and not once it was reduced over "
        "the ranks.",
    ),
    (
        looked("update", parameter="wte.weight"),
        "First non-finite: wte.weight after the update of step 301, made of finite gradients.",
    ),
]


@pytest.mark.parametrize(("one", "says"), SAYS)
def test_a_finding_is_said_in_a_sentence_with_module_operation_and_line(one: Looked, says: str) -> None:
    assert sentence([one]) == says


def test_the_finding_stands_in_the_evidence_and_only_what_the_model_was_given_speaks_for_a_cause() -> None:
    broke = facts(not_a_number(301))
    assert isinstance(find(broke), NotPossible)
    (found,) = find(replace(broke, looked=(looked("forward", op="log", at="train.py:88"),)))
    assert (found.kind, found.step, found.cause, found.weight) == ("close_look", 301, "", 0.0)
    assert "made by log at train.py:88" in found.says
    (found,) = find(replace(broke, looked=(looked("input"),)))
    assert (found.cause, found.weight) == ("data", 0.7)


def test_several_ranks_are_counted_and_the_earliest_stage_of_the_first_step_is_told() -> None:
    known = [
        looked("backward", step=302),
        looked("reduction", rank=0),
        looked("backward", rank=3, op="SqrtBackward0"),
        looked("forward", step=250),
    ]
    told = first(known, 299, 320)
    assert [(one.step, one.rank, one.stage) for one in told] == [(301, 3, "backward"), (301, 0, "reduction")]
    assert ", on rank 3; made by SqrtBackward0." in sentence(told)
    both = [looked("forward", op="log"), looked("forward", op="log", rank=1)]
    assert ", on 2 ranks; made by log." in sentence(both)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "begun"},
        {"state": "found"},
        {"state": "found", "module": "h.1", "stage": "sideways"},
        {"state": "found", "module": 7, "stage": "forward"},
        {"state": "found", "module": "x" * 1000, "stage": "forward"},
    ],
)
def test_events_that_name_no_module_or_stage_are_passed_over(fields: dict[str, object]) -> None:
    known: list[Looked] = []
    take(known, 0, Event(kind="anomaly", time=0.0, step=5, fields=dict(fields)))
    take(known, 0, Event(kind="anomaly", time=0.0, fields={"state": "found", "module": "h.1", "stage": "forward"}))
    assert known == []


def test_a_run_that_never_stops_to_find_something_fills_no_memory() -> None:
    known: list[Looked] = []
    fields = {"state": "found", "module": "h.1", "stage": "forward", "op": 7, "at": "x" * 1000}
    for step in range(3 * MOST):
        take(known, 0, Event(kind="anomaly", time=0.0, step=step, fields=dict(fields)))
    assert len(known) == MOST
    assert (known[-1].op, known[-1].at) == ("", "")
