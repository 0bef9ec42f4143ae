"""The plan against what happens: peak memory and step time of layouts that this machine can run; a Markdown table.

python benchmarks/plan.py              31 layouts on one and two CPU ranks: about fifteen minutes
python benchmarks/plan.py --only 4     the first ones

Memory is what torch holds in tensors at the peak of a step, counted storage by storage as operations make them; what
the process takes besides isn't in it. Of several ranks it is the fullest one's. Each layout measures the machine's rates first (as `arriero plan --calibrate`), so
the step time is planned from rates of the same minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SMALL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
WIDE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
VOCAB = 8192
STEPS = 4


def layouts() -> list[dict[str, Any]]:
    """Stages, ranks, checkpointing, sizes and precisions, each with the others varied."""
    found = []
    for ranks in (1, 2):
        for stage in (1, 2, 3):
            for again in (False, True):
                found.append(_layout(SMALL, ranks, stage, again, "bf16", 4))
        found.append(_layout(SMALL, ranks, 0, False, "fp32", 4))
        found.append(_layout(SMALL, ranks, 2, False, "fp32", 4))
        found.append(_layout(SMALL, ranks, 1, False, "bf16", 8))
        found.append(_layout(SMALL, ranks, 3, False, "fp32", 2))
        found.append(_layout(WIDE, ranks, 1, False, "bf16", 4))
        found.append(_layout(WIDE, ranks, 3, True, "bf16", 4))
    found.append(_layout(SMALL, 1, 1, False, "fp32", 2))
    found += [_layout(SMALL, 1, stage, 2, "bf16", 4) for stage in (1, 2, 3)]
    found += [_layout(SMALL, 2, 1, False, "bf16", 4, axis) for axis in ("tensor", "sequence", "pipeline")]
    return found


def _layout(
    shape: dict[str, int], ranks: int, stage: int, again: bool | int, precision: str, rows: int, axis: str = ""
) -> dict[str, Any]:
    """axis: of model parallelism, which then takes all ranks."""
    case = {"shape": shape, "ranks": ranks, "stage": stage, "again": again, "precision": precision, "rows": rows}
    return case | {"axis": axis}


def recipe_of(case: dict[str, Any]) -> Any:
    from arriero.config.schema import Recipe

    dp = 1 if case["axis"] else case["ranks"]
    axes = {f"{case['axis']}_parallel_size": case["ranks"]} if case["axis"] else {}
    return Recipe.model_validate(
        {
            "output_dir": "unused",
            "model": {"config": {**case["shape"], "vocab_size": VOCAB}, "tokenizer": "unused"},
            "data": {"sources": [{"path": "unused"}], "seq_len": 256},
            "train": {
                "global_batch_size": 2 * case["rows"] * dp,
                "per_device_train_batch_size": case["rows"],
                "max_steps": 100,
                "precision": case["precision"],
                "activation_checkpointing": case["again"],
            },
            "parallel": {"zero_stage": case["stage"], **axes},
        }
    )


# ------------------------------------------------------------------------------------------------------ one rank's part


def work(case: dict[str, Any], out: Path) -> None:
    """Be one rank: measure, and as rank 0 write what was planned and what happened."""
    import warnings

    warnings.filterwarnings("ignore")
    from arriero.engine.parallel import join_world, leave_world

    world = join_world()
    import torch

    from arriero.calibrate import measure_rates
    from arriero.engine.ds_config import compile_ds_config
    from arriero.engine.engine import Batch, Engine, gather_parameter, keep_part, parameter_placement
    from arriero.model.build import build_model, model_config
    from arriero.planner.arithmetic import parameter_count
    from arriero.planner.layouts import choose_layout

    recipe, rows = recipe_of(case), case["rows"]
    rates = measure_rates(world)
    world = world.arranged(choose_layout(recipe, recipe.model.config, world.size))
    parameters = parameter_count(recipe.model.config, VOCAB)
    ds_config, _ = compile_ds_config(
        recipe, {}, "none", micro_batch=rows, accumulation=2, dp=world.dp_size, parameters=parameters
    )
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = model_config(recipe.model, None, vocab_size=VOCAB, seq_len=256, token_ids=ids)
    model = build_model(
        recipe.model,
        config,
        seed=5,
        placement=parameter_placement(ds_config),
        gather=gather_parameter,
        keep_part=keep_part(world),
    )
    engine = Engine(recipe, model, ds_config, world)
    torch.manual_seed(world.dp_rank)  # ranks of one replica see the same rows
    tokens = torch.randint(3, VOCAB, (rows, 257))
    # Two documents a row, so that attention takes the way of packed rows.
    positions = torch.cat([torch.arange(128), torch.arange(128)]).repeat(rows, 1)
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions) for _ in range(2)]
    seconds, targets = [], 2 * rows * 256 * world.dp_size
    for number in range(STEPS + 1):
        began = time.perf_counter()
        engine.optimizer_step(batches, targets, 1e-4)
        seconds += [time.perf_counter() - began] if number else []
    peak = max(world.gather(peak_bytes(lambda: engine.optimizer_step(batches, targets, 1e-4), all_tensors())))
    if world.rank == 0:
        out.write_text(json.dumps({"seconds": statistics.median(seconds), "peak": peak, "rates": rates}))
    leave_world()


def peak_bytes(step: Any, before: Iterable[Any]) -> int:
    """Most bytes of tensor storages alive at once during ``step``, those of the tensors ``before`` it included."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive: dict[int, int] = {}
    counts = {"now": 0, "peak": 0}

    def forget(key: int) -> None:
        counts["now"] -= alive.pop(key, 0)

    def see(tensor: Any) -> None:
        if tensor.device.type == "meta":  # shapes alone, which DeepSpeed keeps of its weights
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key not in alive:
            alive[key] = storage.nbytes()
            counts["now"] += alive[key]
            counts["peak"] = max(counts["peak"], counts["now"])
            weakref.finalize(storage, forget, key)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            result = function(*arguments, **(keywords or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    see(leaf)
            return result

    for tensor in before:
        see(tensor)
    with Count():
        step()
    return counts["peak"]


def all_tensors() -> list[Any]:
    """Those of this process, gradients too."""
    import torch

    gc.collect()
    found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return found + [tensor.grad for tensor in found if tensor.grad is not None]


# ------------------------------------------------------------------------------------------------------------- the table


def planned(case: dict[str, Any], rates: dict[str, float]) -> tuple[int, float]:
    """(bytes, seconds) that the planner says of a layout on a rank with these rates."""
    from arriero.planner.arithmetic import Setup, parameter_count
    from arriero.planner.calibration import refined
    from arriero.planner.hardware import find_network, for_rank, this_cpu
    from arriero.planner.memory import estimate_memory, practice_of
    from arriero.planner.throughput import step_time

    recipe = recipe_of(case)
    layout = Setup(
        ranks=case["ranks"],
        **({case["axis"]: case["ranks"]} if case["axis"] else {}),
        zero_stage=case["stage"],
        micro_batch=case["rows"],
        accumulation=2,
        checkpoint_every=int(case["again"]),
    )
    device = for_rank(refined(this_cpu(), rates, ranks=case["ranks"]), case["ranks"])
    shape = recipe.model.config
    given = {
        "parameters": parameter_count(shape, VOCAB),
        "vocab_size": VOCAB,
        "seq_len": 256,
        "practice": practice_of(recipe, layout, on_gpu=False),
    }
    memory = estimate_memory(shape, layout, on_gpu=False, **given)
    return memory.allocated, step_time(shape, layout, device, find_network("ethernet-10"), **given).total


def measure(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case['ranks']}"]
        done = subprocess.run(
            [*command, __file__, "--case", json.dumps(case), "--out", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if not out.is_file():
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(out.read_text())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", type=int, default=None)
    arguments.add_argument("--case")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    if given.case:
        work(json.loads(given.case), given.out)
        return
    print(
        "| model | ranks | split | ZeRO | recomputed | precision | rows | peak MiB | planned | error | step s | planned | error |"
    )
    print("| --- | --: | --- | --: | --- | --- | --: | --: | --: | --: | --: | --: | --: |", flush=True)
    memory_errors, time_errors = [], []
    for case in layouts()[: given.only]:
        found = measure(case)
        size, seconds = planned(case, found["rates"])
        memory_errors.append(size / found["peak"] - 1)
        time_errors.append(seconds / found["seconds"] - 1)
        print(
            f"| {'small' if case['shape'] == SMALL else 'wide'} | {case['ranks']} | {case['axis'] or 'rows'} | {case['stage']} "
            f"| {('no', 'all', 'every second')[case['again']]} | {case['precision']} | {case['rows']} | {found['peak'] / 2**20:.1f} "
            f"| {size / 2**20:.1f} | {memory_errors[-1]:+.1%} | {found['seconds']:.3f} | {seconds:.3f} "
            f"| {time_errors[-1]:+.1%} |",
            flush=True,
        )
    for name, errors, goal in (("memory", memory_errors, 0.05), ("step time", time_errors, 0.15)):
        sizes = [abs(error) for error in errors]
        print(
            f"\n{name}: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}; "
            f"{sum(size <= goal for size in sizes)} of {len(sizes)} within {goal:.0%}"
        )


if __name__ == "__main__":
    main()
