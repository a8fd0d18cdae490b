"""The pure core: what the records mean and what is to be done.

Nothing in this room reads a clock, a file, a socket or a random number. Everything it knows comes in as an
:mod:`~trainwarden.rules.core.inputs` value; everything it wants leaves as an :mod:`~trainwarden.rules.core.effects` value.
So a live daemon and a replay of the same inputs reach the same decisions, to the letter.
"""
