"""From records to decisions: the daemon, the command line and replay.

``core`` is pure: ``feed(state, input) -> effects``. The daemon and replay are two drivers of it; around them stand the
sources that pull records, the store, the outbox, the notifiers and the daemon's own HTTP API.
"""

if __name__.split(".")[0] != "trainwarden":
    raise ImportError("import trainwarden.rules, not the folder rules: it would be a second copy of the package")
