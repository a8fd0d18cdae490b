"""Tuning: how often each rule would have fired on healthy logs, and which threshold fires as often as wanted.

``logs`` makes whole starts of what replay reads, ``threshold`` finds the one number in a rule that can be moved, ``search`` moves it,
``overrides`` writes a rule file with the numbers found. Nothing here judges: on healthy logs each firing is a false one.
"""
