"""The article's code as it stands, and its whole road in one script, under each launcher."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import Workshop

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"],
}

# The article's lines between its imports and its last sampler, with its own names.
SNIPPET = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
args = parser.parse_args()
args.data_path, args.data_split, args.data_output_path = ["code.jsonl"], "90,8,2", "cache"
args.seed, args.max_seq_len = 1234, 128
if args.local_rank != -1:
    torch.distributed.init_process_group("gloo")

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoTokenizer, default_data_collator
from arriero.data import create_pretrain_dataset

tokenizer = AutoTokenizer.from_pretrained("tokenizer")
train_dataset, eval_dataset = create_pretrain_dataset(
    args.local_rank,
    args.data_path,
    args.data_split,
    args.data_output_path,
    args.seed,
    tokenizer,
    args.max_seq_len
)
if args.local_rank == -1:
    train_sampler = RandomSampler(train_dataset)
    eval_sampler = SequentialSampler(eval_dataset)
else:
    train_sampler = DistributedSampler(train_dataset)
    eval_sampler = DistributedSampler(eval_dataset)
train_dataloader = DataLoader(
    train_dataset, collate_fn=default_data_collator, sampler=train_sampler, batch_size=4, num_workers=2
)
eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, sampler=eval_sampler, batch_size=4)
rows = sum(len(batch["input_ids"]) for batch in train_dataloader)
for batch in eval_dataloader:
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert batch["input_ids"].shape[1] == 128
    assert ((batch["labels"] == batch["input_ids"]) | (batch["labels"] == -100)).all()
print(f"SEEN {rows} OF {len(train_dataset)} AND {len(eval_dataset)}", flush=True)
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(launcher: str, script: Path, *arguments: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    port = ["--master_port", str(free_port())] if launcher == "deepspeed" else []
    done = subprocess.run(
        [*LAUNCHERS[launcher], *port, str(script), *arguments],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_snippet(workshop: Workshop, tmp_path: Path, launcher: str) -> None:
    (tmp_path / "code.jsonl").symlink_to(workshop.corpus)
    (tmp_path / "tokenizer").symlink_to(workshop.tokenizer)
    (tmp_path / "article.py").write_text(SNIPPET)
    output = run(launcher, tmp_path / "article.py", cwd=tmp_path)
    seen = [tuple(map(int, found)) for found in re.findall(r"SEEN (\d+) OF (\d+) AND (\d+)", output)]
    ranks = 1 if launcher == "python" else 2
    assert len(seen) == ranks
    rows, total, evaluation = seen[0]
    assert rows == -(-total // ranks)
    assert evaluation > 0
    # One preparation on this file system, whichever rank came first.
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


@pytest.fixture(scope="module")
def perplexities() -> dict[str, float]:
    return {}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_whole_road_in_one_script(
    workshop: Workshop, tmp_path: Path, launcher: str, perplexities: dict[str, float]
) -> None:
    from transformers import AutoModelForCausalLM

    stage = {"python": "1", "torchrun": "3", "deepspeed": "2"}[launcher]
    output = run(
        launcher,
        ROOT / "examples" / "deepspeed_loop.py",
        *("--data-path", str(workshop.corpus), "--tokenizer", str(workshop.tokenizer), "--output", "out"),
        *("--data-split", "90,2,8", "--max-seq-len", "128", "--max-steps-per-epoch", "8", "--num-train-epochs", "2"),
        *("--zero-stage", stage, "--no-bf16"),
        cwd=tmp_path,
    )
    found = re.findall(r"epoch (\d): loss ([\d.]+), perplexity ([\d.]+)", output)
    assert [epoch for epoch, _, _ in found] == ["0", "1"]
    assert float(found[1][2]) < float(found[0][2]) < 1024
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.num_parameters() > 400_000
    perplexities[launcher] = float(found[1][2])
    again = run(
        launcher,
        ROOT / "examples" / "deepspeed_loop.py",
        *("--data-path", str(workshop.corpus), "--tokenizer", str(workshop.tokenizer), "--output", "out"),
        *("--data-split", "90,2,8", "--max-seq-len", "128", "--max-steps-per-epoch", "8", "--num-train-epochs", "2"),
        *("--zero-stage", stage, "--no-bf16"),
        cwd=tmp_path,
    )
    assert "perplexity" not in again  # both epochs were done
