"""What a checkpoint costs training: the stall of arriero's save against DeepSpeed's plain synchronous one, same state.

python benchmarks/checkpoint.py [--turns N] [--json]

One rank, ZeRO-1, bf16, 46 million parameters: 550 MB of masters and moments. Both engines stand in one process and
take turns; the files of each save are removed before the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

from arriero.engine.parallel import join_world

os.environ["MASTER_PORT"] = "29731"
world = join_world()

import torch

from arriero.checkpoint.save import Saver
from arriero.config.schema import Recipe
from arriero.engine.ds_config import compile_ds_config
from arriero.engine.engine import Engine, gather_parameter, parameter_placement
from arriero.engine.state import Batch
from arriero.model.build import build_model, model_config

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
VOCAB, SEQ_LEN = 16_384, 128


def make_engine() -> Engine:
    recipe = Recipe.model_validate(
        {
            "output_dir": "unused",
            "model": {"config": SHAPE, "tokenizer": "unused"},
            "data": {"sources": [{"path": "unused"}], "seq_len": SEQ_LEN},
            "train": {"global_batch_size": 2, "per_device_train_batch_size": 2, "max_steps": 9, "precision": "bf16"},
            "parallel": {"zero_stage": 1},
        }
    )
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = model_config(recipe.model, None, vocab_size=VOCAB, seq_len=SEQ_LEN, token_ids=ids)
    ds_config, _ = compile_ds_config(recipe, {}, "none", micro_batch=2, accumulation=1, dp=1)
    placement = parameter_placement(ds_config)
    model = build_model(recipe.model, config, seed=1, placement=placement, gather=gather_parameter)
    return Engine(recipe, model, ds_config, world)


def step(engine: Engine) -> float:
    """Seconds of one step."""
    ids = torch.randint(3, VOCAB, (2, SEQ_LEN + 1))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(SEQ_LEN).repeat(2, 1))
    began = time.perf_counter()
    engine.optimizer_step([batch], 2 * SEQ_LEN, 1e-4)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        rows = measure(Path(folder), arguments.turns)
    print(json.dumps(rows) if arguments.json else table(rows))
    os._exit(0)


def measure(folder: Path, turns: int) -> list[dict[str, Any]]:
    engine = make_engine()
    saver = Saver(folder / "ours", engine, world)
    (folder / "ours").mkdir()
    probe = torch.arange(3, 19)[None]
    rows = []
    for turn in range(turns + 1):  # the first one takes the memory of the copy, and isn't counted
        plain = step(engine)
        began = time.perf_counter()
        engine._engine.save_checkpoint(str(folder / "theirs"), tag="t")
        theirs = time.perf_counter() - began
        shutil.rmtree(folder / "theirs")
        began = time.perf_counter()
        saver.begin(step=turn + 1, trainer={}, data={}, probe=probe)
        ours = time.perf_counter() - began
        beside = step(engine)
        saved = saver.wait()
        assert saved is not None
        shutil.rmtree(saved.path)
        if turn:
            rows.append({"theirs_s": theirs, "stall_s": ours, "complete_s": saved.seconds, "step_s": plain, "step_beside_s": beside})  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    ratios = sorted(row["stall_s"] / row["theirs_s"] for row in rows)
    return "\n".join(
        [
            f"DeepSpeed's save         {middle['theirs_s']:.2f} s",
            f"arriero's stall          {middle['stall_s']:.3f} s, {statistics.median(ratios):.2f} of it "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} turns)",
            f"until it is complete     {middle['complete_s']:.2f} s, training meanwhile",
            f"a step                   {middle['step_s']:.2f} s, beside the writing {middle['step_beside_s']:.2f} s",
        ]
    )


if __name__ == "__main__":
    main()
