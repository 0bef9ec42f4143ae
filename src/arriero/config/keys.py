"""Our keys beside the names that other systems use for the same thing, for hints and for ``arriero keys``.

Read from transformers 5.24.0, DeepSpeedExamples 2026-03, torchtitan 0.3.0, litgpt 0.5.13, Megatron-LM 2026-08,
DeepSpeed 0.19.8, LLaMA-Factory and Axolotl. A name stands here only if a recipe can say the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

SYSTEMS: Mapping[str, str] = {
    "hf": "Hugging Face TrainingArguments, LlamaConfig and run_clm",
    "megatron": "Megatron-LM",
    "deepspeed-chat": "DeepSpeed-Chat",
    "torchtitan": "torchtitan",
    "litgpt": "litgpt",
    "deepspeed": "DeepSpeed's JSON",
    "llama-factory": "LLaMA-Factory, besides Hugging Face's names",
    "axolotl": "Axolotl",
}

# Our key → system → its names, separated by spaces. "[]" stands for each entry of a list.
KEY_MAP: Mapping[str, Mapping[str, str]] = {
    "model.model_name_or_path": {
        "hf": "model_name_or_path",
        "megatron": "--pretrained-checkpoint --finetune",
        "deepspeed-chat": "--model_name_or_path",
        "torchtitan": "checkpoint.initial_load_path checkpoint.initial_load_in_hf",
        "litgpt": "initial_checkpoint_dir",
        "llama-factory": "model_name_or_path",
        "axolotl": "base_model",
    },
    "model.config": {
        "hf": "config_name config_overrides",
        "torchtitan": "--config",
        "litgpt": "model_name model_config",
    },
    "model.config.hidden_size": {
        "hf": "hidden_size",
        "megatron": "--hidden-size",
        "litgpt": "model_config.n_embd",
    },
    "model.config.intermediate_size": {
        "hf": "intermediate_size",
        "megatron": "--ffn-hidden-size",
        "litgpt": "model_config.intermediate_size",
    },
    "model.config.num_hidden_layers": {
        "hf": "num_hidden_layers",
        "megatron": "--num-layers",
        "litgpt": "model_config.n_layer",
    },
    "model.config.num_attention_heads": {
        "hf": "num_attention_heads",
        "megatron": "--num-attention-heads",
        "litgpt": "model_config.n_head",
    },
    "model.config.num_key_value_heads": {
        "hf": "num_key_value_heads",
        "megatron": "--num-query-groups",
        "litgpt": "model_config.n_query_groups",
    },
    "model.config.head_dim": {
        "hf": "head_dim",
        "megatron": "--kv-channels",
        "litgpt": "model_config.head_size",
    },
    "model.config.rope_parameters": {
        "hf": "rope_parameters rope_theta rope_scaling",
        "megatron": "--rotary-base",
        "litgpt": "model_config.rope_base",
    },
    "model.config.rms_norm_eps": {
        "hf": "rms_norm_eps",
        "megatron": "--norm-epsilon",
        "litgpt": "model_config.norm_eps",
    },
    "model.config.vocab_size": {
        "hf": "vocab_size",
        "litgpt": "model_config.vocab_size",
    },
    "model.config.max_position_embeddings": {
        "hf": "max_position_embeddings",
        "megatron": "--max-position-embeddings",
    },
    "model.config.initializer_range": {
        "hf": "initializer_range",
        "megatron": "--init-method-std",
    },
    "model.config.model_type": {
        "hf": "model_type",
    },
    "model.config.attention_bias": {
        "hf": "attention_bias",
        "megatron": "--add-qkv-bias",
        "litgpt": "model_config.attn_bias",
    },
    "model.config.mlp_bias": {
        "hf": "mlp_bias",
    },
    "model.config.attention_dropout": {
        "hf": "attention_dropout",
        "megatron": "--attention-dropout",
        "deepspeed-chat": "--dropout",
    },
    "model.config.tie_word_embeddings": {
        "hf": "tie_word_embeddings",
        "megatron": "--untie-embeddings-and-output-weights",
        "litgpt": "train.tie_embeddings",
    },
    "model.tokenizer": {
        "hf": "tokenizer_name",
        "megatron": "--tokenizer-model --tokenizer-type",
        "torchtitan": "hf_assets_path",
        "litgpt": "tokenizer_dir",
        "axolotl": "tokenizer_config",
    },
    "model.attn_implementation": {
        "hf": "attn_implementation",
        "megatron": "--attention-backend",
        "llama-factory": "flash_attn",
        "axolotl": "flash_attention",
    },
    "data.sources[].path": {
        "hf": "train_file dataset_name",
        "megatron": "--data-path",
        "deepspeed-chat": "--data_path",
        "torchtitan": "dataloader.dataset dataloader.dataset_path",
        "litgpt": "data",
        "llama-factory": "dataset dataset_dir",
        "axolotl": "pretraining_dataset datasets",
    },
    "data.sources[].weight": {
        "megatron": "--data-path",
        "llama-factory": "interleave_probs mix_strategy",
    },
    "data.seq_len": {
        "hf": "block_size",
        "megatron": "--seq-length",
        "deepspeed-chat": "--max_seq_len",
        "torchtitan": "training.seq_len",
        "litgpt": "train.max_seq_length",
        "llama-factory": "cutoff_len",
        "axolotl": "sequence_len",
    },
    "data.packing": {
        "llama-factory": "packing",
        "axolotl": "sample_packing",
    },
    "data.isolate_documents": {
        "megatron": "--reset-position-ids --reset-attention-mask",
        "llama-factory": "neat_packing",
    },
    "data.validation_split": {
        "hf": "validation_split_percentage",
        "megatron": "--split",
        "deepspeed-chat": "--data_split",
        "llama-factory": "val_size",
        "axolotl": "val_set_size",
    },
    "train.global_batch_size": {
        "hf": "gradient_accumulation_steps",
        "megatron": "--global-batch-size",
        "deepspeed-chat": "--gradient_accumulation_steps",
        "torchtitan": "training.global_batch_size",
        "litgpt": "train.global_batch_size",
        "deepspeed": "train_batch_size gradient_accumulation_steps",
        "axolotl": "gradient_accumulation_steps",
    },
    "train.per_device_train_batch_size": {
        "hf": "per_device_train_batch_size",
        "megatron": "--micro-batch-size",
        "deepspeed-chat": "--per_device_train_batch_size",
        "torchtitan": "training.local_batch_size",
        "litgpt": "train.micro_batch_size",
        "deepspeed": "train_micro_batch_size_per_gpu",
        "axolotl": "micro_batch_size",
    },
    "train.max_steps": {
        "hf": "max_steps",
        "megatron": "--train-iters",
        "torchtitan": "training.steps",
        "litgpt": "train.max_steps",
        "axolotl": "max_steps",
    },
    "train.max_tokens": {
        "megatron": "--train-samples",
        "litgpt": "train.max_tokens",
    },
    "train.num_train_epochs": {
        "hf": "num_train_epochs",
        "deepspeed-chat": "--num_train_epochs",
        "litgpt": "train.epochs",
        "axolotl": "num_epochs",
    },
    "train.max_time": {
        "megatron": "--exit-duration-in-mins",
        "litgpt": "train.max_time",
    },
    "train.precision": {
        "hf": "bf16 fp16",
        "megatron": "--bf16 --fp16",
        "deepspeed-chat": "--dtype",
        "torchtitan": "training.mixed_precision_param training.dtype",
        "litgpt": "precision",
        "deepspeed": "bf16.enabled fp16.enabled",
        "axolotl": "bf16 fp16",
    },
    "train.activation_checkpointing": {
        "hf": "activation_checkpointing gradient_checkpointing",
        "megatron": "--recompute-granularity --recompute-activations",
        "deepspeed-chat": "--gradient_checkpointing",
        "torchtitan": "activation_checkpoint",
        "deepspeed": "activation_checkpointing",
        "axolotl": "gradient_checkpointing",
    },
    "train.torch_compile": {
        "hf": "torch_compile",
        "torchtitan": "compile.enable",
        "deepspeed": "compile",
        "axolotl": "torch_compile",
    },
    "train.seed": {
        "hf": "seed data_seed",
        "megatron": "--seed",
        "deepspeed-chat": "--seed",
        "torchtitan": "debug.seed",
        "litgpt": "seed",
        "axolotl": "seed",
    },
    "optim.optimizer": {
        "hf": "optim",
        "megatron": "--optimizer",
        "torchtitan": "optimizer.param_groups[].optimizer_name",
        "litgpt": "optimizer",
        "deepspeed": "optimizer.type",
        "axolotl": "optimizer",
    },
    "optim.learning_rate": {
        "hf": "learning_rate",
        "megatron": "--lr",
        "deepspeed-chat": "--learning_rate",
        "torchtitan": "optimizer.param_groups[].optimizer_kwargs.lr",
        "litgpt": "optimizer.init_args.lr",
        "deepspeed": "optimizer.params.lr",
        "axolotl": "learning_rate",
    },
    "optim.lr_scheduler_type": {
        "hf": "lr_scheduler_type",
        "megatron": "--lr-decay-style",
        "deepspeed-chat": "--lr_scheduler_type",
        "torchtitan": "lr_scheduler.decay_type",
        "deepspeed": "scheduler.type",
        "axolotl": "lr_scheduler",
    },
    "optim.lr_scheduler_kwargs": {
        "hf": "lr_scheduler_kwargs",
    },
    "optim.warmup_steps": {
        "hf": "warmup_steps warmup_ratio",
        "megatron": "--lr-warmup-iters --lr-warmup-fraction",
        "deepspeed-chat": "--num_warmup_steps",
        "torchtitan": "lr_scheduler.warmup_steps",
        "litgpt": "train.lr_warmup_steps train.lr_warmup_fraction",
        "deepspeed": "scheduler.params.warmup_num_steps",
        "axolotl": "warmup_steps warmup_ratio",
    },
    "optim.min_lr_ratio": {
        "hf": "lr_scheduler_kwargs.min_lr_rate",
        "megatron": "--min-lr",
        "torchtitan": "lr_scheduler.min_lr_factor",
        "litgpt": "train.min_lr",
        "deepspeed": "scheduler.params.cos_min_ratio",
        "axolotl": "cosine_min_lr_ratio",
    },
    "optim.decay_ratio": {
        "hf": "lr_scheduler_kwargs.num_decay_steps",
        "megatron": "--lr-wsd-decay-iters",
        "torchtitan": "lr_scheduler.decay_ratio",
    },
    "optim.weight_decay": {
        "hf": "weight_decay",
        "megatron": "--weight-decay",
        "deepspeed-chat": "--weight_decay",
        "torchtitan": "optimizer.param_groups[].optimizer_kwargs.weight_decay",
        "litgpt": "optimizer.init_args.weight_decay",
        "deepspeed": "optimizer.params.weight_decay",
        "axolotl": "weight_decay",
    },
    "optim.adam_beta1": {
        "hf": "adam_beta1",
        "megatron": "--adam-beta1",
        "torchtitan": "optimizer.param_groups[].optimizer_kwargs.betas",
        "litgpt": "optimizer.init_args.betas",
        "deepspeed": "optimizer.params.betas",
        "axolotl": "adam_beta1",
    },
    "optim.adam_beta2": {
        "hf": "adam_beta2",
        "megatron": "--adam-beta2",
        "torchtitan": "optimizer.param_groups[].optimizer_kwargs.betas",
        "litgpt": "optimizer.init_args.betas",
        "deepspeed": "optimizer.params.betas",
        "axolotl": "adam_beta2",
    },
    "optim.adam_epsilon": {
        "hf": "adam_epsilon",
        "megatron": "--adam-eps",
        "torchtitan": "optimizer.param_groups[].optimizer_kwargs.eps",
        "litgpt": "optimizer.init_args.eps",
        "deepspeed": "optimizer.params.eps",
        "axolotl": "adam_epsilon",
    },
    "optim.max_grad_norm": {
        "hf": "max_grad_norm",
        "megatron": "--clip-grad",
        "torchtitan": "training.max_norm",
        "litgpt": "train.max_norm",
        "deepspeed": "gradient_clipping",
        "axolotl": "max_grad_norm",
    },
    "parallel.zero_stage": {
        "megatron": "--use-distributed-optimizer",
        "deepspeed-chat": "--zero_stage",
        "torchtitan": "parallelism.data_parallel_shard_degree",
        "deepspeed": "zero_optimization.stage",
    },
    "parallel.offload_optimizer": {
        "megatron": "--optimizer-cpu-offload",
        "deepspeed-chat": "--offload",
        "torchtitan": "training.enable_cpu_offload",
        "deepspeed": "zero_optimization.offload_optimizer.device",
    },
    "parallel.offload_param": {
        "deepspeed-chat": "--offload",
        "torchtitan": "training.enable_cpu_offload",
        "deepspeed": "zero_optimization.offload_param.device",
    },
    "parallel.nvme_path": {
        "deepspeed": "zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path",
    },
    "parallel.tensor_parallel_size": {
        "hf": "parallelism_config.tp_size",
        "megatron": "--tensor-model-parallel-size",
        "torchtitan": "parallelism.tensor_parallel_degree",
        "deepspeed": "tensor_parallel.autotp_size",
        "axolotl": "tensor_parallel_size",
    },
    "parallel.sequence_parallel_size": {
        "hf": "parallelism_config.cp_size",
        "megatron": "--context-parallel-size",
        "torchtitan": "parallelism.context_parallel_degree",
        "deepspeed": "sequence_parallel_size",
        "axolotl": "context_parallel_size sequence_parallel_degree",
    },
    "parallel.pipeline_parallel_size": {
        "megatron": "--pipeline-model-parallel-size",
        "torchtitan": "parallelism.pipeline_parallel_degree",
    },
    "checkpoint.save_steps": {
        "hf": "save_steps",
        "megatron": "--save-interval",
        "torchtitan": "checkpoint.interval",
        "litgpt": "train.save_interval",
        "axolotl": "save_steps",
    },
    "checkpoint.save_total_limit": {
        "hf": "save_total_limit",
        "megatron": "--save-retain-interval",
        "torchtitan": "checkpoint.keep_latest_k",
        "axolotl": "save_total_limit",
    },
    "checkpoint.keep_best": {
        "hf": "load_best_model_at_end metric_for_best_model",
        "axolotl": "load_best_model_at_end",
    },
    "checkpoint.resume_from_checkpoint": {
        "hf": "resume_from_checkpoint",
        "megatron": "--load --ckpt-step",
        "torchtitan": "checkpoint.load_step",
        "litgpt": "resume",
        "axolotl": "resume_from_checkpoint auto_resume_from_checkpoints",
    },
    "output_dir": {
        "hf": "output_dir",
        "megatron": "--save",
        "deepspeed-chat": "--output_dir",
        "torchtitan": "dump_folder",
        "litgpt": "out_dir",
        "axolotl": "output_dir",
    },
    "log.logging_steps": {
        "hf": "logging_steps",
        "megatron": "--log-interval",
        "torchtitan": "metrics.log_freq",
        "litgpt": "train.log_interval",
        "deepspeed": "steps_per_print",
        "axolotl": "logging_steps",
    },
    "log.report_to": {
        "hf": "report_to",
        "megatron": "--tensorboard-dir",
        "deepspeed-chat": "--enable_tensorboard",
        "torchtitan": "metrics.enable_tensorboard",
        "litgpt": "logger_name",
        "deepspeed": "tensorboard.enabled",
    },
    "eval.eval_steps": {
        "hf": "eval_steps eval_strategy",
        "megatron": "--eval-interval",
        "torchtitan": "validator.freq",
        "litgpt": "eval.interval",
        "axolotl": "eval_steps",
    },
    "eval.eval_on_start": {
        "hf": "eval_on_start",
        "litgpt": "eval.initial_validation",
    },
    "eval.max_rows": {
        "hf": "max_eval_samples",
        "megatron": "--eval-iters",
        "torchtitan": "validator.steps",
        "litgpt": "eval.max_iters",
    },
    "eval.per_device_eval_batch_size": {
        "hf": "per_device_eval_batch_size",
        "megatron": "--eval-micro-batch-size",
        "deepspeed-chat": "--per_device_eval_batch_size",
        "axolotl": "eval_batch_size",
    },
    "deepspeed": {
        "hf": "deepspeed",
        "deepspeed-chat": "--deepspeed_config",
        "llama-factory": "deepspeed",
        "axolotl": "deepspeed",
    },
}

# What to mind when the value can't be copied: by the other system's name, which means the same in each that has it.
NOTES: Mapping[str, str] = {
    "gradient_accumulation_steps": "derived here; rows per step = micro-batch x accumulation x data-parallel ranks",
    "--gradient_accumulation_steps": "derived here; rows per step = micro-batch x accumulation x data-parallel ranks",
    "--finetune": "with --load DIR: the weights without the optimizer",
    "--config": "a name there, LlamaConfig's keys here",
    "config_name": "a name there, LlamaConfig's keys here",
    "model_name": "a name there, LlamaConfig's keys here",
    "rope_theta": "rope_parameters: {rope_theta: …}",
    "--rotary-base": "rope_parameters: {rope_theta: …}",
    "model_config.rope_base": "rope_parameters: {rope_theta: …}",
    "--untie-embeddings-and-output-weights": "the opposite",
    "--tokenizer-type": "always a Hugging Face tokenizer folder",
    "--data-path": "one entry of sources for each weight and path",
    "--data_split": "three shares there, the validation share here",
    "--split": "three shares there, the validation share here",
    "validation_split_percentage": "5 there is 0.05 here, taken by document",
    "interleave_probs": "one weight per source",
    "packing": "rows are always packed; the value says how",
    "sample_packing": "rows are always packed; the value says how",
    "--train-samples": "rows there, tokens here: times the sequence length",
    "--exit-duration-in-mins": "a time with its unit: 3h30m",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "--bf16": "precision: bf16",
    "--fp16": "precision: fp16",
    "bf16.enabled": "precision: bf16",
    "fp16.enabled": "precision: fp16",
    "precision": "bf16, fp16 or fp32; masters are fp32 in each",
    "data_seed": "one seed for weights and order",
    "warmup_ratio": "warmup_steps below 1 is a share of the run",
    "--lr-warmup-fraction": "warmup_steps below 1 is a share of the run",
    "train.lr_warmup_fraction": "warmup_steps below 1 is a share of the run",
    "--min-lr": "absolute there, a share of learning_rate here",
    "train.min_lr": "absolute there, a share of learning_rate here",
    "optimizer.param_groups[].optimizer_kwargs.betas": "a pair there",
    "optimizer.init_args.betas": "a pair there",
    "optimizer.params.betas": "a pair there",
    "lr_scheduler_kwargs.num_decay_steps": "steps there, a share of the run here",
    "--lr-wsd-decay-iters": "steps there, a share of the run here",
    "--use-distributed-optimizer": "zero_stage: 1",
    "parallelism.data_parallel_shard_degree": "zero_stage: 3 shards over all data-parallel ranks",
    "--optimizer-cpu-offload": "offload_optimizer: cpu",
    "--offload": "cpu for each of the two",
    "training.enable_cpu_offload": "cpu for each of the two",
    "--tensorboard-dir": "always <output_dir>/tb",
    "eval_strategy": "eval_steps alone decides",
    "--eval-iters": "batches there, rows here",
    "validator.steps": "batches there, rows here",
    "eval.max_iters": "batches there, rows here",
    "--save-retain-interval": "how many to keep",
    "--dropout": "of a new model's attention alone",
    "optim": "adamw or muon; moments are fp32",
    "--optimizer": "adamw or muon; moments are fp32",
    "optimizer": "adamw or muon; moments are fp32",
    "optimizer.type": "adamw or muon; moments are fp32",
    "load_best_model_at_end": "keeps the checkpoint; final/ is the last step's",
    "metric_for_best_model": "the evaluation loss alone",
}

# Last parts of dotted names that say nothing without the part before: "enable" alone isn't torch_compile.
_VAGUE = {"config", "data", "dataset", "device", "dtype", "enable", "enabled", "freq", "interval", "type"}


def translate(name: str) -> list[tuple[str, str]]:
    """``(system, our key)`` for every system in which ``name`` means one of our keys, the likeliest first.

    ``name`` may be a flag (``--micro-batch-size``), a dotted key, or a key that someone put under a section of ours
    (``train.micro_batch_size``).
    """
    asked = _parts(name)
    exact: list[tuple[str, str]] = []
    similar: list[tuple[str, str]] = []
    for ours, systems in KEY_MAP.items():
        for system, names in systems.items():
            theirs = [_parts(word) for word in names.split()]
            if asked in theirs:
                exact.append((system, ours))
            elif any(_same_end(asked, parts) for parts in theirs):
                similar.append((system, ours))
    similar.sort(key=lambda hint: hint[1].split(".")[0] != asked[0])  # "train.steps": train.max_steps first
    return exact + similar


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` is most likely a slip of, or None. Dotted keys are compared by their last part; the
    same section only decides between equals."""
    section, _, leaf = name.lower().rpartition(".")
    best, best_score = None, 0.0
    for candidate in candidates:
        its_section, _, its_leaf = candidate.lower().rpartition(".")
        likeness = difflib.SequenceMatcher(None, leaf, its_leaf).ratio()
        # 0.75 takes two slips in a key of ten letters; "max_epochs" and "max_steps" are 0.74 alike.
        if likeness >= 0.75 and likeness + 0.05 * (section == its_section) > best_score:
            best, best_score = candidate, likeness + 0.05 * (section == its_section)
    return best


def _parts(name: str) -> tuple[str, ...]:
    return tuple(name.strip().lstrip("-").lower().replace("-", "_").replace("[]", "").split("."))


def _same_end(asked: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Equal in the last two parts where both have two, or in the last one if that says enough by itself."""
    if min(len(asked), len(theirs)) >= 2 and asked[-2:] == theirs[-2:]:
        return True
    return asked[-1] == theirs[-1] and asked[-1] not in _VAGUE
