"""Unit tests of rules: series in steps, and which alerts must fire at which step.

``series`` reads the notation of values, ``testfile`` a whole file with all of its errors, ``run`` feeds the very evaluator that the
daemon has and compares. Nothing here knows incidents, policy or a clock.
"""
