"""The loader side: who hands the trainer its batches knows their positions, can go back to one, and can leave data out.

One file a kind of loader: ``map_style``, ``stateful``, ``plain``. Nothing here touches a device or another rank.
"""

from .consumed import Consumed
from .skips import Excluded, Skip, Skips
from .watch import watch
from .watched import LoaderStateError, WatchedLoader

__all__ = ["Consumed", "Excluded", "LoaderStateError", "Skip", "Skips", "WatchedLoader", "watch"]
