"""The whole DeepSpeed dictionary, from the recipe: a pure function, no "auto", every value that we depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from arriero.config.schema import Recipe
from arriero.errors import UserError
from arriero.planner.memory import REDUCE_BUCKET

# Keys of raw DeepSpeed JSON that the recipe decides, by their path there, and the recipe's key for each.
OURS = {
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_clipping": "optim.max_grad_norm",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload_optimizer",
    "zero_optimization.cpu_offload": "parallel.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "parallel.nvme_path",
    "zero_optimization.offload_param.device": "parallel.offload_param",
    "zero_optimization.offload_param.nvme_path": "parallel.nvme_path",
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
    # The head stays whole: it takes the loss inside its own forward (model/loss.py).
    "tensor_parallel.vocab_parallel_lm_head": "parallel.tensor_parallel_size",
    "optimizer.type": "optim.optimizer",
    "optimizer.params.lr": "optim.learning_rate",
    "optimizer.params.betas": "optim.adam_beta1, optim.adam_beta2",
    "optimizer.params.eps": "optim.adam_epsilon",
    "optimizer.params.weight_decay": "optim.weight_decay",
}

# The other top-level keys of DeepSpeed 0.19 that training reads; what stands in them is held against DeepSpeed's models.
_PASSED_ON = {
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "communication_data_type",
    "compile",
    "data_types",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "timers",
    "torch_autocast",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}
# Muon decides two more at stage 3: DeepSpeed gathers whole gradients for it, which excludes reduce-scatter, and keeps its
# momentum in the type that it communicates in.
_FOR_MUON = {"zero_optimization.reduce_scatter": False, "communication_data_type": "fp32"}

# What DeepSpeed would do and training here must not, and why; a value that switches it off may stand.
_REFUSED = {
    "fp16.auto_cast": (False, "inputs are token ids, which must not be cast"),
    "data_types.param_dtype": (None, "train.precision decides it"),
    "data_types.buffer_dtype": (None, "buffers such as RoPE tables stay fp32"),
    "zero_optimization.zenflow": (None, "ZenFlow delays updates, and a step would no longer be one update"),
    "zero_optimization.elastic_checkpoint": (False, "checkpoints here load into any layout as they are"),
    "zero_optimization.offload_optimizer.ratio": (
        1.0,
        "parts of it would stay on the device, out of a checkpoint's sight",
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        False,
        "its optimizer runs in a process that no checkpoint sees",
    ),
    "zero_optimization.compute_grad_norm": (True, "the gradient's norm is clipped and logged"),
    "zero_optimization.round_robin_gradients": (False, "a checkpoint's slices would lie elsewhere than they say"),
}
# How Transformers fills these from the model's hidden size where a file says "auto" (its trainer_config_finalize).
_BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
# DeepSpeed's older names.
_RENAMED = {"bfloat16": "bf16"}


def read_deepspeed_json(value: str | dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The raw DeepSpeed part of a recipe, and what to call it in errors; a path is read as JSON."""
    if isinstance(value, dict):
        return value, "deepspeed"
    try:
        raw = json.loads(Path(value).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise UserError(f"deepspeed: can't read {value}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"deepspeed: {value} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"deepspeed: {value} holds {type(raw).__name__}, expected an object")
    return raw, value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands there twice")
        found[key] = value
    return found


def compile_ds_config(
    recipe: Recipe,
    raw: dict[str, Any],
    origin: str,
    *,
    micro_batch: int,
    accumulation: int,
    dp: int,
    hidden_size: int | None = None,
    parameters: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The dictionary for ``deepspeed.initialize``, and notes on what was filled in or left to DeepSpeed.

    raw: the user's own DeepSpeed JSON, ``origin`` its name. hidden_size: the model's, from which Transformers fills the
    bucket sizes that a file leaves at "auto"; None leaves them to DeepSpeed. parameters: the model's, which the bucket for
    gradients needn't exceed; None leaves DeepSpeed's. Values that repeat ours are fine and
    "auto" takes ours; a contradiction, a key that DeepSpeed doesn't have and a value that it refuses raise
    ``UserError`` with both sources, all at once.
    """
    compiled = _from_recipe(recipe, micro_batch, accumulation, parameters)
    known = _known_values(recipe, micro_batch, accumulation, dp)
    shares_rows = recipe.parallel.zero_stage == 3 and recipe.parallel.sequence_parallel_size > 1
    notes: list[str] = []
    problems: list[str] = []
    for path, value in leaves(raw):
        top = path.partition(".")[0]
        if path in known:
            _settle(path, value, known[path], recipe, origin, notes, problems)
        elif path == "zero_optimization.reduce_scatter" and value is False and shares_rows:
            problems.append(
                f"{origin}: {path} is False, but with ZeRO-3 and parallel.sequence_parallel_size "
                f"{recipe.parallel.sequence_parallel_size} only the reduce-scatter averages as the loss expects"
            )
        elif top == "scheduler":
            _settle_scheduler(path, value, recipe, origin, notes, problems)
        elif top == "optimizer" and value != "auto":
            if path != "optimizer.params.torch_adam":
                problems.append(f"{origin}: {path} is {value!r}, but the recipe's optim section builds the optimizer")
        elif why := _unread(path):
            problems.append(f"{origin}: {path}: {why}")
        elif path in _REFUSED and value not in (_REFUSED[path][0], "auto"):
            problems.append(f"{origin}: {path} is {value!r}, which training here doesn't do: {_REFUSED[path][1]}")
        elif value == "auto":
            if hidden_size is not None and path in _BY_HIDDEN_SIZE:
                put_leaf(compiled, path, _BY_HIDDEN_SIZE[path](hidden_size))
                notes.append(f"{path}: auto in {origin}, filled from the model's hidden_size {hidden_size}")
            else:
                notes.append(f"{path}: auto in {origin}, left to DeepSpeed's default")
        elif isinstance(compiled.get(path), dict):
            problems.append(f"{origin}: {path} is {value!r}, expected an object")
        else:
            put_leaf(compiled, path, value)
    problems += [f"{origin}: {key}: {why}" for key, value in raw.items() if value == {} and (why := _unread(key))]
    # What DeepSpeed refuses is the user's only where nothing else has been found; ours alone it takes.
    problems += _impossible(compiled, origin, dp) if raw and not problems else []
    if problems:
        raise UserError(
            "the deepspeed section contradicts the recipe:\n" + "\n".join(f"  {problem}" for problem in problems),
            "Remove these keys, set them to the recipe's value, or change the recipe.",
        )
    return compiled, notes


def value_sources(recipe: Recipe, raw: dict[str, Any], origin: str, compiled: dict[str, Any]) -> dict[str, str]:
    """Where each value of a compiled dictionary came from, by its dotted path there."""
    given, deciders = dict(leaves(raw)), _deciders(recipe)
    sources = {}
    for path, _ in leaves(compiled):
        if path in deciders:
            default = " (its default)" if _is_default(recipe, deciders[path]) else ""
            sources[path] = deciders[path] + default + (f", auto in {origin}" if given.get(path) == "auto" else "")
        elif path in given:
            sources[path] = f"{origin}, from hidden_size" if given[path] == "auto" else origin
        else:
            sources[path] = "arriero"
    return sources


def _unread(path: str) -> str | None:
    """Why nobody would read a key, or None."""
    top = path.partition(".")[0]
    if top == "checkpoint":
        return "checkpoints here are arriero's own, and nobody would read it"
    # DeepSpeed, and torch with it, is loaded only where there is something to hold against it.
    from arriero.engine.ds_keys import unknown_key

    if why := unknown_key(path):
        return why
    sections = _PASSED_ON | {path.partition(".")[0] for path in OURS} | {"scheduler", "zero_optimization"}
    return None if top in sections else "DeepSpeed has no such key, or training doesn't read it"


def _impossible(compiled: dict[str, Any], origin: str, dp: int) -> list[str]:
    """What DeepSpeed's own models refuse, and what can't be on this many ranks."""
    from arriero.engine.ds_keys import wrong_values

    problems = [f"{origin}: {path}: {why}" for path, why in wrong_values(compiled)]
    zero = compiled["zero_optimization"]
    for key in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        value = zero.get(key, False)
        if (value is True or value > 1) and zero["stage"] != 3:
            problems.append(
                f"{origin}: zero_optimization.{key} is {value!r}, which ZeRO++ has for stage 3 alone; "
                f"parallel.zero_stage of the recipe makes it {zero['stage']}"
            )
    group = zero.get("zero_hpz_partition_size", 1)
    if not problems and group > 1 and dp % group:
        fitting = [size for size in range(1, dp + 1) if dp % size == 0]
        problems.append(
            f"{origin}: zero_optimization.zero_hpz_partition_size is {group}, but {dp} ranks don't divide into groups "
            f"of {group}; the nearest that fits is {min(fitting, key=lambda size: abs(size - group))}"
        )
    return problems


def _from_recipe(recipe: Recipe, micro_batch: int, accumulation: int, parameters: int | None = None) -> dict[str, Any]:
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
            "vocab_parallel_lm_head": False,
        }
    if stage >= 1:
        # Whatever the precision, micro-batches are added up in fp32: in bf16 the eighth one would lose 3 of 8 bits.
        compiled["data_types"] = {"grad_accum_dtype": "fp32"}
        if parameters is not None and parameters < REDUCE_BUCKET:
            # DeepSpeed takes a bucket of 10⁹ bytes for any model; beyond the model's own size nothing is ever put into it.
            compiled["zero_optimization"]["reduce_bucket_size"] = parameters
    for path, value in _for_muon(recipe).items():
        put_leaf(compiled, path, value)
    for section, device in _offloads(recipe).items():
        folder = {"nvme_path": swap_folder(recipe)} if device == "nvme" else {}
        compiled["zero_optimization"][section] = {"device": device, **folder}
    if "nvme" in _offloads(recipe).values():
        # A group is swapped at a time and ends with the parameter that fills it, and DeepSpeed's buffers hold 10⁸ weights;
        # its groups of 10⁹ would not start beyond that, and pin 16 GB for the optimizer.
        compiled["zero_optimization"]["sub_group_size"] = 30_000_000
    return compiled


def swap_folder(recipe: Recipe) -> str:
    """The run's own folder below ``parallel.nvme_path``: DeepSpeed names files by rank alone, and two runs on one host
    would overwrite each other's."""
    digest = hashlib.blake2b(recipe.output_dir.encode(), digest_size=4).hexdigest()
    return str(PurePath(recipe.parallel.nvme_path or "") / f"{PurePath(recipe.output_dir).name}-{digest}")


def _nvme_path(recipe: Recipe, device: str) -> str | None:
    return recipe.parallel.nvme_path if device == "nvme" else None


def _for_muon(recipe: Recipe) -> dict[str, Any]:
    return _FOR_MUON if recipe.optim.optimizer == "muon" and recipe.parallel.zero_stage == 3 else {}


def _deciders(recipe: Recipe) -> dict[str, str]:
    """The recipe's key behind each value that the recipe decides."""
    return OURS | dict.fromkeys(_for_muon(recipe), "optim.optimizer")


def _offloads(recipe: Recipe) -> dict[str, str]:
    parallel = recipe.parallel
    devices = {"offload_optimizer": parallel.offload_optimizer, "offload_param": parallel.offload_param}
    return {section: device for section, device in devices.items() if device != "none"}


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
        "zero_optimization.offload_optimizer.nvme_path": _nvme_path(recipe, parallel.offload_optimizer),
        "zero_optimization.offload_param.device": parallel.offload_param,
        "zero_optimization.offload_param.nvme_path": _nvme_path(recipe, parallel.offload_param),
        "zero_optimization.cpu_offload_param": parallel.offload_param != "none",
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
        "torch_autocast.enabled": False,
        "bf16.bf16_master_weights_and_grads": False,
        "bf16.bf16_optimizer_states": False,
        "fp16.fp16_master_weights_and_grads": False,
        "data_types.grad_accum_dtype": "fp32",
        "tensor_parallel.autotp_size": parallel.tensor_parallel_size,
        "tensor_parallel.vocab_parallel_lm_head": False,
        "optimizer.type": "Muon" if optim.optimizer == "muon" else "AdamW",
        "optimizer.params.lr": optim.learning_rate,
        "optimizer.params.betas": [optim.adam_beta1, optim.adam_beta2],
        "optimizer.params.eps": optim.adam_epsilon,
        "optimizer.params.weight_decay": optim.weight_decay,
        **_for_muon(recipe),
    }


def _settle(
    path: str, value: Any, ours: Any, recipe: Recipe, origin: str, notes: list[str], problems: list[str]
) -> None:
    key = _deciders(recipe)[path]
    if value == "auto":
        notes.append(f"{path}: auto in {origin}, filled with {ours!r} from {key}")
    elif not _same(value, ours):
        problems.append(
            f"{origin}: {path} is {value!r}, but {key} of the recipe makes it {ours!r}"
            + (" (its default)" if _is_default(recipe, key) else "")
        )


def _is_default(recipe: Recipe, keys: str) -> bool:
    """Whether the recipe gives none of these keys."""
    section = getattr(recipe, keys.partition(".")[0])
    leaves = {key.partition(".")[2] for key in keys.split(", ")}
    return "" not in leaves and not leaves & section.model_fields_set


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


def leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The values of a DeepSpeed dictionary by dotted path, under today's names."""
    found = []
    for key, inner in value.items():
        key = _RENAMED.get(key, key) if not prefix else key
        if isinstance(inner, dict):
            found.extend(leaves(inner, f"{prefix}{key}."))
        else:
            found.append((prefix + key, inner))
    return found


def put_leaf(target: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its dotted path."""
    *sections, key = path.split(".")
    for section in sections:
        target = target.setdefault(section, {})
    target[key] = value
