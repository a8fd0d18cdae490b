"""The demo's model and its schedule."""

from __future__ import annotations

import math

import torch

from trainwarden.demo.model import GPT
from trainwarden.demo.scale import FULL, Scale
from trainwarden.demo.train import lr_share, parse

torch.set_num_threads(1)


def model(scale: Scale = FULL) -> GPT:
    torch.manual_seed(0)
    return GPT(scale.context, scale.width, scale.layers, scale.heads)


def test_it_has_about_a_million_parameters() -> None:
    assert 0.8e6 < sum(parameter.numel() for parameter in model().parameters()) < 1.2e6


def test_before_training_it_knows_nothing() -> None:
    rows = torch.randint(0, 256, (4, FULL.context + 1))
    assert abs(model().loss(rows).item() - math.log(256)) < 0.2


def test_a_byte_does_not_see_those_after_it() -> None:
    gpt = model()
    rows = torch.randint(0, 256, (1, 64))
    changed = rows.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 256
    with torch.no_grad():
        assert torch.allclose(gpt(rows)[0, :40], gpt(changed)[0, :40], atol=1e-6)


def test_the_rate_warms_up_to_its_peak_and_decays_to_the_end() -> None:
    shares = [lr_share(step, FULL) for step in range(FULL.steps)]
    assert shares[0] == 1 / FULL.warmup_steps
    assert max(shares) == 1.0
    assert shares.index(1.0) in (FULL.warmup_steps - 1, FULL.warmup_steps)
    assert 0.02 < shares[-1] < 0.025


def test_the_scale_goes_through_the_command_line_unchanged() -> None:
    scale = Scale(steps=77, lr=1e-3, reserve=0.1)
    _, read = parse(["--data", "d", "--out", "o", *scale.options()])
    assert read == scale
