"""The guard: leaves out an update whose gradient is not finite, or far too large. Only a line of the user's own imports it.

What never happens here: a host synchronisation, a collective of our own, a decision from a number that ranks could see differently.
"""

from .guard import Guard

__all__ = ["Guard"]
