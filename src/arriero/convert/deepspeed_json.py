"""DeepSpeed's JSON: what a recipe decides becomes its keys, what DeepSpeed alone knows stays raw, the rest is named."""

from __future__ import annotations

from typing import Any

from arriero.convert.draft import Draft, whole
from arriero.engine.ds_config import compile_ds_config, leaves, put_leaf
from arriero.engine.parallel import choose_accelerator
from arriero.errors import UserError

_KEYS = {
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload_optimizer",
    "zero_optimization.offload_param.device": "parallel.offload_param",
    "gradient_clipping": "optim.max_grad_norm",
    "optimizer.params.lr": "optim.learning_rate",
    "optimizer.params.eps": "optim.adam_epsilon",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "scheduler.params.warmup_max_lr": "optim.learning_rate",
    "scheduler.params.warmup_num_steps": "optim.warmup_steps",
    "scheduler.params.cos_min_ratio": "optim.min_lr_ratio",
    "tensor_parallel.autotp_size": "parallel.tensor_parallel_size",
    "sequence_parallel_size": "parallel.sequence_parallel_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
}
_ADAM = {"adam", "adamw", "torchadam", "fusedadam"}
_SCHEDULES = {"WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "WarmupLR": "constant_with_warmup"}
_WHY = {
    "steps_per_print": "arriero prints by log.logging_steps",
    "wall_clock_breakdown": "metrics.jsonl has the times of a step",
    "tensorboard": "log.report_to decides",
    "wandb": "log.report_to decides",
    "hybrid_engine": "it is for reinforcement learning",
    "zero_allow_untested_optimizer": "the optimizer is arriero's own",
    "fp16.initial_scale_power": "arriero has a loss scale of its own to begin with",
}


def carry_deepspeed(draft: Draft, raw: dict[str, Any], origin: str) -> dict[str, int]:
    """Put a DeepSpeed dictionary into the draft. Returns its batch numbers by name, which need the number of GPUs.

    "auto" is left out: the recipe's own keys are what fills it.
    """
    batch: dict[str, int] = {}
    rest: list[tuple[str, Any]] = []
    for path, value in leaves(raw):
        place = f"{origin}: {path}"
        if value == "auto":
            continue
        if path in _KEYS:
            draft.put(_KEYS[path], value, place)
        elif path in ("train_batch_size", "gradient_accumulation_steps"):
            batch[path] = int(value)
        elif path in ("bf16.enabled", "fp16.enabled"):
            if value:
                draft.put("train.precision", path.partition(".")[0], place)
        elif path == "optimizer.params.betas":
            draft.put("optim.adam_beta1", value[0], place)
            draft.put("optim.adam_beta2", value[1], place)
        elif path == "optimizer.type":
            if str(value).lower() not in _ADAM:
                draft.drop(path, value, "AdamW and Muon are what arriero trains with")
        elif path == "scheduler.type":
            _carry_schedule(draft, str(value), place)
        elif path in ("scheduler.params.total_num_steps", "scheduler.params.warmup_min_lr"):
            if path.endswith("total_num_steps") or value:
                draft.drop(path, value, "the schedule spans the run and begins near 0")
        elif path.endswith(("nvme_path",)):
            draft.put("parallel.nvme_path", value, place)
        else:
            rest.append((path, whole(value) if isinstance(value, float) else value))
    draft.values["deepspeed"] = rest  # settled by settle_deepspeed, when the recipe stands
    return batch


def settle_deepspeed(draft: Draft, *, micro_batch: int, accumulation: int, dp: int) -> None:
    """Keep of the raw rest what DeepSpeed and arriero take, one value at a time; name the others."""
    choose_accelerator()  # or DeepSpeed looks for one when it is imported, and says so in the middle of the recipe
    rest = draft.values.pop("deepspeed", [])
    kept: dict[str, Any] = {}
    recipe = draft.recipe()
    for path, value in rest:
        why = _WHY.get(path) or _WHY.get(path.partition(".")[0])
        if why is not None:
            if value:
                draft.drop(path, value, why)
            continue
        alone: dict[str, Any] = {}
        put_leaf(alone, path, value)
        try:
            compile_ds_config(recipe, alone, "deepspeed", micro_batch=micro_batch, accumulation=accumulation, dp=dp)
        except UserError as error:
            draft.drop(path, value, error.problem.splitlines()[-1].strip().removeprefix(f"deepspeed: {path} "))
            continue
        put_leaf(kept, path, value)
    if kept:
        draft.put("deepspeed", kept, "deepspeed", "as it stands there")


def _carry_schedule(draft: Draft, name: str, place: str) -> None:
    if name in _SCHEDULES:
        draft.put("optim.lr_scheduler_type", _SCHEDULES[name], place, f"{name} there")
    else:
        draft.drop("scheduler.type", name, "arriero has Transformers' schedules")
