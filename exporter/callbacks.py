"""What the callbacks of libraries' trainers have in common: no fault of theirs reaches the trainer, and where a run goes on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from trainwarden.runfolder import RunFolder

from .identity import next_attempt
from .notices import Notices
from .resume import Resume

Method = TypeVar("Method", bound=Callable[..., Any])


class _Says(Protocol):
    _notices: Notices


def quietly(trainer: str) -> Callable[[Method], Method]:
    """Let no fault of a callback's method reach the trainer: it is said once and counted, and the method returns None."""

    def guard(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: _Says, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._notices.fault(f"{trainer} {method.__name__.strip('_')}", error)
                return None

        return cast(Method, guarded)

    return guard


def checkpoint_to_resume(run: str | None, settings: Mapping[str, Any], notices: Notices) -> str | None:
    """Return the path of the checkpoint that a plan names, else of the newest whole one, else None: a new run.

    ``run`` and ``settings`` are what the callback was given. Reads the run's folder and touches nothing.
    """
    try:
        folder, roots = settings.get("dir"), settings.get("roots")
        name = run or os.environ.get("TRAINWARDEN_RUN") or "run"
        found = RunFolder(name, None if folder is None else Path(folder))
        attempt = next_attempt(found, notices)
        resume = Resume.read(found, attempt, None if roots is None else [Path(root) for root in roots])
        return None if resume.target is None else resume.target.path
    except Exception as error:
        notices.fault("choosing what to resume from", error)
        return None
