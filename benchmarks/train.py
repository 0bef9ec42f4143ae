"""A training step against Hugging Face Trainer + DeepSpeed, and against its own matrix products and attention alone.

    python benchmarks/train.py                            both sizes, one and two ranks: about twenty minutes
    python benchmarks/train.py --sizes demo --ranks 1     a first look
    python benchmarks/train.py --json                     one object a line instead of tables

All sides train the same model on the same rows (8 of 256 tokens per rank, ZeRO-2, bf16, torch's AdamW, clipping at 1) and
are alive at once, each in processes of its own; they take turns of a few steps, so that whatever else the machine does
meets all of them. Times are medians over steps, ratios medians over turns; those of rank 0's processor time are given as
well, which hold where other programs take the cores away. The *floor* does nothing but the products of the
model's matrices, forward and both of backward, and its attention, in tensors that are there already: once with the
attention that the step uses and once with torch's scaled_dot_product_attention.

Where there is a GPU, a 1B-class model at 4,096 tokens is timed as well, with its MFU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "demo": {
        "shape": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
        "vocab": 8192,
    },
    "50M": {
        "shape": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
        "vocab": 16384,
    },
    "1B": {
        "shape": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
        | {"num_attention_heads": 32, "num_key_value_heads": 4},
        "vocab": 32000,
        "seq_len": 4096,
        "rows": 4,
    },
}
# Dense bf16 peak of one device, FLOP/s, from the makers' data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
# Where a worker's figures go.
answers: Any = sys.stdout
SIDES = ("arriero", "arriero, not compiled", "Trainer + DeepSpeed", "floor", "floor with sdpa")


@dataclass(frozen=True)
class Case:
    """One model with its rows."""

    size: str

    @property
    def shape(self) -> dict[str, Any]:
        return SIZES[self.size]["shape"]

    @property
    def vocab(self) -> int:
        return SIZES[self.size]["vocab"]

    @property
    def seq_len(self) -> int:
        return SIZES[self.size].get("seq_len", 256)

    @property
    def rows(self) -> int:
        return SIZES[self.size].get("rows", 8)


# -------------------------------------------------------------------------------------------------- one side, one rank


class Turns:
    """Steps are taken when the process that measures says so; rank 0 hears it and answers with their seconds."""

    def __init__(self) -> None:
        self.left = 0
        self.seconds: list[tuple[float, float]] = []
        self.began = (0.0, 0.0)

    def begin_step(self) -> bool:
        """Wait for a turn if none is on; False when all are over."""
        import torch.distributed as dist

        if self.left == 0:
            told: list[Any] = [sys.stdin.readline().strip() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(told)
            self.left, self.seconds = int(told[0] or 0), []
            self.began = (time.perf_counter(), time.process_time())
        return self.left > 0

    def end_step(self) -> None:
        import torch
        import torch.distributed as dist

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = (time.perf_counter(), time.process_time())
        self.seconds.append((now[0] - self.began[0], now[1] - self.began[1]))
        self.began, self.left = now, self.left - 1
        if self.left == 0 and dist.get_rank() == 0:
            print(json.dumps(self.seconds), file=answers, flush=True)


def row_of(case: Case, index: int) -> Any:
    import torch

    draw = torch.Generator().manual_seed(index)
    return torch.randint(case.vocab, (case.seq_len + 1,), generator=draw)


def arriero_side(case: Case, compiled: bool) -> None:
    from arriero.engine.parallel import join_world, leave_world

    world = join_world()
    import torch

    from arriero.config.schema import ModelShape, Recipe
    from arriero.engine.ds_config import compile_ds_config
    from arriero.engine.engine import Batch, Engine, gather_parameter, parameter_placement
    from arriero.model.build import build_model, model_config
    from arriero.planner.arithmetic import parameter_count

    recipe = Recipe.model_validate(
        {
            "output_dir": "unused",
            "model": {"config": case.shape, "tokenizer": "unused"},
            "data": {"sources": [{"path": "unused"}], "seq_len": case.seq_len},
            "train": {"global_batch_size": case.rows * world.size, "max_steps": 1, "precision": "bf16"}
            | {"per_device_train_batch_size": case.rows},
            "parallel": {"zero_stage": 2},
        }
    )
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = model_config(recipe.model, None, vocab_size=case.vocab, seq_len=case.seq_len, token_ids=ids)
    total = parameter_count(ModelShape(**case.shape), case.vocab)
    ds_config, _ = compile_ds_config(
        recipe, {}, "none", micro_batch=case.rows, accumulation=1, dp=world.size, parameters=total
    )
    placement = parameter_placement(ds_config)
    model = build_model(recipe.model, config, seed=1, placement=placement, gather=gather_parameter)
    engine = Engine(recipe, model, ds_config, world)
    if compiled:
        engine.compile_layers()
    positions = torch.arange(case.seq_len).repeat(case.rows, 1)
    turns, step = Turns(), 0
    while turns.begin_step():
        first = (step * world.size + world.rank) * case.rows
        rows = torch.stack([row_of(case, first + n) for n in range(case.rows)])
        batch = Batch(*(part.to(world.device) for part in (rows[:, :-1], rows[:, 1:], positions)))
        # As in the loop: one small sum over the ranks gives the loss its divisor.
        targets, _ = world.total([rows[:, 1:].numel(), 0.0]).tolist()
        engine.optimizer_step([batch], int(targets), 1e-4)
        turns.end_step()
        step += 1
    leave_world()


def trainer_side(case: Case) -> None:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = row_of(case, index)[:-1]
            return {"input_ids": ids, "labels": ids}

    if os.environ["WORLD_SIZE"] == "1":
        # An all-reduce for ranks on one host, compiled at the first start for half a minute: one rank has no use for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    turns = Turns()

    class Take(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not turns.begin_step():
                os._exit(0)  # there is no quicker way out of a Trainer

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.end_step()

    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    ds_config = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": adam},
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=case.vocab, max_position_embeddings=case.seq_len, **case.shape))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.rows,
            max_steps=1_000_000,
            logging_steps=10,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            deepspeed=ds_config,
            ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Take()]).train()


def floor_side(case: Case, own_attention: bool) -> None:
    from arriero.engine.parallel import join_world, leave_world

    world = join_world()
    import torch
    from torch.nn import functional

    from arriero.model.attention import block_attention_forward

    shape = case.shape
    hidden, wide, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, key_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    width, tokens = hidden // heads, case.rows * case.seq_len

    def normal(*size: int) -> Any:
        return torch.randn(*size, device=world.device).to(torch.bfloat16)

    per_layer = [(hidden, heads * width), *[(hidden, key_heads * width)] * 2, (heads * width, hidden)]
    per_layer += [(hidden, wide)] * 2 + [(wide, hidden)]
    inputs = {size: normal(tokens, size) for size in {hidden, wide, heads * width, key_heads * width}}
    inputs[case.vocab] = normal(tokens, case.vocab)
    weights = [[normal(out, into) for into, out in per_layer] for _ in range(layers)] + [[normal(case.vocab, hidden)]]
    query, key, value = (
        normal(case.rows, case.seq_len, count, width).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    )
    above = normal(case.rows, case.seq_len, heads, width)

    def attend() -> Any:
        if own_attention and world.device.type == "cpu":
            return block_attention_forward(torch.nn.Module(), query, key, value, None)[0]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)

    turns = Turns()
    while turns.begin_step():
        for layer in weights:
            for weight in layer:
                out, into = inputs[weight.shape[0]], inputs[weight.shape[1]]
                functional.linear(into, weight)
                torch.mm(out, weight)
                torch.mm(out.T, into)
            if len(layer) > 1:
                attend().backward(above)
                query.grad = key.grad = value.grad = None
        turns.end_step()
    leave_world()


def work(side: str, case: Case) -> None:
    """One rank of one side; what libraries print goes to the error output, what was measured out alone."""
    global answers
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sides: dict[str, Callable[[], None]] = {
        "arriero": lambda: arriero_side(case, True),
        "arriero, not compiled": lambda: arriero_side(case, False),
        "Trainer + DeepSpeed": lambda: trainer_side(case),
        "floor": lambda: floor_side(case, True),
        "floor with sdpa": lambda: floor_side(case, False),
    }
    sides[side]()


# ---------------------------------------------------------------------------------------------------------- all of them


class Side:
    """The processes of one side."""

    def __init__(self, name: str, case: Case, ranks: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": port, "LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--side", name, "--sizes", case.size],
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=None if os.environ.get("ARRIERO_BENCH_VERBOSE") else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]

    def turn(self, steps: int) -> list[tuple[float, float]]:
        """Let it take these steps; each one's seconds on the clock and of rank 0's processor time."""
        first = self._processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        print(steps, file=first.stdin, flush=True)
        line = first.stdout.readline()
        if not line:
            raise SystemExit("a side ended; ARRIERO_BENCH_VERBOSE=1 shows why")
        return [(clock, processor) for clock, processor in json.loads(line)]

    def end(self) -> None:
        first = self._processes[0]
        assert first.stdin is not None
        print(0, file=first.stdin, flush=True)
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(case: Case, ranks: int, names: list[str], turns: int, steps: int, threads: int | None) -> dict[str, Any]:
    """Medians of each side, and the medians of the ratios within a turn; threads: of a rank, None: its share of cores."""
    threads = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    sides = {name: Side(name, case, ranks, threads) for name in names}
    try:
        for side in sides.values():
            side.turn(3)  # compiles, and touches its memory
        found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
        for _ in range(turns):
            for name, side in sides.items():
                found[name].append(side.turn(steps))
    finally:
        for side in sides.values():
            side.end()
    tokens = case.rows * case.seq_len * ranks
    clock, processor = (
        {name: [statistics.median(step[which] for step in turn) for turn in each] for name, each in found.items()}
        for which in (0, 1)
    )
    rows = {}
    for name in names:
        step_s = statistics.median(step[0] for turn in found[name] for step in turn)
        rows[name] = {"step_ms": 1e3 * step_s, "tokens_per_second": tokens / step_s}
        for kind, medians in (("", clock), ("_processor", processor)):
            rows[name] |= {
                f"times_trainer{kind}": _ratio(medians.get("Trainer + DeepSpeed"), medians[name]),
                f"floor_share{kind}": _ratio(medians.get("floor"), medians[name]),
                f"sdpa_floor_share{kind}": _ratio(medians.get("floor with sdpa"), medians[name]),
            }
    return {"size": case.size, "ranks": ranks, "threads": threads, "turns": turns, "steps": steps, "sides": rows}


def _ratio(one: list[float] | None, other: list[float]) -> float | None:
    """The median over turns of the one side's time in the other's."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True)) if one else None


def show(result: dict[str, Any]) -> None:
    """Ratios of clock times, and in brackets of processor times."""
    print(
        f"\n{result['size']}, {result['ranks']} rank(s) of {result['threads']} thread(s), {result['turns']} turns of {result['steps']} steps\n"
    )
    print("| side | step | tokens/s | × Trainer + DeepSpeed | floor / step | floor with sdpa / step |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name, row in result["sides"].items():
        cells = " | ".join(
            "–" if row[key] is None else f"{row[key]:.2f} ({row[f'{key}_processor']:.2f})"
            for key in ("times_trainer", "floor_share", "sdpa_floor_share")
        )
        print(f"| {name} | {row['step_ms']:.0f} ms | {row['tokens_per_second']:,.0f} | {cells} |", flush=True)


def on_gpu(turns: int, steps: int) -> None:
    """The 1B-class case, one rank, with its model FLOPs utilisation."""
    import torch

    from arriero.config.schema import ModelShape
    from arriero.planner.arithmetic import flops_per_token

    case, name = Case("1B"), torch.cuda.get_device_name()
    result = measure(case, 1, ["arriero", "arriero, not compiled"], turns, steps, None)
    show(result)
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    each = flops_per_token(ModelShape(**case.shape), case.vocab, case.seq_len)
    for side, row in result["sides"].items():
        used = each * row["tokens_per_second"]
        share = f"MFU {used / peak:.3f}" if peak else "no peak known for it"
        print(f"{side}: {used / 1e12:.0f} TFLOP/s on a {name}, {share}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["demo", "50M"], choices=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--threads", type=int, help="of each rank; without it, its share of the cores")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        work(args.side, Case(args.sizes[0]))
        return
    import torch

    for size in args.sizes:
        for ranks in args.ranks:
            result = measure(Case(size), ranks, args.sides, args.turns, args.steps, args.threads)
            print(json.dumps(result), flush=True) if args.json else show(result)
    if torch.cuda.is_available():
        on_gpu(args.turns, args.steps)
    else:
        print("no GPU here: the 1B-class case and its MFU are left out", file=sys.stderr)


if __name__ == "__main__":
    main()
