"""Rows of the embedding or the head were found damaged around the onset: what does that to single tokens is their data.

One shard in which a token stands thousands of times ruins its row and nothing else (docs/rules/TrainingEmbeddingRowDamaged.md). The
rule on it needs a window that a young run has not filled; the event names the tokens from the second look on. What the layers
above show behind the onset, such as a router's logits, is what the row does to them and no fault of the model's.

Rows that are not finite, and very many at once, are what any overflow or runaway leaves: they are named and weigh nothing.
"""

from __future__ import annotations

from trainwarden.rules.core.damaged import LOOK, between, few, sentence
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "No row of the tables of tokens was found damaged around the onset."

#: The rule that sees the same in the signals: where it speaks for a cause itself, the event is no second witness.
RULE = "TrainingEmbeddingRowDamaged"
#: What damaged rows weigh, and what they take from rules that blame the model behind them.
WEIGHT, BEHIND = 0.6, -0.7


def find(facts: Facts) -> Evidence:
    """Return findings where rows were found damaged at the onset, or no more than a look before or behind it."""
    found = facts.damaged
    if not found and not facts.trace.measured("embedding_row_ratio").any():
        return NotPossible("the rows of the embedding are not looked at in this run")
    if not found:
        return []
    one, says = found[0], sentence(found)
    if not _tells(facts):
        return [Finding(kind="damaged_rows", step=one.step, says=says)]
    test = (
        f"Look in the tokenizer what token {one.ids[0]} is, and whether batches of {between(one)} hold it again and again "
        "(trainwarden data show)."
    )
    findings = [Finding(kind="damaged_rows", step=one.step, cause="data", weight=WEIGHT, says=says, test=test)]
    blaming = [since for _, cause, since, _ in facts.blamed if cause == "model"]
    if blaming and min(blaming) >= facts.onset:
        findings.append(Finding(kind="damaged_rows", step=one.step, cause="model", weight=BEHIND, says=says))
    return findings


def _tells(facts: Facts) -> bool:
    """Say whether the rows may be what began it, and nobody else has said so."""
    found = facts.damaged
    step = found[0].step
    if any(name == RULE for name, _, _, _ in facts.blamed):
        return False
    if any(one.nonfinite for one in found) or not few(found):
        return False
    if bool(facts.nonfinite[facts.steps < step].any()):
        return False
    return step <= facts.onset + LOOK * facts.trace.stride()
