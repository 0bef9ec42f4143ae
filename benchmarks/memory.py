"""Peak memory: of the loss at a large vocabulary, of recomputed layers, and of ranks that load one model; Markdown tables.

    python benchmarks/memory.py             all three: two minutes
    python benchmarks/memory.py loss        chunked loss against whole logits, vocabulary 128,256
    python benchmarks/memory.py layers      no, every second and every decoder layer recomputed
    python benchmarks/memory.py loading     a 135M-parameter folder under ZeRO-3 on one, two and four ranks

Each measurement is a process of its own. The first two are the resident peak (VmHWM) of one forward and backward pass in
bf16 over what was resident before it; the third is the anonymous memory (RssAnon, sampled every 5 ms), which ranks don't
share, while the model is made and its weights are read.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

LARGE_VOCABULARY = 128_256
# SmolLM2-135M's shape.
LOADED = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
LOADED_VOCABULARY = 49_152


def status_mb(key: str) -> float:
    """A line of /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def peak_of(work: Any) -> float:
    """MiB by which the resident peak of ``work()`` stands above what was resident before."""
    before = status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    work()
    return status_mb("VmHWM") - before


def model_of(shape: dict[str, Any], vocab: int, seq_len: int) -> Any:
    from contextlib import nullcontext

    import torch

    from arriero.config.schema import Model, ModelShape
    from arriero.model.build import build_model, model_config

    recipe = Model(config=ModelShape(**shape), tokenizer="unused")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = model_config(recipe, None, vocab_size=vocab, seq_len=seq_len, token_ids=ids)
    return build_model(recipe, config, seed=1, placement=nullcontext()).to(torch.bfloat16).train()


def pass_of(model: Any, rows: int, seq_len: int) -> None:
    import torch

    ids = torch.randint(3, model.causal_lm.config.vocab_size, (rows, seq_len + 1))
    positions = torch.arange(seq_len).repeat(rows, 1)
    loss, _ = model(ids[:, :-1], ids[:, 1:], positions)
    loss.backward()


def loss_case(kind: str, rows: int) -> float:
    """One pass of a narrow model with one layer: next to the logits the rest is small."""
    from arriero.model.loss import LossHead, plain_linear_cross_entropy

    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = model_of(shape, LARGE_VOCABULARY, 256)
    if kind == "whole":
        head: LossHead = model.causal_lm.lm_head
        head.forward = lambda hidden, targets: plain_linear_cross_entropy(  # type: ignore[method-assign,misc,assignment]
            hidden.flatten(0, -2), head.weight, targets.flatten()
        )
    return peak_of(lambda: pass_of(model, rows, 256))


def layers_case(every: int) -> float:
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "num_attention_heads": 8}
    model = model_of(shape, 1024, 256)
    if every:
        model.recompute_layers(every)
    return peak_of(lambda: pass_of(model, 8, 256))


def loading_rank(folder: Path) -> tuple[float, float]:
    """(peak, after loading) of this rank's anonymous memory over what it had before, MiB."""
    from arriero.engine.parallel import join_world, leave_world

    world = join_world()
    from arriero.config.schema import Model, Recipe
    from arriero.engine.ds_config import compile_ds_config
    from arriero.engine.engine import gather_parameter, parameter_placement
    from arriero.model.build import build_model, model_config

    recipe = Recipe.model_validate(
        {
            "output_dir": "unused",
            "model": {"model_name_or_path": str(folder)},
            "data": {"sources": [{"path": "unused"}]},
            "train": {"max_steps": 1, "global_batch_size": world.size, "per_device_train_batch_size": 1},
            "parallel": {"zero_stage": 3},
        }
    )
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model: Model = recipe.model
    config = model_config(model, folder, vocab_size=LOADED_VOCABULARY, seq_len=256, token_ids=ids)
    ds_config, _ = compile_ds_config(recipe, {}, "none", micro_batch=1, accumulation=1, dp=world.size)
    placement = parameter_placement(ds_config)
    # Imports come before the measurement.
    model_of({"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}, 8, 8)
    world.barrier()
    before = status_mb("RssAnon")
    peak, done = before, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, status_mb("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    kept = build_model(model, config, seed=1, placement=placement, folder=folder, gather=gather_parameter)
    done.set()
    sampler.join()
    after = status_mb("RssAnon")
    del kept
    leave_world()
    return peak - before, after - before


def make_folder(folder: Path) -> float:
    """A folder of the shape of SmolLM2-135M in bf16; its MiB."""
    model = model_of(LOADED, LOADED_VOCABULARY, 256).causal_lm
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20


# -------------------------------------------------------------------------------------------------------- measurements


def child(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", *arguments]
    return subprocess.Popen(command, env=os.environ | (env or {}), stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a measurement failed with {process.returncode}")
    return json.loads(out.splitlines()[-1])


def loss_table() -> None:
    print(f"\n| vocabulary {LARGE_VOCABULARY:,} | 1,024 tokens | 2,048 tokens |\n| --- | --: | --: |")
    for kind in ("whole", "chunked"):
        peaks = " | ".join(f"{answer(child('loss', kind, str(rows))):,.0f} MiB" for rows in (4, 8))
        print(f"| {kind} logits | {peaks} |", flush=True)


def layers_table() -> None:
    print("\n| activation_checkpointing | peak of a pass |\n| --- | --: |")
    for every, name in ((0, "false"), (2, "2"), (1, "true")):
        print(f"| {name} | {answer(child('layers', str(every))):,.0f} MiB |", flush=True)


def loading_table() -> None:
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as name:
        size = answer(child("folder", name))
        print(
            f"\n| ranks, a folder of {size:,.0f} MiB | peak, all ranks | after loading, all ranks |\n| --: | --: | --: |"
        )
        for ranks in (1, 2, 4):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            common |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            started = [
                child("loading", name, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)
            ]
            found = [answer(process) for process in started]
            peak, after = (sum(each[n] for each in found) for n in (0, 1))
            print(f"| {ranks} | {peak:,.0f} MiB | {after:,.0f} MiB |", flush=True)


def run_child(arguments: list[str]) -> None:
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, *rest = arguments
    if kind == "loss":
        value: Any = loss_case(rest[0], int(rest[1]))
    elif kind == "layers":
        value = layers_case(int(rest[0]))
    elif kind == "folder":
        value = make_folder(Path(rest[0]))
    else:
        value = loading_rank(Path(rest[0]))
    print(json.dumps(value), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=["loss", "layers", "loading"])
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args.child)
        return
    began = time.monotonic()
    for table in args.tables:
        {"loss": loss_table, "layers": layers_table, "loading": loading_table}[table]()
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
