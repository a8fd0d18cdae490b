"""The operators, one family a file. A family imports what defines an operator and never another family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainwarden.rules.core.language.operator import Function

from . import (
    averages,
    baselines,
    counting,
    cycles,
    elementary,
    moments,
    order,
    presence,
    trend,
    vectors,
)

#: The functions of the language by name.
FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        function.name: function
        for family in (averages, baselines, counting, cycles, elementary, moments, order, presence, trend, vectors)
        for function in family.FUNCTIONS
    }
)
