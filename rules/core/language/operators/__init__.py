"""The operators, one family a file. A family imports what defines an operator and never another family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainwarden.rules.core.language.operator import Function

from .averages import FUNCTIONS as AVERAGES
from .baselines import FUNCTIONS as BASELINES
from .clock import FUNCTIONS as CLOCK
from .counting import FUNCTIONS as COUNTING
from .cycles import FUNCTIONS as CYCLES
from .elementary import FUNCTIONS as ELEMENTARY
from .few import FUNCTIONS as FEW
from .moments import FUNCTIONS as MOMENTS
from .order import FUNCTIONS as ORDER
from .presence import FUNCTIONS as PRESENCE
from .repetition import FUNCTIONS as REPETITION
from .resumes import FUNCTIONS as RESUMES
from .setbacks import FUNCTIONS as SETBACKS
from .shares import FUNCTIONS as SHARES
from .shifts import FUNCTIONS as SHIFTS
from .surprises import FUNCTIONS as SURPRISES
from .trend import FUNCTIONS as TREND
from .vectors import FUNCTIONS as VECTORS

#: The functions of the language by name.
FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        function.name: function
        for family in (
            AVERAGES,
            BASELINES,
            CLOCK,
            COUNTING,
            CYCLES,
            ELEMENTARY,
            FEW,
            MOMENTS,
            ORDER,
            PRESENCE,
            RESUMES,
            REPETITION,
            SETBACKS,
            SHARES,
            SHIFTS,
            SURPRISES,
            TREND,
            VECTORS,
        )
        for function in family
    }
)
