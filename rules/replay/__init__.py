"""Replay: recorded runs through the same core as live ones.

``journal`` finds and reads journals, ``driver`` merges their lines in time and feeds the core, ``report`` is what comes out.
"""
