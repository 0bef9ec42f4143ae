"""``TrainingArguments`` and run_clm's other arguments, as JSON, into a recipe; LLaMA-Factory's settings are mostly these.

Read from transformers 5.24.0 and its older names. What isn't said there has the Trainer's default, not ours.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from arriero.config.schema import Log
from arriero.convert.deepspeed_json import carry_deepspeed, settle_deepspeed
from arriero.convert.draft import Draft, our_keys, whole
from arriero.engine.ds_config import read_deepspeed_json
from arriero.errors import UserError

# What the Trainer does where nothing is said, as far as arriero does otherwise.
_DEFAULTS: dict[str, Any] = {
    "optim.learning_rate": 5e-5,
    "optim.lr_scheduler_type": "linear",
    "optim.warmup_steps": 0,
    "optim.min_lr_ratio": 0.0,
    "optim.weight_decay": 0.0,
    "optim.adam_beta2": 0.999,
    "checkpoint.save_steps": 500,
    "checkpoint.save_total_limit": None,
    "log.logging_steps": 500,
}
_MICRO_BATCH, _EPOCHS = 8, 3.0
# Why a setting has no key here, by the beginning of its name.
_WHY = {
    "average_tokens_across_devices": "the loss is always over all ranks' targets",
    "bf16_full_eval": "evaluation computes as training does",
    "cache_dir": "HF_HOME says where the hub's files lie",
    "data_seed": "one seed for weights and order, train.seed",
    "dataloader_": "rows are memory-mapped and cut in under 1 % of a step; there are no workers",
    "ddp_": "DeepSpeed alone talks between ranks",
    "debug": "the run explains itself when a loss isn't finite or a rank hangs",
    "disable_tqdm": "--quiet, or a pipe, gives plain lines",
    "eval_accumulation_steps": "evaluation keeps sums, no logits",
    "fp16_full_eval": "evaluation computes as training does",
    "full_determinism": "the same layout repeats bit for bit as it is",
    "group_by_length": "all rows are equally long",
    "hub_": "arriero export writes a folder; pushing it is `hf upload`",
    "ignore_data_skip": "the data's place is a number, so nothing has to be skipped through",
    "keep_linebreaks": "text is never changed",
    "label_smoothing_factor": "the loss is the plain cross-entropy",
    "low_cpu_mem_usage": "weights are read one tensor at a time",
    "lora": "arriero trains all weights",
    "max_train_samples": "give arriero prepare less text",
    "metric_for_best_model": "checkpoint.keep_best goes by the evaluation loss",
    "neftune_noise_alpha": "it is for instructions",
    "optim_args": "optim.* has what AdamW takes",
    "overwrite_output_dir": "a run folder belongs to one run; give another output_dir",
    "preprocessing_num_workers": "arriero prepare uses all cores",
    "push_to_hub": "arriero export writes a folder; pushing it is `hf upload`",
    "save_only_model": "a checkpoint always holds what resuming needs; arriero export gives the model alone",
    "save_on_each_node": "each rank writes what it owns",
    "torchdynamo": "train.torch_compile decides",
    "tf32": "fp32 products stay fp32",
    "trust_remote_code": "code from the hub is never run",
    "train_sampling_strategy": "all rows are equally long, and their order is a permutation of its own",
    "use_fast_tokenizer": "it always is",
    "use_liger_kernel": "with pip install 'arriero[gpu]' they are used on GPUs",
}
_NOT_OURS = "arriero has no such setting"
# Said by the command itself, by nothing at all, or a secret.
_SILENT = {
    *("hub_token", "token", "push_to_hub_token", "hf_hub_token", "ms_hub_token", "om_hub_token", "accelerator_config"),
    *("do_train", "do_eval", "do_predict", "local_rank", "_n_gpu", "overwrite_cache", "logging_dir", "n_gpu"),
    *("report_to", "remove_unused_columns", "prediction_loss_only", "no_cuda", "use_cpu", "log_level"),
}


def convert_hugging_face(given: dict[str, Any], *, gpus: int | None, folder: Path) -> Draft:
    """A draft of a Trainer's JSON. gpus: ranks that it ran on; folder: that relative files are looked for in.

    Raises ``UserError`` where the number of rows in a step isn't known without the number of GPUs.
    """
    draft = Draft("Hugging Face's Trainer")
    left = {name: value for name, value in given.items() if value is not None}
    _carry_model(draft, left)
    _carry_data(draft, left)
    if "data.seq_len" not in draft.values:
        # run_clm's own default: the tokenizer's longest, but no more than this.
        draft.put("data.seq_len", int(left.pop("block_size", 1024)), "block_size")
    draft.put(
        "data.isolate_documents", False, "run_clm", "run_clm joins texts and attends across them; true keeps them apart"
    )
    carry_trainer(draft, left, gpus=gpus, folder=folder)
    return draft


def carry_trainer(draft: Draft, left: dict[str, Any], *, gpus: int | None, folder: Path) -> None:
    """Everything of ``TrainingArguments``; what is left of ``left`` then is named with the reason."""
    batch = _carry_deepspeed_file(draft, left, folder)
    _carry_precision(draft, left)
    _carry_schedule(draft, left)  # asks for max_steps, so before the length
    _carry_length(draft, left)
    _carry_saving(draft, left)
    _carry_rest_of_keys(draft, left)
    micro, accumulation = _carry_batch(draft, left, batch, gpus)
    for key, value in _DEFAULTS.items():
        draft.default(key, value)
    draft.values.setdefault("output_dir", "runs/converted")
    _name_the_rest(draft, left)
    if "parallel.zero_stage" not in draft.values:
        stage = 0 if draft.values["train.precision"] == "fp32" else 1
        draft.put("parallel.zero_stage", stage, "the Trainer", "plain data parallelism there; the same mathematics")
    dp = max(int(draft.values["train.global_batch_size"]) // (micro * accumulation), 1)
    settle_deepspeed(draft, micro_batch=micro, accumulation=accumulation, dp=dp)


def _carry_model(draft: Draft, left: dict[str, Any]) -> None:
    name, config = left.pop("model_name_or_path", None), left.pop("config_name", None)
    draft.put("model.model_name_or_path", name or "FOLDER", "model_name_or_path")
    if name is None:
        draft.said["model.model_name_or_path"] = "the file names none: give a folder, or model.config for a new model"
        if config is not None:
            draft.drop("config_name", config, "a new model's shape stands under model.config, as in its config.json")
    if left.get("tokenizer_name"):
        draft.put("model.tokenizer", left.pop("tokenizer_name"), "tokenizer_name")
    for key in ("torch_dtype", "dtype"):
        left.pop(key, None)  # masters are fp32 in every precision; bf16 and fp16 decide what is computed in


def _carry_data(draft: Draft, left: dict[str, Any]) -> None:
    hub, file = left.pop("dataset_name", None), left.pop("train_file", None)
    config, held = left.pop("dataset_config_name", None), left.pop("validation_file", None)
    if hub and file:
        draft.clashes.append(f"data.sources: dataset_name says {hub}, train_file says {file}")
    if hub and "/" not in hub:
        draft.drop("dataset_name", hub, "the hub's names have an owner now: put it into the command")
        hub = f"OWNER/{hub}"
    text = f"hf://{hub}" + (f"/{config}" if config else "") if hub else file
    carry_source(draft, [text] if text else [], None)
    if held:
        draft.drop("validation_file", held, "documents are held out when a dataset is prepared (--validation-split)")
    percent = left.pop("validation_split_percentage", None)
    if percent is not None:
        draft.put("data.validation_split", percent / 100, "validation_split_percentage")


def carry_source(
    draft: Draft, texts: list[str], weights: list[float] | None, text_fields: dict[str, str] | None = None
) -> None:
    """Texts there are datasets here: name each, and the command that makes it. text_fields: the column of some texts."""
    by = draft.values.get("model.tokenizer") or draft.values["model.model_name_or_path"]
    sources: list[dict[str, Any]] = []
    for number, text in enumerate(texts or ["TEXT"]):
        stem = Path(text.removeprefix("hf://").rstrip("/")).name.partition(".")[0].strip("*") or f"source-{number}"
        path = (
            f"work/{stem}" if all(source["path"] != f"work/{stem}" for source in sources) else f"work/{stem}-{number}"
        )
        sources.append({"path": path} | ({"weight": weights[number]} if weights else {}))
        field = f" --text-field {text_fields[text]}" if text_fields and text in text_fields else ""
        draft.commands.append(f"arriero prepare {text} --tokenizer {by} --out {path}{field}")
    draft.put("data.sources", sources, "data", "" if texts else "no text is named there")


def _carry_deepspeed_file(draft: Draft, left: dict[str, Any], folder: Path) -> dict[str, int]:
    given = left.pop("deepspeed", None)
    if given is None:
        _carry_fsdp(draft, left)
        return {}
    if isinstance(given, str):
        file = next((path for path in (Path(given), folder / given) if path.is_file()), None)
        if file is None:
            draft.drop("deepspeed", given, "there is no such file here; ZeRO-1 is taken, convert again where it lies")
            return {}
        given, _ = read_deepspeed_json(str(file))
    return carry_deepspeed(draft, given, "deepspeed")


def _carry_fsdp(draft: Draft, left: dict[str, Any]) -> None:
    given, options = left.pop("fsdp", None), left.pop("fsdp_config", None)
    words = (
        given.replace(",", " ").split()
        if isinstance(given, str)
        else [str(word) for word in given or [] if given is not True]
    )
    if given is True or "full_shard" in words or "hybrid_shard" in words:
        draft.put("parallel.zero_stage", 3, "fsdp", f"FSDP {' '.join(words)} there".replace("  ", " "))
    elif "shard_grad_op" in words:
        draft.put("parallel.zero_stage", 2, "fsdp", "FSDP shard_grad_op there")
    if "offload" in words:
        draft.put("parallel.offload_optimizer", "cpu", "fsdp")
    if options:
        draft.drop("fsdp_config", options, "DeepSpeed shards by parameters, not by wrapped layers")


def _carry_precision(draft: Draft, left: dict[str, Any]) -> None:
    asked = [name for name in ("bf16", "fp16") if left.pop(name, False)]
    for name in asked:
        draft.put("train.precision", name, name)
    if "train.precision" not in draft.values:
        draft.put("train.precision", "fp32", "bf16 and fp16", "neither bf16 nor fp16 is set there")


def _carry_schedule(draft: Draft, left: dict[str, Any]) -> None:
    kind = left.pop("lr_scheduler_type", None)
    if kind is not None:
        draft.put("optim.lr_scheduler_type", kind, "lr_scheduler_type")
    if (rate := left.pop("learning_rate", None)) is not None:
        draft.put("optim.learning_rate", float(rate), "learning_rate")
    steps, ratio = left.pop("warmup_steps", 0) or 0, left.pop("warmup_ratio", 0) or 0
    if steps and ratio:
        draft.drop("warmup_ratio", ratio, f"warmup_steps {steps} goes before it there too")
    if steps or ratio:
        note = "" if steps else "warmup_ratio: below 1 it is a share of the run"
        draft.put("optim.warmup_steps", whole(steps or ratio), "warmup_steps" if steps else "warmup_ratio", note)
    numbers = dict(left.pop("lr_scheduler_kwargs", None) or {})
    peak = float(draft.values.get("optim.learning_rate", _DEFAULTS["optim.learning_rate"]))
    for name, key in (("min_lr_rate", None), ("min_lr_ratio", None), ("min_lr", peak), ("lr_end", peak)):
        if name in numbers:
            value = float(numbers.pop(name))
            draft.put(
                "optim.min_lr_ratio",
                value / key if key else value,
                f"lr_scheduler_kwargs.{name}",
                f"{name} {value:g} there",
            )
    if (decay := numbers.pop("num_decay_steps", None)) is not None:
        total = int(left.get("max_steps", -1))
        if total > 0:
            draft.put("optim.decay_ratio", decay / total, "lr_scheduler_kwargs.num_decay_steps", f"{decay} steps there")
        else:
            draft.drop(
                "lr_scheduler_kwargs.num_decay_steps",
                decay,
                "optim.decay_ratio is a share; the run's steps aren't said",
            )
    if numbers:
        draft.put("optim.lr_scheduler_kwargs", numbers, "lr_scheduler_kwargs")
    name = str(left.pop("optim", "adamw_torch"))
    if name == "muon":
        draft.put("optim.optimizer", "muon", "optim")
    elif not name.startswith("adamw") or "bit" in name:
        draft.drop("optim", name, "masters and moments are AdamW's (or Muon's), in fp32")


def _carry_saving(draft: Draft, left: dict[str, Any]) -> None:
    for what, section in (("save", "checkpoint"), ("eval", "eval"), ("logging", "log")):
        strategy = left.pop(f"{what}_strategy", None) or (
            left.pop("evaluation_strategy", None) if what == "eval" else None
        )
        strategy = strategy or ("no" if what == "eval" else "steps")
        steps = left.pop(f"{what}_steps", None)
        key = f"{section}.{what}_steps"
        if strategy == "steps" and steps is not None and steps >= 1:
            draft.put(key, int(steps), f"{what}_steps")
        elif strategy == "steps" and steps is not None:
            draft.drop(f"{what}_steps", steps, "a share of the run there; give steps")
        elif what == "eval" and strategy == "steps":
            draft.put(key, draft.values.get("log.logging_steps", 500), "logging_steps", "as often as it logs, there")
        elif what == "eval":
            draft.put(
                key,
                None,
                f"eval_strategy {strategy}",
                "only at the end" if strategy == "no" else "by steps, or at the end",
            )
        elif strategy != "steps":
            draft.drop(f"{what}_strategy", strategy, "it is done every so many steps, and at the end")
    if left.pop("load_best_model_at_end", False):
        draft.put("checkpoint.keep_best", True, "load_best_model_at_end")
    trackers, known = left.get("report_to"), get_args(get_args(Log.model_fields["report_to"].annotation)[0])
    asked = [trackers] if isinstance(trackers, str) else list(trackers or [])
    if "all" in asked:
        draft.drop("report_to", "all", "name the trackers")
    kept = [name for name in asked if name in known]
    for name in asked:
        if name not in (*known, "all", "none"):
            draft.drop("report_to", name, f"trackers here: {', '.join(known)}")
    if kept or "none" in asked:
        draft.put("log.report_to", kept, "report_to")


def _carry_rest_of_keys(draft: Draft, left: dict[str, Any]) -> None:
    """Settings of which the value can be copied, and those that only need another word."""
    activations = [left.pop(name, None) for name in ("activation_checkpointing", "gradient_checkpointing")]
    if any(value is not None for value in activations):
        draft.put("train.activation_checkpointing", any(activations), "gradient_checkpointing")
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        left.pop(name, None)
    if left.pop("auto_find_batch_size", False):
        left.pop("per_device_train_batch_size", None)
        draft.put("train.per_device_train_batch_size", "auto", "auto_find_batch_size")
    resume = left.pop("resume_from_checkpoint", None)
    if isinstance(resume, str) and resume:
        draft.drop(
            "resume_from_checkpoint",
            resume,
            "a Trainer's checkpoint isn't read; export its model and continue from that",
        )
    axes = left.pop("parallelism_config", None) or {}
    for name, key in (
        ("tp_size", "tensor_parallel_size"),
        ("cp_size", "sequence_parallel_size"),
        ("sp_size", "sequence_parallel_size"),
    ):
        if isinstance(axes, dict) and axes.get(name, 1) > 1:
            draft.put(f"parallel.{key}", axes[name], f"parallelism_config.{name}")
    for name, key in our_keys("hf").items():
        if name in left and key not in draft.values and name not in ("per_device_train_batch_size", "report_to"):
            value = left.pop(name)
            draft.put(key, whole(value) if isinstance(value, float) else value, name)


def _carry_batch(draft: Draft, left: dict[str, Any], batch: dict[str, int], gpus: int | None) -> tuple[int, int]:
    """Rows of a step from micro-batch, accumulation and GPUs. Gives (micro-batch, accumulation)."""
    in_json = draft.values.get("train.per_device_train_batch_size")
    micro = left.pop("per_device_train_batch_size", in_json if in_json not in (None, "auto") else _MICRO_BATCH)
    accumulation = left.pop("gradient_accumulation_steps", batch.get("gradient_accumulation_steps", 1))
    if in_json != "auto":
        draft.put("train.per_device_train_batch_size", int(micro), "per_device_train_batch_size")
    if batch.get("gradient_accumulation_steps", accumulation) != accumulation:
        draft.clashes.append(
            f"gradient_accumulation_steps: it says {accumulation}, the DeepSpeed JSON {batch['gradient_accumulation_steps']}"
        )
    parallel = [draft.values.get(f"parallel.{axis}_parallel_size", 1) for axis in ("tensor", "sequence")]
    replica = parallel[0] * parallel[1]
    whole_batch = batch.get("train_batch_size")
    if gpus is None and whole_batch is None:
        raise UserError(
            f"on how many GPUs did it run? A step's rows are {micro} a GPU × {accumulation} accumulated × the GPUs",
            "Say it: --gpus N.",
        )
    if gpus is not None:
        rows = int(micro) * int(accumulation) * max(gpus // replica, 1)
        words = f"{micro} a GPU × {accumulation} accumulated × {gpus // replica} data-parallel GPUs"
        draft.put("train.global_batch_size", rows, f"{words} with --gpus {gpus}", words)
    if whole_batch is not None:
        draft.put("train.global_batch_size", whole_batch, "the DeepSpeed JSON's train_batch_size")
    return int(micro), int(accumulation)


def _carry_length(draft: Draft, left: dict[str, Any]) -> None:
    steps, epochs = int(left.pop("max_steps", -1)), left.pop("num_train_epochs", None)
    if steps > 0:
        draft.put("train.max_steps", steps, "max_steps")
        if epochs is not None and epochs != _EPOCHS:
            draft.drop("num_train_epochs", whole(epochs), f"max_steps {steps} goes before it there too")
    else:
        note = "" if epochs is not None else f"{draft.system}'s default"
        draft.put("train.num_train_epochs", whole(float(epochs or _EPOCHS)), "num_train_epochs", note)


def _name_the_rest(draft: Draft, left: dict[str, Any]) -> None:
    """What was set to something else than the Trainer's default and has no key here."""
    from transformers import TrainingArguments

    usual = {one.name: one.default for one in fields(TrainingArguments)}
    for name, value in left.items():
        default = usual.get(name, MISSING)
        if name in _SILENT or value == default or value in (None, False, "", "no", "none") or value in ([], {}):
            continue
        why = next((reason for start, reason in _WHY.items() if name.startswith(start)), _NOT_OURS)
        draft.drop(name, value, why)
