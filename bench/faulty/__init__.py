"""Runs with a fault planted into them, for ``bench/faults.py``: one file a family of faults, and what trains, judges and counts them.

``fault`` says what a fault may do to a training; ``data``, ``rates``, ``optimizers``, ``numerics``, ``ranks``, ``resumes``, ``instruments``
and ``healthy`` hold the kinds, ``kinds`` is their list. ``train`` is the program that trains. Nothing here tells the judgement
what was planted: it gets the records of the run and nothing else.
"""
