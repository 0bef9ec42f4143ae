"""The whole DeepSpeed dictionary, from the recipe: a pure function, no "auto", every value that we depend on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from arriero.config.schema import Recipe
from arriero.errors import UserError

# Keys of raw DeepSpeed JSON that the recipe decides, by their path there, and the recipe's key for each.
OURS = {
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_clipping": "optim.max_grad_norm",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload_optimizer",
    "zero_optimization.cpu_offload": "parallel.offload_optimizer",
    "zero_optimization.offload_param.device": "parallel.offload_param",
    "zero_optimization.cpu_offload_param": "parallel.offload_param",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
    "torch_autocast.enabled": "train.precision",
    # Masters, moments and sums of gradients are fp32 in every precision.
    "bf16.bf16_master_weights_and_grads": "train.precision",
    "bf16.bf16_optimizer_states": "train.precision",
    "fp16.fp16_master_weights_and_grads": "train.precision",
    "data_types.grad_accum_dtype": "train.precision",
    "tensor_parallel.autotp_size": "parallel.tensor_parallel_size",
    "optimizer.type": "optim",
    "optimizer.params.lr": "optim.learning_rate",
    "optimizer.params.betas": "optim.adam_beta1, optim.adam_beta2",
    "optimizer.params.eps": "optim.adam_epsilon",
    "optimizer.params.weight_decay": "optim.weight_decay",
}

# The other top-level keys of DeepSpeed 0.19 that training reads; what stands in them is checked by DeepSpeed itself.
_PASSED_ON = {
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compile",
    "data_types",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "graph_harvesting",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "sparse_gradients",
    "steps_per_print",
    "timers",
    "torch_autocast",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}


def read_deepspeed_json(value: str | dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The raw DeepSpeed part of a recipe, and what to call it in errors; a path is read as JSON."""
    if isinstance(value, dict):
        return value, "deepspeed"
    try:
        raw = json.loads(Path(value).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"deepspeed: can't read {value}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"deepspeed: {value} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"deepspeed: {value} holds {type(raw).__name__}, expected an object")
    return raw, value


def compile_ds_config(
    recipe: Recipe, raw: dict[str, Any], origin: str, *, micro_batch: int, accumulation: int, dp: int
) -> tuple[dict[str, Any], list[str]]:
    """The dictionary for ``deepspeed.initialize``, and notes on what was filled in or left to DeepSpeed.

    raw: the user's own DeepSpeed JSON, ``origin`` its name. Values that repeat ours are fine and "auto" takes ours; a
    contradiction or an unknown key raises ``UserError`` with both sides, all at once.
    """
    compiled = _from_recipe(recipe, micro_batch, accumulation)
    known = _known_values(recipe, micro_batch, accumulation, dp)
    shares_rows = recipe.parallel.zero_stage == 3 and recipe.parallel.sequence_parallel_size > 1
    notes: list[str] = []
    problems: list[str] = []
    for path, value in _leaves(raw):
        path = re.sub(r"^bfloat16\b", "bf16", path)  # DeepSpeed's older name
        top = path.partition(".")[0]
        if path in known:
            _settle(path, value, known[path], origin, notes, problems)
        elif path == "zero_optimization.reduce_scatter" and value is False and shares_rows:
            problems.append(
                f"{origin}: {path} is False, but with ZeRO-3 and parallel.sequence_parallel_size "
                f"{recipe.parallel.sequence_parallel_size} only the reduce-scatter averages as the loss expects"
            )
        elif top == "scheduler":
            _settle_scheduler(path, value, recipe, origin, notes, problems)
        elif value == "auto":
            notes.append(f"{path}: auto in {origin}, left to DeepSpeed's default")
        elif top == "optimizer":
            if path != "optimizer.params.torch_adam":
                problems.append(f"{origin}: {path} is {value!r}, but the recipe's optim section builds the optimizer")
        elif isinstance(compiled.get(path), dict):
            problems.append(f"{origin}: {path} is {value!r}, expected an object")
        elif top in {"bf16", "fp16", "zero_optimization"} or top in _PASSED_ON:
            _put(compiled, path, value)
        else:
            problems.append(f"{origin}: {path}: DeepSpeed has no such key, or training doesn't read it")
    known_sections = _PASSED_ON | {path.partition(".")[0] for path in OURS} | {"scheduler", "zero_optimization"}
    problems += [
        f"{origin}: {key}: DeepSpeed has no such key, or training doesn't read it"
        for key, value in raw.items()
        if value == {} and key not in known_sections
    ]
    if problems:
        raise UserError(
            "the deepspeed section contradicts the recipe:\n" + "\n".join(f"  {problem}" for problem in problems),
            "Remove these keys, set them to the recipe's value, or change the recipe.",
        )
    return compiled, notes


def _from_recipe(recipe: Recipe, micro_batch: int, accumulation: int) -> dict[str, Any]:
    precision, stage = recipe.train.precision, recipe.parallel.zero_stage
    compiled: dict[str, Any] = {
        # train_batch_size stays out: with tensor parallelism DeepSpeed would check it against the wrong world size.
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        # DeepSpeed clips at 1.0 where this is absent.
        "gradient_clipping": recipe.optim.max_grad_norm,
        "prescale_gradients": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "steps_per_print": 1 << 40,
        "wall_clock_breakdown": False,
    }
    if recipe.parallel.tensor_parallel_size > 1:
        compiled["tensor_parallel"] = {
            "autotp_size": recipe.parallel.tensor_parallel_size,
            # The head stays whole: it takes the loss inside its own forward (model/loss.py).
            "vocab_parallel_lm_head": False,
        }
    if stage >= 1:
        # Whatever the precision, micro-batches are added up in fp32: in bf16 the eighth one would lose 3 of 8 bits.
        compiled["data_types"] = {"grad_accum_dtype": "fp32"}
    return compiled


def _known_values(recipe: Recipe, micro_batch: int, accumulation: int, dp: int) -> dict[str, Any]:
    optim, parallel, precision = recipe.optim, recipe.parallel, recipe.train.precision
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * dp,
        "gradient_clipping": optim.max_grad_norm,
        "zero_optimization.stage": parallel.zero_stage,
        "zero_optimization.offload_optimizer.device": parallel.offload_optimizer,
        "zero_optimization.cpu_offload": parallel.offload_optimizer != "none",
        "zero_optimization.offload_param.device": parallel.offload_param,
        "zero_optimization.cpu_offload_param": parallel.offload_param != "none",
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
        "torch_autocast.enabled": False,
        "bf16.bf16_master_weights_and_grads": False,
        "bf16.bf16_optimizer_states": False,
        "fp16.fp16_master_weights_and_grads": False,
        "data_types.grad_accum_dtype": "fp32",
        "tensor_parallel.autotp_size": parallel.tensor_parallel_size,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": optim.learning_rate,
        "optimizer.params.betas": [optim.adam_beta1, optim.adam_beta2],
        "optimizer.params.eps": optim.adam_epsilon,
        "optimizer.params.weight_decay": optim.weight_decay,
    }


def _settle(path: str, value: Any, ours: Any, origin: str, notes: list[str], problems: list[str]) -> None:
    if value == "auto":
        notes.append(f"{path}: auto in {origin}, filled with {ours!r} from {OURS[path]}")
    elif not _same(value, ours):
        problems.append(f"{origin}: {path} is {value!r}, but {OURS[path]} of the recipe makes it {ours!r}")


def _settle_scheduler(
    path: str, value: Any, recipe: Recipe, origin: str, notes: list[str], problems: list[str]
) -> None:
    if value == "auto" or path == "scheduler.type":
        notes.append(f"{path}: {value!r} in {origin}; the schedule is the recipe's {recipe.optim.lr_scheduler_type}")
    else:
        problems.append(
            f"{origin}: {path} is {value!r}, but the schedule is the recipe's: optim.lr_scheduler_type "
            f"{recipe.optim.lr_scheduler_type}, optim.warmup_steps {recipe.optim.warmup_steps:g}"
        )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, inner in value.items():
        if isinstance(inner, dict):
            found.extend(_leaves(inner, f"{prefix}{key}."))
        else:
            found.append((prefix + key, inner))
    return found


def _put(target: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        target = target.setdefault(section, {})
    target[key] = value
