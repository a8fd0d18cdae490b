"""Runs at the start of every Python process below ``trainwarden exec``: waits for torch to be imported, then has it watched.

Until then it imports nothing but the standard library, and all it does is to look at the names of modules that are imported. It runs in
whatever interpreter the training command has, which may lack trainwarden, and in those of its tools, which may be of any age; so
it is written in what every Python since 2.7 reads, and says in one line what is missing. It gives way to the ``sitecustomize`` that would have
been found without it.
"""

import os
import sys

TYPE_CHECKING = False  # without typing, which would take longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any  # noqa: F401  # for the comments below

#: What ``trainwarden exec`` passes on to the processes below it.
OPTIONS = "TRAINWARDEN_EXEC"
#: Set once something was said, for the processes below the one that said it.
SAID = "TRAINWARDEN_EXEC_SAID"
HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib would be an import more for every process
#: The modules after whose import there is something to do.
AWAITED = ("torch", "torch._dynamo", "wandb.sdk.wandb_run", "torch.utils.tensorboard.writer", "tensorboardX.writer")


class Finder:
    """Stands first in ``sys.meta_path``; has the others find an awaited module and is told when it is loaded."""

    def find_spec(self, name, path=None, target=None):
        # type: (str, Any, Any) -> Any
        """Return the spec that the other finders have for ``name``, or None where it is none of ours."""
        if name not in AWAITED:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec):
        # type: (Any) -> None
        """Have ``loaded`` called after the module's own code; the loader keeps its type, and is as it was afterwards."""
        loader = spec.loader
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def exec_module(module):
            # type: (Any) -> None
            del loader.exec_module
            run(module)
            loaded()

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader without attributes of its own
            say(spec.name + " is loaded in a way that cannot be followed: not observed")


def loaded():
    # type: () -> None
    """Begin to watch, or to watch also what was loaded now. Never raises."""
    if "torch" not in sys.modules or not hasattr(sys.modules["torch"], "optim"):
        return  # wandb alone, or a torch that is still being imported
    try:
        from trainwarden.exporter.unmodified.attach import listen

        listen()
    except ImportError as error:
        if str(error.name).partition(".")[0] == "trainwarden":
            old = sys.hexversion < 0x030B0000
            remedy = "It needs Python 3.11" if old else "Install it there: " + sys.executable + " -m pip install ."
            say(sys.executable + " has no trainwarden: the training goes on, not observed. " + remedy)
        else:
            say("not observed: " + str(error))
    except Exception as error:
        say("not observed: " + type(error).__name__ + ": " + str(error))


def say(sentence):
    # type: (str) -> None
    """Write a line to standard error; once for a process and those below it."""
    if os.environ.get(SAID) or sys.stderr is None:
        return
    os.environ[SAID] = "1"
    sys.stderr.write("trainwarden exec: " + sentence + "\n")
    sys.stderr.flush()


def give_way():
    # type: () -> None
    """Take this folder off the search path, and let in the ``sitecustomize`` that stands behind it there, if one does."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != HERE]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


def wanted():
    # type: () -> bool
    """Say whether this interpreter runs below ``trainwarden exec`` and nothing turns that off."""
    off = os.environ.get("TRAINWARDEN_DISABLE", "").strip().lower() not in ("", "0", "false", "no")
    return bool(os.environ.get(OPTIONS)) and not off


if __name__ == "sitecustomize":
    if wanted() and sys.version_info >= (3,):
        sys.meta_path.insert(0, Finder())
    give_way()
