"""The garbage collector of a process that is done with starting: modules, rules and settings stay, records hold no cycles.

Left to itself it looks at everything again and again, which took a seventh of a replay. Called once by the programs, never by a library.
"""

from __future__ import annotations

import gc

#: New objects before a look at the young ones; looks before one at the older.
YOUNG, OLDER = 20_000, 20


def settle() -> None:
    """Set what is there now apart, and look less often at what comes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
