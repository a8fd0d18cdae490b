"""Runs inside the training process, one per rank: sees every optimizer step and acts on a plan at start.

What never happens here: a host synchronisation on the training thread, an exception that reaches the trainer, a
request to anybody. Its HTTP is GET only.
"""

if __name__.split(".")[0] != "trainwarden":
    raise ImportError("import trainwarden.exporter, not the folder exporter: it would be a second copy of the package")

from .exporter import Exporter
from .vocabulary import token_classes

__all__ = ["Exporter", "token_classes"]
