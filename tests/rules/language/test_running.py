"""What is left out of a block changes nothing: each truth is what it is if every node is computed for every block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import block, pack_of, record, run
from tests.rules.language.test_any_cut_gives_the_same import PACKS, stream
from trainwarden.record import Step
from trainwarden.rules.core.language import Pack
from trainwarden.rules.core.language.operators.logic import Comparison
from trainwarden.rules.core.language.operators.order import Ordered
from trainwarden.rules.core.language.running import Running
from trainwarden.rules.core.language.series import Frame
from trainwarden.rules.rulefiles import read_packs

DEFAULT = read_packs(["default"])
#: Both sides of each `and` settle it now and then, and so do the bounds of what is compared.
SETTLED = pack_of(
    "x > 1.4 and y < median(y[9])",
    "y < 0.8 * median(y[9]) and x > quantile(x[12], q=0.9) and slope_t(x[8]) > 1",
    "x / median(x[9] offset 2) < 0.3 and grad_norm > 0",
    "x - max(x[7] offset 1) > 0.2 and not (y > 1 and update_ratio > 1)",
    "-(median(x[6])) * 2 >= -0.5 or abs(x) + min(y[6]) == 0",
    "x < 0 and (absent(update_ratio) or update_ratio > 0.5)",
)


def truths(pack: Pack, steps: list[Step], cuts: set[int]) -> tuple[list[Any], list[Any]]:
    """Return the truths of all alerts as they run and with everything computed, row by row."""
    nodes, outputs = pack.program.nodes, pack.program.outputs
    lazy, whole = Running(pack.program, pack.program.operators()), pack.program.operators()
    found: tuple[list[Any], list[Any]] = ([], [])
    for first, end in pairwise(sorted({0, len(steps), *(cut for cut in cuts if cut < len(steps))})):
        part = block(steps[first:end])
        with np.errstate(all="ignore"):
            lazy.begin(part)
            frame, results = Frame.of(part), []
            for node, operator in zip(nodes, whole, strict=True):
                results.append(operator.feed(frame, [results[of] for of in node.inputs]))
            for place, output in enumerate(outputs):
                if nodes[output.truth].clock:
                    continue
                for into, one in zip(found, (lazy.result(output.truth), results[output.truth]), strict=True):
                    rows = zip(one.values.tolist(), one.known.tolist(), one.fresh.tolist(), strict=True)
                    into += [(place, first + row, *said) for row, said in enumerate(rows)]
    return found


@settings(max_examples=60, deadline=None)
@given(
    pack=st.sampled_from([PACKS[0], SETTLED, DEFAULT]),
    seed=st.integers(0, 10_000),
    length=st.integers(1, 160),
    odd=st.sampled_from([0.0, 0.05, 0.3]),
    cuts=st.sets(st.integers(1, 160)),
)
def test_what_is_left_out_changes_no_truth(pack: Pack, seed: int, length: int, odd: float, cuts: set[int]) -> None:
    lazy, whole = truths(pack, stream(seed, length, odd), cuts)
    assert lazy == whole


def test_what_is_left_out_changes_no_truth_of_a_quiet_run() -> None:
    rng = np.random.default_rng(0)
    steps = [
        record(
            step,
            1,
            loss=3 + 0.02 * rng.normal(),
            grad_norm=float(np.exp(0.1 * rng.normal())),
            lr=1e-3,
            update_ratio=1e-3,
        )
        for step in range(1, 2500)
    ]
    lazy, whole = truths(DEFAULT, steps, {700, 701, 1300, *range(1500, 1600, 10), 2000})
    assert lazy == whole


def test_a_quiet_block_asks_for_no_median(monkeypatch: Any) -> None:
    asked: list[int] = []
    feed = Ordered.feed

    def counted(self: Ordered, frame: Frame, inputs: Any) -> Any:
        asked.append(frame.rows)
        return feed(self, frame, inputs)

    monkeypatch.setattr(Ordered, "feed", counted)
    pack = pack_of("x / median(x[50]) < 0.2 and y > 0")
    running = Running(pack.program, pack.program.operators())
    running.begin(block([record(step, 1, x=1 + 0.001 * (step % 7), y=1.0) for step in range(1, 201)]))
    running.result(pack.program.outputs[0].truth)
    asked.clear()
    running.begin(block([record(step, 1, x=1 + 0.001 * (step % 7), y=1.0) for step in range(201, 221)]))
    assert not running.result(pack.program.outputs[0].truth).values.any()
    assert asked == []
    running.begin(block([record(step, 1, x=0.1 if step == 225 else 1.0, y=1.0) for step in range(221, 231)]))
    assert np.flatnonzero(running.result(pack.program.outputs[0].truth).values).tolist() == [4]
    assert asked == [10]


def test_a_rule_whose_signals_never_came_is_not_fed(monkeypatch: Any) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Comparison, "feed", lambda self, frame, inputs: asked.append("a comparison"))
    pack = pack_of("x > 1.5 * ema(x) and streak(x > 2) >= 3")
    running = Running(pack.program, pack.program.operators())
    running.begin(block([record(step, 1, y=1.0) for step in range(1, 6)]))
    found = running.result(pack.program.outputs[0].truth)
    assert asked == []
    assert not (found.values.any())
    assert not (found.known.any())
    assert not (found.fresh.any())


def test_a_signal_that_was_hidden_when_it_first_came_wakes_its_rules() -> None:
    pack = pack_of("update_ratio > 1", "x > 1", "y > 1")
    rows = [{"update_ratio": {"all": 2.0}, "skipped": 1.0}, {"x": 2.0}, {"y": 2.0}, {"update_ratio": {"all": 2.0}}]
    steps = [record(step, 1, **signals) for step, signals in enumerate(rows, start=1)]
    fired = [[(one.rule, one.step) for one in run(pack, steps, cuts=cuts)] for cuts in ((), (1, 2, 3))]
    assert fired[0] == fired[1]
    assert ("r0", 4) in fired[0]
