"""Complex parameters: norms, moments and updates are those of their real and imaginary parts, against a reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import events, norm64, rms64, steps, watch


class Spectral(nn.Module):
    """A filter in the frequency domain: complex weights, larger and smaller than what is worked on at once, beside real ones."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Parameter(torch.randn(120, 90, dtype=kind))
        self.head = nn.Parameter(torch.randn(90, dtype=kind))
        self.norm = nn.Parameter(torch.randn(90, dtype=self.mlp.real.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.fft.fft(x).to(self.mlp.dtype) @ self.mlp * self.head * self.norm
        out: torch.Tensor = 1e-3 * torch.view_as_real(seen).square().mean()
        return out


def real(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return real and imaginary parts, in float64."""
    found = []
    for tensor in tensors:
        each = tensor.detach().clone().resolve_conj()
        found += [each.real.double(), each.imag.double()] if each.is_complex() else [each.double()]
    return found


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, amsgrad=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_what_is_said_of_complex_parameters_is_of_their_real_and_imaginary_parts(
    tmp_path: Path,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    kind: torch.dtype,
    clips: bool,
) -> None:
    model = Spectral(kind)
    optimizer = make_optimizer(model.parameters())
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    wanted = []
    for _ in range(4):
        loss = model(torch.randn(16, 120, dtype=model.norm.dtype))
        optimizer.zero_grad()
        loss.backward()
        norm = norm64(real(p.grad for p in model.parameters() if p.grad is not None))
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = real(model.parameters())
        optimizer.step()
        after = real(model.parameters())
        moved = [one - other for one, other in zip(after, before, strict=True)]
        moments = {
            name: rms64(real(optimizer.state[p][name] for p in model.parameters()))
            for name in ("exp_avg", "exp_avg_sq")
            if make_optimizer is adamw
        }
        wanted.append((norm, rms64(after), rms64(moved), moments, rms64(real([model.head]))))
        exporter.step(loss)
    exporter.checkpoint(4, tmp_path / "saved")
    found = steps(exporter, tmp_path)
    for record, (norm, weight, update, moments, head) in zip(found, wanted, strict=True):
        assert record.value("grad_norm") == pytest.approx(norm, rel=1e-5)
        assert record.value("clip_ratio") == (pytest.approx(norm / 0.5, rel=1e-5) if clips else None)
        assert record.value("grad_zero_ratio") == 0.0
        assert record.value("weight_rms") == pytest.approx(weight, rel=1e-5)
        assert record.value("weight_rms", "head") == pytest.approx(head, rel=1e-5)
        assert record.value("update_ratio") == pytest.approx(update / weight, rel=1e-4)
        assert record.value("update_applied_ratio") == pytest.approx(update / weight, rel=0.1)  # of a sample
        for name, size in moments.items():
            assert record.value("moment_rms", name) == pytest.approx(size, rel=1e-5)
        assert record.value("nonfinite", "param") == 0.0
    (saved,) = events(tmp_path, "checkpoint")
    assert saved.fields["finite"] is True


def test_a_complex_parameter_that_is_not_finite_in_its_imaginary_part_makes_a_checkpoint_so(tmp_path: Path) -> None:
    model = Spectral(torch.complex64)
    exporter = watch(model, sgd(model.parameters()), tmp_path)
    with torch.no_grad():
        model.mlp.imag[3, 5] = float("inf")
    exporter.step(1.0)
    exporter.checkpoint(1, tmp_path / "saved")
    exporter.close()
    (saved,) = events(tmp_path, "checkpoint")
    assert saved.fields["finite"] is False
