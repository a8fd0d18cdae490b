"""How big the demo is: the numbers of its training run, in one place, the same for all its arms."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Scale:
    """One training run. Every field is an option of the training script (``batch_size`` is ``--batch-size``)."""

    steps: int = 640
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences a step."""
    context: int = 128
    """Bytes that the model reads at once; a row holds one more, the last target."""
    width: int = 128
    layers: int = 4
    heads: int = 4
    lr: float = 2e-3
    """Peak of the learning rate: a linear warm-up, then a linear decay to 2 % of it."""
    warmup_steps: int = 40
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 writes none."""
    keep_checkpoints: int = 8
    """Checkpoints that a run keeps of its line; it deletes older ones. A rollback goes back behind the onset, two hundred steps
    at most here, and wants others to fall back to; a daemon that was down catches up meanwhile."""
    reserve: float = 0.05
    """Share of the training rows that is held back to stand in for skipped ones."""

    def options(self) -> list[str]:
        """Return the command line options of the training script for this scale."""
        return [word for name, value in asdict(self).items() for word in (f"--{name.replace('_', '-')}", str(value))]


#: The run of ``trainwarden demo``: 0.9 million parameters, about a minute on one core of 2020.
FULL = Scale()
#: A run of the same shape with a smaller model, for tests.
SMALL = Scale(width=48, layers=2)

#: Names and types of the options, for the training script's parser.
OPTIONS: tuple[tuple[str, type], ...] = tuple((field.name, type(field.default)) for field in fields(Scale))
