"""Stages of a pipeline hold different parameters, and the last one owns the loss: norms are of the whole, the loss is its owners'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.ranks.harness import close, records, run
from tests.exporter.runs import make, steps, tokens, watch

STEPS = 8

#: Two stages of two replicas each: ranks 0 and 1 embed, ranks 2 and 3 do the rest. Gradients are averaged within a stage.
BODY = """
import trainwarden.exporter.held as held
held.HOLD_SECONDS = 30.0  # also the first steps, read before it is known that others train other parameters, are combined
stage, replica = divmod(rank, 2)
peers = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
whole = make()
model = nn.Module()
if stage == 0:
    model.wte = whole.wte
else:
    model.ln_1, model.attn, model.mlp, model.lm_head = whole.ln_1, whole.attn, whole.mlp, whole.lm_head
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
exporter = watch(model, optimizer, folder, cadence=2)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    ids = tokens(10 * step + replica)
    loss = None
    if stage == 0:
        x = model.wte(ids[:, :-1])
        dist.send(x.detach(), rank + 2)
        gradient = torch.empty_like(x)
        dist.recv(gradient, rank + 2)
        x.backward(gradient)
    else:
        x = torch.empty(4, 11, 8)
        dist.recv(x, rank - 2)
        x.requires_grad_()
        hidden = x + model.attn(model.ln_1(x)).tanh()
        logits = model.lm_head(hidden + model.mlp(hidden).relu())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        dist.send(x.grad, rank - 2)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=peers)
        parameter.grad /= 2
    optimizer.step()
    exporter.step(loss)
exporter.close()
say(notices=exporter.notices)
"""


@pytest.mark.slow
def test_norms_are_of_the_whole_model_and_the_loss_is_that_of_its_owners(tmp_path: Path) -> None:
    ended = run(f"STEPS = {STEPS}\n{BODY}", tmp_path)
    assert [each.said["notices"] for each in ended] == [[]] * 4

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path, run="one", cadence=2)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = []
        for replica in range(2):
            ids = tokens(10 * step + replica)
            losses.append(nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    reference = steps(exporter, tmp_path, run="one")

    ranks = [records(tmp_path, rank) for rank in range(4)]
    for place, whole in enumerate(reference):
        own = [each[place] for each in ranks]
        for each in own:
            for name in ("loss", "grad_norm", "weight_rms", "moment_rms", "update_ratio", "grad_zero_ratio"):
                assert close(each.signals.get(name), whole.signals.get(name)), (whole.step, name)
            assert each.ranks["loss"].n == 2
            assert each.ranks["loss"].argmax in (2, 3)
        assert [each.value("rank_loss") is None for each in own] == [True, True, False, False]
