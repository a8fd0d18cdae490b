"""The baseline that is drawn: the rule language's own ``baseline``, evaluated over a recorded column."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwarden.rules.core.block import Block
from trainwarden.rules.core.block import Column as BlockColumn
from trainwarden.rules.core.language import load_pack
from trainwarden.rules.core.language.series import Frame

from .recorded import Column

#: Rows that are evaluated at once; any number gives the same values.
ROWS = 4096
_RULE = """
groups:
  - name: drawing
    rules:
      - alert: Drawn
        expr: baseline(loss) > 0
        labels: {severity: info, verdict: other}
"""


def usual(column: Column, stride: int = 1) -> Column:
    """Return ``baseline(loss)`` at each step of a column, where it is known: what a rule compares the value with."""
    if len(column.steps) == 0:
        return column
    program = load_pack(_RULE, "drawing").program
    operators = program.operators()
    wanted = program.outputs[0].value
    assert wanted is not None
    # A step that was written twice is evaluated once, as the stream of records does.
    new = np.r_[True, np.diff(column.steps) > 0]
    steps, values = column.steps[new], column.values[new]
    found: list[Any] = []
    with np.errstate(all="ignore"):
        for first in range(0, len(steps), ROWS):
            part = slice(first, first + ROWS)
            n = len(steps[part])
            loss = BlockColumn(values[part], np.ones(n, dtype=np.bool_))
            frame = Frame.of(Block(steps[part], np.zeros(n), np.full(n, stride), {("loss",): loss}, {}))
            results: list[Any] = []
            for node, operator in zip(program.nodes, operators, strict=True):
                results.append(operator.feed(frame, [results[of] for of in node.inputs]))
            found.append(results[wanted].values)
    level = np.concatenate(found)
    known = np.isfinite(level)
    return Column(steps[known], level[known])
