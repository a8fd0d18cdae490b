"""DeepSpeed's engine with ZeRO: a small GPT-2 from scratch on this file's own text. Nothing is downloaded.

    python examples/deepspeed_zero.py [steps] [stage]
    torchrun --nproc-per-node=2 examples/deepspeed_zero.py [steps] [stage]

In bfloat16, with gradient accumulation and clipping. Its records stay in ``.trainwarden/deepspeed-zero``, its checkpoints in
``.trainwarden/deepspeed-zero-state``. Called again, it goes on from there, for as many steps more, with as many ranks as before: DeepSpeed's
own checkpoints hold the partitions of each. One of another number of ranks, or of a stage that cut otherwise, is refused.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trainwarden.exporter.adapters.deepspeed import attach

LENGTH, MICRO = 32, 2
#: What torchrun and DeepSpeed's launcher set, for one process.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def config(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
        "steps_per_print": 1000,
    }


def begin() -> None:
    """Start the process group."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so small a model, more cost more than they bring
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        # DeepSpeed would first compile a kernel for a minute and a half, of which training makes no use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")


def refuse_another_partition(folder: Path, stage: int) -> None:
    """End the process where the newest checkpoint is cut otherwise than this run's state: DeepSpeed has a bare assertion for it.

    What its files are called tells. Stages 1 and 2 cut alike; stage 0 does not cut, so any number of ranks loads it.
    """
    latest = folder / "latest"
    if not latest.is_file():
        return
    tag = folder / latest.read_text().strip()
    parts = len(list(tag.glob("*zero_pp_rank_*_optim_states.pt")))
    kind = 0 if not parts else 3 if any(tag.glob("zero_pp_rank_*_model_states.pt")) else 2
    ranks = torch.distributed.get_world_size()
    if kind == (2 if stage == 1 else stage) and parts in (0, ranks):
        return
    found = {0: "ZeRO 0", 2: "ZeRO 1 or 2", 3: "ZeRO 3"}[kind]
    cut, own = (f" with {count} rank{'' if count == 1 else 's'}" if count else "" for count in (parts, ranks))
    if torch.distributed.get_rank() == 0:
        print(
            f"deepspeed_zero: {tag} is of {found}{cut}, this run of ZeRO {stage}{own}, which DeepSpeed cannot load: "
            f"call it as before, or remove {folder} and {folder.with_name('deepspeed-zero')}",
            file=sys.stderr,
            flush=True,
        )
    torch.distributed.barrier()  # a launcher ends all with the first: not before it is said
    torch.distributed.destroy_process_group()
    sys.exit(1)


def main(steps: int = 40, stage: int = 2) -> None:
    """Train for some steps."""
    begin()
    folder = Path(os.environ.get("TRAINWARDEN_DIR") or ".trainwarden") / "deepspeed-zero-state"
    refuse_another_partition(folder, stage)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [text[at : at + LENGTH] for at in range(len(text) - LENGTH)]
    sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    engine, *_ = deepspeed.initialize(model=model, config=config(stage), model_parameters=model.parameters())

    exporter = attach(engine, run="deepspeed-zero")  # 1: on every rank, before anything is loaded
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    loader = exporter.wrap(
        loader, dataset="this file"
    )  # 2: each rank's share, sample positions, skips after a rollback
    path, state = engine.load_checkpoint(str(folder))  # what a plan names, else the newest; None in a run that begins
    if path is not None:
        loader.load_state_dict(state["loader"])

    first = engine.global_steps + 1
    while engine.global_steps < first - 1 + steps:
        for batch in loader:
            batch = batch.to(engine.device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()  # closes a record where the engine made an optimizer step
            if engine.global_steps == first - 1 + steps:
                break
    engine.save_checkpoint(str(folder), client_state={"loader": loader.state_dict()})  # reported as a checkpoint
    exporter.close()
    if engine.global_rank == 0:
        print(f"steps {first} to {engine.global_steps} under ZeRO {stage}, last loss {float(loss.detach()):.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
