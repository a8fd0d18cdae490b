"""DeepSpeed: ``attach(engine)`` behind ``deepspeed.initialize``; the loop stays as it is.

The engine's own ``backward``, ``step``, ``save_checkpoint`` and ``load_checkpoint`` are listened in on. Under ZeRO an optimizer updates
flat partitions in float32, one or more for each group of parameters, and DeepSpeed remembers which elements of them belong to which
parameter; :mod:`exporter.partitions` asks it for that, so that what a rank measures of its partitions goes by parameter and group. Nothing here
issues a collective, or waits for the device; what DeepSpeed's own ``step`` waits for is not ours. No fault of this file reaches the
engine; only :func:`attach` raises, on an argument of no use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.utils.data import DataLoader

from trainwarden.exporter.checkpoints import catalogue
from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.hooks.replaced import go_through
from trainwarden.exporter.partitions import (
    FlatUpdates,
    class_names,
    count_of,
    is_swapped,
    norm_of,
    partitions_of,
    threshold_of,
    told_of,
)
from trainwarden.exporter.probes.learning_rate import rates
from trainwarden.exporter.probes.nonfinite import Nonfinite
from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.probes.replica_hash import halves, hash_of
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


def attach(engine: Any, run: str | None = None, **settings: Any) -> DeepSpeedExporter:
    """Watch an engine that ``deepspeed.initialize`` returned.

    Example::

        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        exporter = attach(engine, run="gpt-7b")
        loader = exporter.wrap(loader)                # sample positions, and skips after a rollback
        engine.load_checkpoint(folder)                # what a plan says, else the newest that may be loaded
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()                             # closes a record where the engine made an optimizer step
        exporter.close()

    Call it on every rank, before anything is loaded. ``settings`` are those of :class:`Exporter`.

    Raises:
        TypeError: it is no engine, one of a pipeline, or one without an optimizer. Or a wrong argument.
        ValueError: an argument is of no use.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"engine: {type(engine).__name__} is no DeepSpeedEngine; give what deepspeed.initialize returned"
        )
    if "PipelineEngine" in class_names(engine):
        raise TypeError(
            "engine: pipelines are not known to this adapter; give an engine of a model that is no PipelineModule"
        )
    if not isinstance(getattr(engine, "basic_optimizer", None), torch.optim.Optimizer):
        raise TypeError("engine: it has no optimizer, so there are no steps to watch")
    return DeepSpeedExporter(engine, run, **settings)


class DeepSpeedExporter(Exporter):
    """An :class:`Exporter` whose records the engine's own ``step`` closes. See :func:`attach`."""

    def __init__(self, engine: Any, run: str | None = None, **settings: Any) -> None:
        self._engine: Any = engine
        self._base: Any = engine.basic_optimizer
        partitions, why = partitions_of(engine)
        self._updates: FlatUpdates | None = None
        try:
            if engine.optimizer is not self._base:
                self._updates = FlatUpdates(engine.optimizer, self._base, partitions)
        except Exception as error:  # an optimizer of a making of its own
            why = f"nothing can be shown in the place of {type(self._base).__name__}: {error}"
        self._told = told_of(engine, [] if self._updates is None else partitions, why)
        self._begun = False
        self._saving: list[Future[None]] = []
        self._undo: list[Callable[[], Any]] = []
        self._shown = self._base if self._updates is None else self._updates.stand_in
        super().__init__(engine.module, self._shown, run, **settings)
        optimizer: Any = OptimizerSwappedToDisk() if is_swapped(engine) else self._base
        self._optimizers = [optimizer]  # what a plan resets, and whose rate it changes
        if why is not None:
            self._notices.say("partitions", f"norms and updates by group are left out: {why}")
        self._quietly("describing the engine", self._describe)
        self._quietly("listening in", self._attach)

    def wrap(self, loader: Any, **arguments: Any) -> Any:
        """See :meth:`Exporter.wrap`. Of the engine's own ``training_dataloader`` a torch DataLoader is made first, with the same batches."""
        if isinstance(loader, DeepSpeedDataLoader) and not loader.curriculum_learning_enabled:
            loader = DataLoader(
                loader.dataset,
                batch_size=loader.batch_size,
                sampler=loader.data_sampler,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                num_workers=loader.num_local_io_workers,
                drop_last=loader.dataloader_drop_last,
            )
        return super().wrap(loader, **arguments)

    def close(self, reason: str = "finished", code: int | None = 0) -> None:
        """See :meth:`Exporter.close`. The engine is as it was."""
        undo, self._undo = self._undo, []
        for one in undo:
            self._quietly("letting go of the engine", one)
        super().close(reason, code)

    # Attaching.

    def _quietly(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let no fault of ours reach the engine."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._notices.fault(f"DeepSpeed: {what}", error)
            return None

    def _attach(self) -> None:
        engine = self._engine
        for name, around in (
            ("backward", self._backward),
            ("step", self._stepping),
            ("clip_fp32_gradients", self._clipping_in_float32),
            ("save_checkpoint", self._save),
            ("load_checkpoint", self._load),
            ("_commit_decoupled_checkpoint", self._commit),
        ):
            self._listen(engine, name, around)
        self._undo.append(engine.register_forward_pre_hook(lambda *_: self._forward()).remove)
        if self._updates is not None and self._parts is not None:
            self._undo.append(self._updates.attach(self._parts.observer, self._parts.watched))
            self._parts.observer.join = _no_door  # type: ignore[method-assign]

    def _listen(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have a method of this one engine go through ``around``, if it has it."""
        if callable(getattr(owner, name, None)):
            self._undo.append(go_through(owner, name, around))

    def _describe(self) -> None:
        """Tell what the engine is, and take back what was told of the optimizer that stands in for its own."""
        parts, engine = self._parts, self._engine
        if parts is None:
            return
        trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        kinds = set() if self._updates is None else {partition.flat.dtype for partition in self._updates.partitions}
        parts.fields["deepspeed"] = {
            "version": str(deepspeed.__version__),
            "zero_stage": int(engine.zero_optimization_stage()),
        }
        parts.fields["loss_scaling"] = bool(engine.fp16_enabled())
        parts.observer.clips = engine.gradient_clipping() > 0
        parts.fields["parameters"] = sum(_numel(parameter) for parameter in engine.module.parameters())
        if kinds and parts.fields.get("optimizer_state_dtype") is not None:
            parts.fields["optimizer_state_dtype"] = str(max(kinds, key=lambda kind: torch.finfo(kind).eps))[6:]
        preflight = parts.recorder._preflight
        if preflight is not None and self._updates is not None:
            elements = sum(_numel(parameter) for parameter in trained)
            preflight._known = replace(
                preflight._known, left_out=(), foreign=0, half_state=torch.float16 in kinds, elements=elements
            )
        whole = [] if engine.zero_optimization_stage() > 2 else list(engine.module.parameters())
        probe = _OfTheEngine(whole if parts.watched.weighed and parts.identity.world_size > 1 else [])
        parts.observer._probes.append(probe)
        parts.recorder.join(probe)

    # Steps.

    def _forward(self) -> None:
        if not self._begun and self._engine.training:
            self._begin()

    def _begin(self) -> None:
        """Before the first step: what is loaded is loaded by now. The plan's reset and rate go to the engine's own optimizer."""
        if self._begun:
            return
        self._begun = True
        self.resumed(int(self._engine.global_steps))
        self._quietly("carrying out the plan", self._carried_out)

    def _carried_out(self) -> None:
        resume, wrapped = self._resume, self._engine.optimizer
        if resume is None:
            return
        resume.closed(self._step)  # a step of the engine is several of its optimizer: those do not count
        if resume.plan is None or not resume.plan.reset_optimizer:
            return
        if "_hp_optimizer_states_linked" in vars(wrapped):
            wrapped._hp_optimizer_states_linked = False  # its links are to the moments that were cleared
        left = count_of(self._base)
        if isinstance(left, int) and left and "reset_optimizer" not in self._not_applied():
            self._notices.say("reset", f"the optimizer counts {left} steps after the reset that the plan asks for")

    def _not_applied(self) -> dict[str, str]:
        applied = None if self._resume is None else self._resume._applied
        return {} if applied is None else dict(applied.not_applied)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self._quietly("a micro-batch's loss", self._keep_loss, *args, **kwargs)
        return original(*args, **kwargs)

    def _keep_loss(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any) -> None:
        """Take a micro-batch's loss. The engine divides it by their number, unless it is told that the script has."""
        if isinstance(loss, Tensor):
            with torch.no_grad():
                self.micro(loss if scale_wrt_gas else loss.detach() * self._engine.gradient_accumulation_steps())

    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        self._begin()
        before, scale = engine.global_steps, self._quietly("the loss scale", _loss_scale, engine)
        due = self._quietly("looking for the step's end", engine.is_gradient_accumulation_boundary)
        try:
            answer = original(*args, **kwargs)
        except Exception:
            if due:
                self._record(scale)  # DeepSpeed gives up where its loss scale can fall no further
            raise
        if engine.global_steps > before:
            self._record(scale)
        return answer

    def _record(self, scale: float | None) -> None:
        if self._parts is not None and self._live() is not None:
            self._parts.observer._guarded(self._finish, scale)
        self.step()

    def _finish(self, scale: float | None) -> None:
        """Put down what the engine found out itself."""
        parts, wrapped = self._parts, self._engine.optimizer
        assert parts is not None
        if self._updates is not None:
            self._updates.broken_off()
        observer = parts.observer
        overflow = getattr(wrapped, "overflow", None)
        skipped = overflow is True
        now = _loss_scale(self._engine)
        if scale is not None and now is not None:
            observer.trainer_scaled(torch.full((), scale), torch.full((), now), skipped)
        elif isinstance(overflow, bool):
            observer.sheet.add("found_inf", torch.full((), float(skipped)), id(self._shown))
            if skipped:
                observer.sheet.host["lr.nominal"] = {0: rates(self._base)}
        norm = norm_of(wrapped)
        if norm is None or skipped:
            return
        clip = threshold_of(wrapped)
        observer.norm_taken(norm, clip)
        if clip is not None and not observer.sheet.captures:
            observer.sheet.add("clip", torch.as_tensor(norm).detach().reshape(()), clip)

    def _clipping_in_float32(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Without ZeRO and in float32 the engine clips in a way of its own, and keeps no norm."""
        self._quietly("norms before clipping", self._before_clipping)
        return original(*args, **kwargs)

    def _before_clipping(self) -> None:
        parts, engine = self._parts, self._engine
        if parts is None or self._live() is None:
            return
        observer = parts.observer
        observer.gradients_ready([parameter for parameter in engine.module.parameters() if parameter.grad is not None])
        squares = [
            values.double().square().sum() for capture in observer.sheet.captures for _, values in capture.pieces
        ]
        if squares and engine.mpu is None:
            observer.norm_taken(torch.stack(squares).sum().sqrt(), float(engine.gradient_clipping()))

    # Checkpoints.

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.phase("checkpoint"):
            answer = original(*args, **kwargs)
        self._quietly("reporting a checkpoint", self._saved, _arguments(original, args, kwargs), answer)
        return answer

    def _saved(self, given: dict[str, Any], answer: Any) -> None:
        """Report what was saved: DeepSpeed comes back once every rank has written its part, but for engines that save on their own."""
        engine, step = self._engine, int(self._engine.global_steps)
        tag = given.get("tag")
        folder = Path(given["save_dir"])
        tag = f"global_step{step}" if tag is None else str(tag)
        path = folder / tag
        if engine.checkpoint_engine.is_decoupled():
            self._saving.append(Future())
            self.checkpoint(step, path, future=self._saving[-1])
            return
        why = None if answer is not False else "DeepSpeed says that it did not save"
        if why is None and not (path.is_dir() and any(path.iterdir())):
            why = "nothing lies there"
        if why is None and given.get("save_latest", True) and engine.global_rank == 0 and _latest(folder) != tag:
            why = f"{folder / 'latest'} does not name it"
        if why is None:
            self.checkpoint(step, path)
        else:
            self.event("checkpoint", step=step, path=str(path.absolute()), complete=False, error=why)

    def _commit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed asks at every step whether a save of its own thread is done, waits for it then, and has it count from here on."""
        pending = self._saving and self._engine.checkpoint_engine.get_commit_info() is not None
        answer = original(*args, **kwargs)
        if pending:
            saving, self._saving = self._saving, []
            for future in saving:
                self._quietly("reporting a checkpoint", future.set_result, None)
        return answer

    # Where the run goes on.

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _arguments(original, args, kwargs)
        chosen = self._quietly("choosing what to load", self._chosen, given)
        if chosen is not None:
            if not chosen:
                return None, None  # as DeepSpeed answers where there is nothing
            given.update(chosen)
            answer = original(**given)
        else:
            answer = original(*args, **kwargs)
        self._quietly("looking at what was loaded", self._loaded, given, answer)
        return answer

    def _chosen(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return what to load in place of the newest: {} for nothing at all, None to load as it is asked for."""
        folder, tag = Path(given["load_dir"]), given.get("tag")
        target = self.resume()
        if tag is not None:
            if target is not None and (folder / str(tag)).absolute() != Path(target.path).absolute():
                self._notices.say("tag", f"the script loads {folder / str(tag)} by its tag, and not {target.path}")
            return None
        if target is not None:
            path = Path(target.path)
            return {"load_dir": str(path.parent), "tag": path.name}
        resume = self._resume
        newest = _latest(folder)
        if newest is None or resume is None:
            return None
        path = (folder / newest).absolute()
        known = any(checkpoint.path == str(path) for checkpoint in catalogue(self._folder))
        if resume.plan is None and not known:
            return None  # from before anybody watched
        self._notices.say(
            "newest", f"{path} is not loaded: {'; '.join(resume.notices) or 'the plan begins from scratch'}"
        )
        return {}

    def _loaded(self, given: dict[str, Any], answer: Any) -> None:
        """Record what the optimizer counts now: a counter that was not in the checkpoint, or was loaded all the same, shows here.

        Both have been seen (tr8b-104B chronicles: a flag that leaves the optimizer out was ignored, and Adam's step was not saved).
        """
        if not answer or answer[0] is None:
            return
        if self._started:
            self._notices.say(
                "loaded late", "a checkpoint was loaded after the first step: its records go on in the old numbers"
            )
        engine, base = self._engine, self._base
        asked = bool(given.get("load_optimizer_states", True)) and not given.get("load_module_only", False)
        count, steps, skipped = count_of(base), int(engine.global_steps), int(engine.skipped_steps)
        self.event(
            "loaded",
            step=steps,
            path=str(Path(given["load_dir"]).absolute() / str(given.get("tag") or _latest(Path(given["load_dir"])))),
            optimizer_states=asked,
            skipped_steps=skipped,
            optimizer_step=count,
        )
        if (
            asked
            and isinstance(count, int)
            and count < 2
            and steps - skipped > 1
            and type(base).__name__.lower().endswith(("adam", "adamw"))
        ):
            self._notices.say(
                "counter",
                f"the optimizer counts no steps after loading {steps}: its corrections of the moments begin anew",
            )
        if not asked and isinstance(count, int) and count > 0:
            self._notices.say(
                "states",
                f"the optimizer counts {count} steps, though the checkpoint was to be loaded without its states",
            )


class OptimizerSwappedToDisk:
    """Stands where a plan looks for the optimizer to reset, if that keeps its state in files: it is no torch optimizer, and refused."""


class _OfTheEngine(Probe):
    """What the engine alone knows: ``skipped`` without a loss scale, and ``param_hash`` of what it gathers on every rank after a step."""

    name = "engine"

    def __init__(self, whole: Sequence[Tensor]) -> None:
        self._whole = whole

    def close(self, closing: Closing) -> None:
        """Hash the parameters that the ranks computed parts of and share since."""
        if self._whole and closing.regular:
            for device in dict.fromkeys(parameter.device for parameter in self._whole):
                members = [tensor.detach() for tensor in self._whole if tensor.device == device and tensor.numel()]
                closing.sheet.add("replica.hash", halves(hash_of(members)))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return whether the engine left the update out; without a loss scale to blame, the gradient itself was not finite then."""
        if reading.skipped is None:
            return {}
        found: dict[str, Value] = {"skipped": 1.0 if reading.skipped else 0.0}
        if reading.skipped and "loss_scale" not in reading.values:
            seen = Nonfinite().signals(reading).get("nonfinite")
            found["nonfinite"] = {**(seen if isinstance(seen, dict) else {}), "grad": 1.0}
        return found


def _numel(parameter: Any) -> int:
    """Return the elements of the whole parameter, also where ZeRO 3 has put it away."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _no_door(door: Any, probe: Any) -> None:
    """Refuse who would undo updates: DeepSpeed makes them group by group, and copies them to the model's own parameters itself.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{type(door).__name__}: it cannot undo the updates of the optimizer that DeepSpeed wraps; what is not finite DeepSpeed skips "
        "itself (check_grad_overflow)"
    )


def _loss_scale(engine: Any) -> float | None:
    """Return the scale that the engine keeps itself, None without float16. DeepSpeed keeps a plain number."""
    if not engine.fp16_enabled():
        return None
    scale = engine._get_optimizer_loss_scale()
    return float(scale) if isinstance(scale, int | float) else None


def _latest(folder: Path) -> str | None:
    """Return the tag that DeepSpeed would load from a folder."""
    try:
        return (folder / "latest").read_text().strip() or None
    except OSError:
        return None


def _arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return dict(given.arguments)
