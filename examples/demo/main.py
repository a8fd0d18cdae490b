"""The demo from beginning to end: three runs of one training, the last of them watched, broken, rolled back, recovered."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from . import arms
from .corpus import CorpusError, build
from .follow import Daemon, Receiver, is_up
from .layout import DemoError, Layout, prepare, shown, size
from .poison import Answer, place, poison
from .processes import Process, ending, start, typed
from .scale import FULL, Scale
from .screen import Screen
from .story import IncidentStory, RunStory
from .summary import broken_promises, change, summarise, write

_WIDTH_OF_A_FILE = 120
_BEAT = 0.25  # seconds between two looks at everything
_UP_SECONDS = 60.0  # for daemon and receiver to answer
_AFTER_SECONDS = 30.0  # for the daemon to close the incident once the training has ended
_SHARD_STEPS = (46, 60)  # of a shard; what the reserve takes of it leaves 40 to 60


def main(arguments: list[str]) -> int:
    """Run the demo from a command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="trainwarden demo",
        description="A real training run breaks, is rolled back and recovers, on this machine, in a few minutes.",
    )
    parser.add_argument("--seed", type=int, default=2, help="of the weights, the order of the data and the poison (2)")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="folder for everything it writes (.demo)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: its processes must not outlive it
    return run(options.seed, options.dir)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def run(seed: int = 2, folder: Path = Path(".demo"), scale: Scale = FULL, console: Console | None = None) -> int:
    """Run the demo, leave its summary in ``folder`` and return the exit code: 0 if it kept all of its promises."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE)
    screen = Screen(console)
    try:
        with screen:
            layout = prepare(folder)
            answer = lay_out(layout, seed, scale)
            _introduce(screen, layout, seed, scale)
            _compare(screen, layout, answer, seed, scale)
            incidents = _treat(screen, layout, seed, scale)
            summary = summarise(layout, answer, incidents, screen.seconds)
            write(layout, summary, answer, incidents)
        return _close(screen, layout, summary)
    except (DemoError, CorpusError) as error:
        screen.plain(f"trainwarden demo: {error}")
        return 1
    except KeyboardInterrupt:
        screen.plain("interrupted; all processes of the demo were ended")
        return 130


def lay_out(layout: Layout, seed: int, scale: Scale) -> Answer:
    """Write the data, one shard of it poisoned, and return the answer.

    Raises:
        CorpusError: the standard library's sources do not suffice.
    """
    spare = _SHARD_STEPS[1] * scale.batch_size
    corpus = build(
        seed,
        rows=round(scale.steps * scale.batch_size / (1 - scale.reserve)) + spare,
        row_bytes=scale.context + 1,
        shard_rows=(_SHARD_STEPS[0] * scale.batch_size, _SHARD_STEPS[1] * scale.batch_size),
    )
    shard, answer = place(corpus, seed, scale)
    poison(corpus, shard, seed)
    corpus.write(layout.data)
    return answer


def _introduce(screen: Screen, layout: Layout, seed: int, scale: Scale) -> None:
    index = json.loads((layout.data / "index.json").read_text())
    screen.title(f"trainwarden demo, seed {seed}")
    screen.plain(
        f"A byte-level GPT ({scale.layers} layers of width {scale.width}) learns the Python standard library's sources for "
        f"{scale.steps} steps: {index['shards'][-1][2]} rows of {index['row_bytes']} bytes in {len(index['shards'])} shards, "
        "read in blocks, AdamW with beta2 0.999. There is no gradient clipping: it would have limited the damage, and the "
        "damage is what is to be seen here. One shard after the middle of the run is poisoned with long repeats and binary "
        "junk. The daemon that watches and the receiver that acts are not told where."
    )


def _compare(screen: Screen, layout: Layout, answer: Answer, seed: int, scale: Scale) -> None:
    """Run the clean and the untreated arm, side by side."""
    screen.title("1. The same run twice, for comparison, one thread each")
    arms.substitute(layout, "clean", answer.ranges)
    with ending([]) as processes:
        for arm, what in (("clean", "trains without the poison"), ("untreated", "trains on it, and nobody acts")):
            arms.start_comparison(processes, layout, arm, seed, scale)
            screen.say(arm, what)
        stories = {process.name: RunStory(screen, layout, process.name, scale.steps) for process in processes}
        running = list(processes)
        while running:
            time.sleep(_BEAT)
            for process in list(running):
                done = process.done()  # before the last look at its journal
                stories[process.name].tell()
                if done:
                    running.remove(process)
                    screen.done(process.name)
                    loss = json.loads((layout.arm(process.name) / "heldout.json").read_text())["loss"]
                    screen.say(process.name, f"ends with a held-out loss of {loss:.4f}", loud=True)
            screen.beat()


def _treat(screen: Screen, layout: Layout, seed: int, scale: Scale) -> list[dict[str, Any]]:
    """Run the treated arm with its daemon and its receiver; return the daemon's incidents."""
    screen.title("2. The same run again, watched: trainer, daemon and receiver are three processes")
    addresses = arms.configure(layout)
    with ending([]) as processes:
        daemon = start(processes, "the daemon", arms.daemon_command(layout), arms.log_of(layout, "daemon"))
        receiver = start(processes, "the receiver", arms.receiver_command(layout), arms.log_of(layout, "receiver"))
        _wait_for(lambda: is_up(addresses.daemon) and is_up(addresses.receiver), [daemon, receiver])
        config, settings = shown(layout.ops / "trainwarden.yml"), shown(layout.ops / "receiver.yml")
        screen.say("daemon", f"trainwarden run --config {config}  (http://{addresses.daemon})")
        screen.say("receiver", f"trainwarden receiver --config {settings}  (http://{addresses.receiver})")
        trainer = start(
            processes, "the training", arms.supervise_command(layout, seed, scale), arms.log_of(layout, "train")
        )
        screen.say("supervisor", "trainwarden supervise --run demo -- python -m trainwarden.demo.train …")

        run = RunStory(screen, layout, "treated", scale.steps, voice="trainer")
        story = IncidentStory(screen, Daemon(addresses.daemon), Receiver(addresses.receiver))
        ended: float | None = None
        while ended is None or (not story.over and time.monotonic() - ended < _AFTER_SECONDS):
            time.sleep(_BEAT)
            daemon.must_run()
            receiver.must_run()
            done = trainer.done()
            run.tell()
            story.tell()
            if done and ended is None:
                ended = time.monotonic()
                screen.done("trainer")
                screen.say("supervisor", f"the training is done after step {run.step}")
            screen.beat()
        return story.incidents


def _wait_for(up: Callable[[], bool], processes: list[Process]) -> None:
    end = time.monotonic() + _UP_SECONDS
    while not up():
        for process in processes:
            process.must_run()
        if time.monotonic() > end:
            raise DemoError(
                f"daemon or receiver does not answer after {_UP_SECONDS:.0f} s; see {processes[0].log.parent}"
            )
        time.sleep(_BEAT)


def _close(screen: Screen, layout: Layout, summary: dict[str, Any]) -> int:
    clean = summary["clean_loss"]
    screen.title("3. What came of it")
    screen.table(
        f"Loss on held-out text after step {summary['step']}",
        ("run", "loss", "against clean"),
        [
            (arm, f"{summary[f'{arm}_loss']:.4f}", "" if arm == "clean" else change(summary[f"{arm}_loss"], clean))
            for arm in ("clean", "untreated", "treated")
        ],
    )
    screen.table(
        "The incident",
        ("", "found", "in truth"),
        [
            ("first bad step", str(summary["onset_step"]), str(summary["poison_first_step"])),
            ("samples skipped, poisoned", str(summary["skip_samples"]), str(summary["poison_samples"])),
            ("positions", _spans(summary["skip_ranges"]), _spans(summary["poison_ranges"])),
            ("cause", str(summary["cause"]), "data"),
            ("verdict", str(summary["verdict"]), ""),
            ("rolled back to step", str(summary["target_step"]), ""),
            ("end", str(summary["state"]), ""),
        ],
    )
    run = layout.run_folder("treated").path
    screen.paths(
        f"To look at, in {shown(layout.root)} ({size(layout.root) / 1e6:.0f} MB):",
        [
            (what, shown(path))
            for what, path in (
                ("these numbers", layout.summary),
                ("the incident: evidence, plan, timeline", layout.incidents),
                ("the plan that the receiver wrote", run / "plans"),
                ("every step of every attempt", run),
                ("the daemon's configuration", layout.ops / "trainwarden.yml"),
                ("its log", layout.ops / "daemon.log"),
            )
        ],
    )
    screen.command("To have the recorded run judged again:", typed("replay", shown(run)))
    screen.plain("")
    broken = broken_promises(summary)
    if broken:
        screen.plain("This run does not show what the demo is meant to show:")
        for says in broken:
            screen.plain(f"  expected: {says}")
    screen.plain(f"{summary['seconds']:.0f} seconds.")
    return 1 if broken else 0


def _spans(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(f"{first} to {end}" for first, end in ranges) or "none"
