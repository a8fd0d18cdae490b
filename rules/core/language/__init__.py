"""The rule language: what is seen in the records, written as expressions over signals in the step domain.

``load_pack`` reads a rule file; an ``Evaluator`` runs it over the blocks of one start and returns changed alerts. Rules say what is
seen; what to do about it is decided elsewhere. ``docs/language.md`` is the reference.
"""

from .errors import RuleErrors
from .evaluator import Evaluator
from .pack import SEVERITIES, VERDICTS, Pack, Rule, load_pack, load_packs

__all__ = ["SEVERITIES", "VERDICTS", "Evaluator", "Pack", "Rule", "RuleErrors", "load_pack", "load_packs"]
