"""The recipe: every key, its unit and its default. Inert: reading it opens no file, counts no GPU, loads no tokenizer.

Words. A *document* is one text of a source; a *token* an id of the vocabulary; a *target* a token that the loss counts.
A *row* is ``seq_len`` tokens, the unit that the data order counts. A *micro-batch* is the rows that one rank runs at
once; a *step* is one update of the weights, from ``global_batch_size`` rows. The *position* is how many rows a run has
taken.
"""

from __future__ import annotations

from math import isfinite
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from arriero.units import parse_count, parse_time_s


def _real(value: object) -> object:
    """Booleans, which pydantic would read as 1 and 0, and infinities are no numbers here."""
    if isinstance(value, bool) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


def _at_least_one(value: int) -> int:
    if value < 1:
        raise ValueError(f"must be at least 1, got {value}")
    return value


Count = Annotated[int, BeforeValidator(parse_count)]
Positive = Annotated[int, BeforeValidator(lambda value: _at_least_one(parse_count(value)))]
Real = Annotated[float, BeforeValidator(_real)]
TimeS = Annotated[float, BeforeValidator(parse_time_s)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ModelShape(_Section):
    """The shape of a new model, by the names of Hugging Face's ``LlamaConfig``."""

    model_type: str = "llama"
    """Architecture, by its name in Transformers."""
    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width of the feed-forward layer."""
    num_hidden_layers: Positive
    """Number of decoder layers."""
    num_attention_heads: Positive
    """Number of query heads."""
    num_key_value_heads: Positive | None = None
    """Number of key/value heads; null: as many as query heads."""
    head_dim: Positive | None = None
    """Width of a head; null: hidden_size / num_attention_heads."""
    vocab_size: Positive | None = None
    """Rows of the embedding; null: the length of the tokenizer."""
    max_position_embeddings: Positive | None = None
    """Longest row the model is declared for, in tokens; null: data.seq_len."""
    tie_word_embeddings: bool = False
    """Whether input and output embeddings are one matrix."""
    rms_norm_eps: Annotated[Real, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    initializer_range: Annotated[Real, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""
    attention_bias: bool = False
    """Bias in the attention projections."""
    mlp_bias: bool = False
    """Bias in the feed-forward projections."""
    attention_dropout: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    """Share of attention weights dropped in training."""
    rope_parameters: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """Rotary embedding: rope_type, rope_theta and the scaling's own keys."""


class Model(_Section):
    """What is trained: a new model from ``config``, or the one in ``model_name_or_path``."""

    model_name_or_path: str | None = None
    """A Hugging Face folder (or hub name) to continue from."""
    config: ModelShape | None = None
    """The shape of a new model."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer folder; null: the one of model_name_or_path."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel, by its name in Transformers; auto: flash_attention_2 on a GPU where it is installed, blocks of
    bf16 products on a CPU, else sdpa."""


class Source(_Section):
    """One prepared dataset and its part in the mixture."""

    path: str
    """A prepared dataset, or a Megatron .bin/.idx pair."""
    name: str | None = None
    """What metrics call it; null: the last part of the path. It also keys the source's order."""
    weight: Annotated[Real, Field(ge=0)] | None = None
    """Share of the rows, relative to the other weights; null in all sources: in proportion to their rows."""
    max_epochs: Positive | None = None
    """After this many passes the source has ended and the others share its part; null: repeats for ever."""

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).name


class Data(_Section):
    """Where rows come from."""

    sources: tuple[Source, ...]
    """Prepared datasets."""
    seq_len: Annotated[Positive, Field(ge=2)] = 1024
    """Tokens in a row; may change between two starts of a run."""
    packing: Literal["stream", "best_fit"] = "stream"
    """How documents become rows: stream: one after the other, cut at row ends; best_fit: whole ones, padded."""
    isolate_documents: bool = True
    """Whether attention and positions restart at every document, and no target crosses from one into the next."""
    validation_split: Annotated[Real, Field(ge=0, lt=1)] = 0.01
    """Share of documents held out from a source that has no validation part of its own; 0: none, no evaluation."""


class Train(_Section):
    """How much is trained, and in which portions."""

    global_batch_size: Positive = 64
    """Rows per step, over all ranks; accumulation is derived from it."""
    per_device_train_batch_size: Literal["auto"] | Positive = "auto"
    """Rows that one rank runs at once."""
    max_steps: Positive | None = None
    """Steps of the run."""
    max_tokens: Positive | None = None
    """Tokens of the run: the last step is the one that reaches them."""
    num_train_epochs: Annotated[Real, Field(gt=0)] | None = None
    """Passes over the rows of all sources; the last step takes what is left."""
    max_time: Annotated[TimeS, Field(gt=0)] | None = None
    """Longest time from the start of this process, e.g. 3h30m: then a checkpoint, and the run has stopped as asked."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of weights and activations; masters, moments and the loss are always fp32."""
    activation_checkpointing: bool | Positive = False
    """Recompute each layer's activations in the backward pass: less memory, about a quarter more time; n: only those of
    every n-th layer."""
    torch_compile: Literal["auto"] | bool = "auto"
    """Compile each decoder layer; auto: where the steps that are left repay the time that compiling takes."""
    seed: Annotated[Count, Field(ge=0)] = 42
    """Seed of the initial weights and of the data order."""


# What each schedule takes beside warm-up, length and min_lr_ratio; all of it numbers, but for decay_type.
_SCHEDULE_NUMBERS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles",),
    "cosine_warmup_with_min_lr": ("num_cycles", "warmup_lr_rate"),
    "cosine_with_restarts": ("num_cycles",),
    "inverse_sqrt": ("timescale",),
    "polynomial": ("power",),
    "warmup_stable_decay": ("decay_type",),
}
_DECAYS = ("cosine", "linear", "1-sqrt")
# Transformers' other two make a rate from the losses that a run has seen: here it follows from the update's number.
_LOSS_SCHEDULES = ("greedy", "reduce_lr_on_plateau")


def _schedule_name(value: object) -> object:
    if value in _LOSS_SCHEDULES:
        raise ValueError(
            f"{value} follows the losses of a run, so its rates could not be told before it, nor be the same after a "
            "resume; warmup_stable_decay is the nearest: stop its stable part by a changed length whenever you like"
        )
    return value


class Optim(_Section):
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the layers' matrices with AdamW for embeddings, head and vectors; one learning rate serves both."""

    learning_rate: Annotated[Real, Field(gt=0)] = 3e-4
    """Highest learning rate."""
    lr_scheduler_type: Annotated[
        Literal[
            "constant",
            "constant_with_warmup",
            "cosine",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "cosine_with_restarts",
            "inverse_sqrt",
            "linear",
            "polynomial",
            "warmup_stable_decay",
        ],
        BeforeValidator(_schedule_name),
    ] = "cosine"
    """Shape of the schedule, by its name in Transformers."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """The shape's own numbers, by their names in Transformers: num_cycles, power, timescale, decay_type, warmup_lr_rate."""
    warmup_steps: Annotated[Real, Field(ge=0)] = 0.02
    """Steps of linear warm-up; below 1 a share of the run."""
    decay_ratio: Annotated[Real, Field(gt=0, le=1)] = 0.1
    """Last share of the run in which warmup_stable_decay decays."""
    min_lr_ratio: Annotated[Real, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end, as a share of the highest."""
    weight_decay: Annotated[Real, Field(ge=0)] = 0.1
    """Decoupled weight decay, on matrices only: not on norms, biases or other vectors."""
    adam_beta1: Annotated[Real, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[Real, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    adam_epsilon: Annotated[Real, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    muon_momentum: Annotated[Real, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's momentum."""
    max_grad_norm: Annotated[Real, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: never."""


class Parallel(_Section):
    """How the model and its state are spread over the ranks."""

    zero_stage: Annotated[Count, Field(ge=0, le=3)] = 1
    """DeepSpeed's ZeRO: 1 splits the optimizer's state over the ranks, 2 gradients too, 3 weights too."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where masters and moments live, and are updated: on the device, in host memory, or (ZeRO-3) in files on NVMe."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where ZeRO-3's weights live between uses: on the device, in host memory, or in files on NVMe."""
    nvme_path: str | None = None
    """Folder on a local NVMe disk for what is offloaded there; its files are of use to the running process alone."""
    tensor_parallel_size: Positive = 1
    """Ranks that share one layer's matrices; divides the heads and intermediate_size."""
    sequence_parallel_size: Positive = 1
    """Ranks that share one row; divides the heads and data.seq_len."""
    pipeline_parallel_size: Positive = 1
    """Ranks that each hold some of the layers; with zero_stage 0 or 1."""

    @property
    def replica_ranks(self) -> int:
        """Ranks that one copy of the model needs."""
        return self.tensor_parallel_size * self.sequence_parallel_size * self.pipeline_parallel_size


class Checkpoint(_Section):
    """When the run's state is written, and what is kept."""

    save_steps: Positive = 500
    """Steps between checkpoints; one more is written at the end."""
    save_total_limit: Positive | None = 3
    """Checkpoints kept, the newest first; null: all."""
    keep_best: bool = False
    """Whether the one with the lowest evaluation loss is kept besides; each must have been evaluated at its own step."""
    resume_from_checkpoint: str = "auto"
    """auto: from the newest intact one in the run folder; never: only an empty run folder will do; or a checkpoint."""


class Log(_Section):
    """What is written down."""

    logging_steps: Positive = 10
    """Steps between lines in metrics.jsonl."""
    report_to: tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Trackers beside metrics.jsonl; all but tensorboard are extras of their names (docs/report.md)."""
    sample_prompts: tuple[str, ...] = ()
    """Texts that the model continues while it is trained, greedily, into samples/ and TensorBoard."""
    sample_steps: Positive = 500
    """Steps between continuations of sample_prompts; one more at the end."""


class Eval(_Section):
    """Evaluation on held-out rows during the run."""

    eval_steps: Positive | None = 500
    """Steps between evaluations; one more at the end; null: only at the end."""
    eval_on_start: bool = False
    """Whether to evaluate before the first step."""
    max_rows: Positive | None = None
    """At most this many validation rows per source, evenly chosen; null: all."""
    per_device_eval_batch_size: Positive | None = None
    """Rows that one rank evaluates at once; null: as in training."""


class Health(_Section):
    """What happens to a step whose loss or gradient isn't finite, or far above the usual."""

    max_consecutive_skips: Positive = 20
    """After this many skipped updates in a row the run stops (on_spike rollback: or goes back), with exit code 1."""
    spike_factor: Annotated[Real, Field(gt=1)] = 3.0
    """A loss above this many times the median of the last 64 updates is a spike; a gradient norm above ten times as many."""
    on_spike: Literal["skip", "rollback", "stop"] = "skip"
    """skip the update; rollback to the last checkpoint and pass over the rows since; or stop the run."""


class Recipe(_Section):
    """A run."""

    output_dir: str
    """The run folder."""
    model: Model
    data: Data
    train: Train = Train()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    eval: Eval = Eval()
    health: Health = Health()
    deepspeed: str | dict[str, Any] = Field(default_factory=dict)
    """Raw DeepSpeed JSON, a dict or a file, merged into what is compiled from the other sections."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        problems = [
            *_model_problems(self.model),
            *_data_problems(self.data),
            *_train_problems(self.train),
            *_schedule_problems(self.optim),
            *_offload_problems(self.parallel),
            *_muon_problems(self),
        ]
        every, saves = self.eval.eval_steps, self.checkpoint.save_steps
        if self.checkpoint.keep_best and (every is None or saves % every):
            problems.append(
                f"checkpoint.keep_best: each checkpoint needs an evaluation of its own step; save_steps {saves} isn't a "
                f"multiple of eval.eval_steps {'null' if every is None else every}"
            )
        if self.train.precision != "fp32" and self.parallel.zero_stage == 0:
            problems.append(
                f"parallel.zero_stage: 0 with train.precision {self.train.precision}: DeepSpeed then spends Adam's "
                "first step on zero gradients, so updates are not exact; use zero_stage 1 (the same cost, also on one "
                "rank) or fp32"
            )
        if self.train.torch_compile is True and self.train.activation_checkpointing and self.parallel.zero_stage == 3:
            problems.append(
                "train.torch_compile: true with train.activation_checkpointing and parallel.zero_stage 3: the layers stay "
                "as they are, since weights are fetched inside what is recomputed; use torch_compile false, zero_stage 2, "
                "or no activation_checkpointing"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _model_problems(model: Model) -> list[str]:
    problems = []
    if (model.model_name_or_path is None) == (model.config is None):
        problems.append("model: give one of model.model_name_or_path (continue) and model.config (a new model)")
    if model.config is not None and model.tokenizer is None:
        problems.append("model.tokenizer: a new model needs a tokenizer folder (`arriero tokenizer train` makes one)")
    shape = model.config
    if shape is not None:
        if shape.head_dim is None and shape.hidden_size % shape.num_attention_heads:
            problems.append(
                f"model.config: hidden_size {shape.hidden_size} doesn't divide by num_attention_heads "
                f"{shape.num_attention_heads}; change one, or give head_dim"
            )
        if shape.num_key_value_heads and shape.num_attention_heads % shape.num_key_value_heads:
            problems.append(
                f"model.config: num_attention_heads {shape.num_attention_heads} doesn't divide by "
                f"num_key_value_heads {shape.num_key_value_heads}"
            )
    return problems


def _data_problems(data: Data) -> list[str]:
    if not data.sources:
        return ["data.sources: give at least one source"]
    problems = []
    labels = [source.label for source in data.sources]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        problems.append(f"data.sources: {labels.count(label)} sources are called {label!r}; give each a name")
    if data.packing == "best_fit" and not data.isolate_documents:
        problems.append("data.packing: best_fit puts whole documents side by side; it needs isolate_documents true")
    weights = [source.weight for source in data.sources]
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        problems.append("data.sources: give all sources a weight, or none (then: in proportion to their rows)")
    if all(weight is not None and weight == 0 for weight in weights):
        problems.append("data.sources: every weight is 0; at least one source needs a weight above 0")
    return problems


def _schedule_problems(optim: Optim) -> list[str]:
    problems = []
    shape, known = optim.lr_scheduler_type, _SCHEDULE_NUMBERS.get(optim.lr_scheduler_type, ())
    for key, value in optim.lr_scheduler_kwargs.items():
        path = f"optim.lr_scheduler_kwargs.{key}"
        if key in ("min_lr_rate", "min_lr_ratio", "min_lr", "lr_end"):
            problems.append(f"{path}: use optim.min_lr_ratio, a share of learning_rate, which every shape has")
        elif key in ("num_decay_steps", "num_stable_steps"):
            problems.append(f"{path}: use optim.decay_ratio, a share of the run")
        elif key not in known:
            problems.append(f"{path}: {shape} has no such number; it has {', '.join(known) or 'none'}")
        elif key == "decay_type":
            if value not in _DECAYS:
                problems.append(f"{path}: expected one of {', '.join(_DECAYS)}, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            problems.append(f"{path}: expected a number above 0, got {value!r}")
    return problems


def _muon_problems(recipe: Recipe) -> list[str]:
    if recipe.optim.optimizer != "muon":
        return []
    problems = []
    stage, parallel = recipe.parallel.zero_stage, recipe.parallel
    if stage in (1, 2):
        problems.append(
            f"optim.optimizer: muon runs at zero_stage 3 and, in fp32, 0, got {stage}: in the others DeepSpeed keeps Muon's "
            "momentum outside of what a checkpoint of another layout could read; the nearest is zero_stage 3"
        )
    if recipe.optim.max_grad_norm:
        problems.append(
            "optim.max_grad_norm: DeepSpeed takes the norm after Muon has made its steps, so clipping at "
            f"{recipe.optim.max_grad_norm:g} would shrink the steps themselves; set it to 0 with optim.optimizer muon"
        )
    if parallel.offload_optimizer != "none":
        problems.append(
            f"parallel.offload_optimizer: {parallel.offload_optimizer} isn't for muon; offload the weights alone "
            "(offload_param cpu), or use adamw"
        )
    return problems


def _offload_problems(parallel: Parallel) -> list[str]:
    stage, optimizer, param = parallel.zero_stage, parallel.offload_optimizer, parallel.offload_param
    problems = []
    if optimizer == "cpu" and stage == 0:
        problems.append("parallel.offload_optimizer: cpu needs zero_stage 1, 2 or 3, got 0; the nearest is 1")
    if optimizer == "nvme" and stage != 3:
        problems.append(
            f"parallel.offload_optimizer: nvme needs zero_stage 3, got {stage}; use zero_stage 3, or offload to cpu"
        )
    if param != "none" and stage != 3:
        problems.append(
            f"parallel.offload_param: {param} needs zero_stage 3, got {stage}: in the other stages every rank computes "
            "with whole weights; use zero_stage 3, or offload the optimizer alone"
        )
    wants_nvme = "nvme" in (optimizer, param)
    if wants_nvme and parallel.nvme_path is None:
        problems.append("parallel.nvme_path: nvme offload needs a folder on a local NVMe disk, e.g. /local_nvme")
    if parallel.nvme_path is not None and not wants_nvme:
        problems.append("parallel.nvme_path: nothing is offloaded to nvme, so nobody reads it; remove it")
    return problems


def _train_problems(train: Train) -> list[str]:
    lengths = {
        "max_steps": train.max_steps,
        "max_tokens": train.max_tokens,
        "num_train_epochs": train.num_train_epochs,
    }
    given = [name for name, value in lengths.items() if value is not None]
    if len(given) == 1:
        return []
    found = " and ".join(f"{name} {lengths[name]}" for name in given) or "none of them"
    return [f"train: give exactly one of max_steps, max_tokens and num_train_epochs, got {found} (null unsets one)"]
