"""All kinds, by name: first the healthy ones, the references among them, then the faults."""

from __future__ import annotations

from types import MappingProxyType

from . import data, healthy, instruments, numerics, optimizers, ranks, rates, resumes
from .fault import Fault

KINDS: MappingProxyType[str, type[Fault]] = MappingProxyType(
    {
        kind.name: kind
        for family in (healthy, data, rates, optimizers, numerics, ranks, resumes, instruments)
        for kind in family.KINDS
    }
)
