"""How large attention logits are: a bound above them, sampled rows below the largest, and a kernel's log-sum-exp beside it."""

from __future__ import annotations

from trainwarden.exporter.insight import insight
from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class AttentionLogit(Probe):
    """Signal ``attention_logit`` by kind: the largest over all attention of the step (:mod:`exporter.logits`)."""

    name = "attention_logit"

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return what was seen of each kind."""
        seen = insight(reading).logits
        return {"attention_logit": dict(seen)} if seen else {}
