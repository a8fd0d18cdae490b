"""Runs inside the training process, one per rank: sees every optimizer step and acts on a plan at start.

What never happens here: a host synchronisation on the training thread, an exception that reaches the trainer, a
request to anybody. Its HTTP is GET only.
"""

if __name__.split(".")[0] != "trainwarden":
    raise ImportError("import trainwarden.exporter, not the folder exporter: it would be a second copy of the package")

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exporter import Exporter
    from .vocabulary import token_classes

__all__ = ["Exporter", "token_classes"]


def __getattr__(name: str) -> Any:
    """Import what is asked for. The package alone brings nothing with it: processes that only might train import it too."""
    if name == "Exporter":
        from .exporter import Exporter

        return Exporter
    if name == "token_classes":
        from .vocabulary import token_classes

        return token_classes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
