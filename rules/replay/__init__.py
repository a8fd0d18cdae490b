"""Replay: recorded runs through the same core as live ones.

``recordings`` finds out what files hold: journals (``journal``) or the logs of other programs. Of those, ``readers`` turn lines
into rows of numbers, ``columns`` rows into signals, and ``attempts`` signals into the records of starts. ``driver`` feeds the
core, and ``report`` is what comes out.
"""
