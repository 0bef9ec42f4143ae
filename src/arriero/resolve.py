"""A recipe with what it names opened and found to fit together, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.checkpoint.saved import read_json
from arriero.config.schema import ModelShape, Recipe
from arriero.data.loader import Source, TrainingData, open_sources
from arriero.data.shards import dataset_exists
from arriero.data.tokenizer import has_tokenizer, load_tokenizer, tokenizer_fingerprint
from arriero.engine.ds_config import compile_ds_config, read_deepspeed_json, value_sources
from arriero.errors import UserError
from arriero.model.build import has_weights, model_config, model_folder, parameter_total
from arriero.planner.arithmetic import (
    Setup,
    accumulation_steps,
    check_rows,
    run_length,
)
from arriero.planner.calibration import rank_device
from arriero.planner.hardware import find_network
from arriero.planner.layouts import Layout, choose_layout
from arriero.planner.memory import MemoryEstimate, auto_micro_batch, estimate_memory, practice_of
from arriero.planner.throughput import StepTime, step_time


@dataclass(frozen=True)
class Plan:
    """The numbers that follow from a recipe, its data and the number of data-parallel ranks."""

    steps: int
    end: int
    """Position at which the run ends; rows behind it are padding."""
    seq_len: int
    global_batch_size: int
    micro_batch: int
    accumulation: int
    dp: int
    parameters: int
    epochs: dict[str, float]
    """How often each source will have been passed through."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True)
class Inputs:
    """A recipe with its data and tokenizer opened and found to fit together, and where its run stands."""

    recipe: Recipe
    sources: list[Source]
    data: TrainingData
    tokenizer: Any
    folder: Path | None
    """The Hugging Face folder of a model that is continued."""
    config: Any
    plan: Plan
    layout: Layout
    stand: dict[str, Any]
    """``trainer_state.json`` of the checkpoint that is continued from; empty for a new run."""
    notes: list[str] = field(default_factory=list)
    """What was chosen for the user, and why."""


@dataclass(frozen=True)
class Outline:
    """What follows from a recipe's shapes alone, while some of what it names isn't there yet."""

    recipe: Recipe
    config: Any
    plan: Plan
    layout: Layout
    missing: list[str]
    """What isn't there, each with what makes it."""
    notes: list[str] = field(default_factory=list)
    sources: tuple[Source, ...] = ()
    stand: dict[str, Any] = field(default_factory=dict)


def resolve(
    recipe: Recipe,
    ranks: int,
    checkpoint: Path | None = None,
    *,
    memory_bytes: int | None = None,
    on_gpu: bool = False,
    weights: bool = True,
) -> Inputs:
    """Open what the recipe names and derive layout and plan; ``UserError`` for whatever doesn't fit, before anything
    starts.

    checkpoint: what a run is continued from; then the plan is of what is still to do, by today's recipe.
    memory_bytes: of the device of one rank, a GPU or its part of a CPU, which ``per_device_train_batch_size: auto`` may
    fill; None: not known. weights: fetch those of a model on the hub, which only training needs.
    """
    name_or_path = recipe.model.model_name_or_path
    folder = model_folder(name_or_path, weights=weights) if name_or_path else None
    name = str(recipe.model.tokenizer or folder)
    tokenizer = load_tokenizer(name)
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = model_config(recipe.model, folder, vocab_size=len(tokenizer), seq_len=recipe.data.seq_len, token_ids=ids)
    sources = open_sources(recipe.data)
    check_tokenizer(sources, tokenizer, config.vocab_size, name)
    stand: dict[str, Any] = {}
    data = TrainingData(sources, seed=recipe.train.seed)
    if checkpoint is not None:
        stand = read_json(checkpoint, "trainer_state.json")
        data = TrainingData.continued(sources, seed=recipe.train.seed, record=read_json(checkpoint, "data_state.json"))
    layout, parameters, micro_batch, why = _arranged(recipe, config, ranks, memory_bytes, on_gpu)
    plan = make_plan(
        recipe,
        data,
        parameters,
        layout.dp,
        micro_batch,
        **{name: stand.get(name, 0) for name in ("step", "position", "tokens")},
    )
    return Inputs(recipe, sources, data, tokenizer, folder, config, plan, layout, stand, [why] if why else [])


def outline(recipe: Recipe, ranks: int, *, memory_bytes: int | None = None, on_gpu: bool = False) -> Outline | None:
    """The same from shapes alone, where datasets, the tokenizer or weights aren't there yet; None where all of them are.

    Raises ``UserError`` where a size depends on what is missing, and for whatever doesn't fit.
    """
    name = recipe.model.model_name_or_path
    folder = model_folder(name, weights=False) if name else None
    missing = []
    if name and folder is not None and Path(name).is_dir() and not has_weights(folder):
        missing.append(f"{name}: it has no safetensors files")
    tokenizer, tokenizer_name = None, recipe.model.tokenizer or str(folder)
    try:
        tokenizer = load_tokenizer(tokenizer_name)
    except UserError:
        if has_tokenizer(tokenizer_name):
            raise  # there, and of no use
        makes = f"arriero tokenizer train TEXT --vocab-size N --out {tokenizer_name}"
        missing.append(f"{tokenizer_name}: no tokenizer there{f'; {makes}' if recipe.model.tokenizer else ''}")
    for source in recipe.data.sources:
        if not dataset_exists(Path(source.path)):
            by = recipe.model.tokenizer or name
            missing.append(f"{source.path}: arriero prepare TEXT --tokenizer {by} --out {source.path}")
    if not missing:
        return None
    shape = recipe.model.config
    if shape is not None and shape.vocab_size is None and tokenizer is None:
        raise UserError(
            f"the model's size depends on its tokenizer's, and there is no {tokenizer_name}",
            "Give model.config.vocab_size, or make the tokenizer first.",
        )
    length = len(tokenizer) if tokenizer is not None else (shape.vocab_size or 0) if shape is not None else 0
    config = model_config(recipe.model, folder, vocab_size=length, seq_len=recipe.data.seq_len, token_ids={})
    layout, parameters, rows, why = _arranged(recipe, config, ranks, memory_bytes, on_gpu)
    train = recipe.train
    if train.num_train_epochs is not None:
        raise UserError(
            "train.num_train_epochs: how long that is, is known when the data is there; missing:\n  "
            + "\n  ".join(missing),
            "Prepare it first, or give max_tokens or max_steps.",
        )
    steps, end = run_length(train, seq_len=recipe.data.seq_len, epoch_rows=0, step=0, position=0, tokens=0, counted=0)
    plan = Plan(
        steps,
        end,
        recipe.data.seq_len,
        train.global_batch_size,
        rows,
        accumulation_steps(train, dp=layout.dp, micro_batch=rows),
        layout.dp,
        parameters,
        {},
    )
    return Outline(recipe, config, plan, layout, missing, [why] if why else [])


def _arranged(
    recipe: Recipe, config: Any, ranks: int, memory_bytes: int | None, on_gpu: bool
) -> tuple[Layout, int, int, str]:
    """(layout, parameters, rows of a micro-batch, why so many)."""
    layout = choose_layout(recipe, shape_of(config), ranks)
    # Transformers' own count: a formula for LLaMA's layers would miss the biases or norms that others add.
    parameters = parameter_total(config)
    micro_batch, why = auto_micro_batch(
        recipe,
        shape_of(config),
        setup_of(recipe, layout),
        parameters=parameters,
        vocab_size=config.vocab_size,
        memory_bytes=memory_bytes,
        on_gpu=on_gpu,
    )
    return layout, parameters, micro_batch, why


def show_dataset(path: Path, dp: int, seq_len: int) -> Inputs:
    """One dataset as a run of single rows per rank would read it, for looking at it without a recipe."""
    placeholder = {"hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1}
    recipe = Recipe.model_validate(
        {
            "output_dir": "",
            "model": {"config": placeholder, "tokenizer": ""},
            "data": {"sources": [{"path": str(path)}], "seq_len": seq_len},
            "train": {"global_batch_size": dp, "per_device_train_batch_size": 1, "num_train_epochs": 1},
        }
    )
    sources = open_sources(recipe.data)
    assert recipe.model.config is not None
    config = recipe.model.config.model_copy(update={"vocab_size": sources[0].dataset.largest_id + 1})
    data = TrainingData(sources, seed=recipe.train.seed)
    return Inputs(recipe, sources, data, None, None, config, make_plan(recipe, data, 0, dp, 1), Layout(dp), {})


def check_tokenizer(sources: Sequence[Source], tokenizer: Any, embeddings: int, name: str) -> None:
    """``UserError`` where a dataset was made with another tokenizer, or holds ids that the model can't embed."""
    ours = tokenizer_fingerprint(tokenizer)
    for source in sources:
        theirs = source.dataset.tokenizer_fingerprint
        if theirs is not None and theirs != ours:
            raise UserError(
                f"{source.dataset.path} was prepared with another tokenizer than {name}: fingerprint {theirs}, "
                f"the model's is {ours}",
                f"Prepare it again: arriero prepare … --tokenizer {name} --out {source.dataset.path}",
            )
        if source.dataset.largest_id >= embeddings:
            raise UserError(
                f"{source.dataset.path} holds token id {source.dataset.largest_id:,}, the model has only "
                f"{embeddings:,} embeddings",
                "Use the tokenizer that belongs to the model.",
            )


def make_plan(
    recipe: Recipe,
    data: TrainingData,
    parameters: int,
    dp: int,
    micro_batch: int,
    *,
    step: int = 0,
    position: int = 0,
    tokens: int = 0,
) -> Plan:
    """Batches, steps and epochs; ``UserError`` where they don't come out.

    parameters: of the model, carried along. step, position and tokens: where a run that is continued stands.
    """
    train, seq_len = recipe.train, recipe.data.seq_len
    accumulation = accumulation_steps(train, dp=dp, micro_batch=micro_batch)
    mixture = data.mixture
    steps, end = run_length(
        train,
        seq_len=seq_len,
        epoch_rows=sum(source.rows for source in mixture.sources),
        step=step,
        position=position,
        tokens=tokens,
        counted=sum(mixture.counted_at(position).values()),
    )
    check_rows(end, mixture.end, mixture.epochs_at(position if mixture.end is None else mixture.end))
    return Plan(
        steps,
        end,
        seq_len,
        train.global_batch_size,
        micro_batch,
        accumulation,
        dp,
        parameters,
        mixture.epochs_at(end),
    )


def setup_of(recipe: Recipe, layout: Layout, *, micro_batch: int = 1, accumulation: int = 1) -> Setup:
    """What the planner asks of a recipe in a layout of its ranks."""
    return Setup(
        ranks=layout.ranks,
        zero_stage=recipe.parallel.zero_stage,
        tensor=layout.tensor,
        sequence=layout.sequence,
        pipeline=layout.pipeline,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpoint_every=int(recipe.train.activation_checkpointing),
        offload_optimizer=recipe.parallel.offload_optimizer,
        offload_param=recipe.parallel.offload_param,
    )


def planned(inputs: Inputs | Outline, device: str, ranks_here: int) -> tuple[MemoryEstimate, StepTime | None]:
    """What the planner says of a run: the memory of its fullest rank, and the time of a step.

    device: of a rank, as its driver calls it, or ``cpu``, which ``ranks_here`` ranks of a host share. No time for a GPU
    that isn't in the planner's table and a CPU that was never measured.
    """
    recipe, plan, on_gpu = inputs.recipe, inputs.plan, device != "cpu"
    shape = shape_of(inputs.config)
    setup = setup_of(recipe, inputs.layout, micro_batch=plan.micro_batch, accumulation=plan.accumulation)
    given: dict[str, Any] = {
        "parameters": plan.parameters,
        "vocab_size": inputs.config.vocab_size,
        "seq_len": plan.seq_len,
        "practice": practice_of(recipe, setup, on_gpu=on_gpu),
    }
    memory = estimate_memory(shape, setup, on_gpu=on_gpu, **given)
    known = rank_device(device, ranks_here)
    if known is None:
        return memory, None
    return memory, step_time(shape, setup, known, find_network(known.network), **given)


def deepspeed_config(inputs: Inputs | Outline) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The dictionary for ``deepspeed.initialize``, notes on what was filled in, and where each value came from.

    Raises ``UserError`` where the recipe's own DeepSpeed JSON can't be read or contradicts the recipe.
    """
    recipe, plan = inputs.recipe, inputs.plan
    raw, origin = read_deepspeed_json(recipe.deepspeed)
    compiled, notes = compile_ds_config(
        recipe,
        raw,
        origin,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        dp=plan.dp,
        hidden_size=inputs.config.hidden_size,
        parameters=plan.parameters,
    )
    return compiled, notes, value_sources(recipe, raw, origin, compiled)


def shape_of(config: Any) -> ModelShape:
    """The part of a Transformers configuration that sizes and times follow from."""
    known = {name: getattr(config, name) for name in ModelShape.model_fields if hasattr(config, name)}
    return ModelShape(**{name: value for name, value in known.items() if value is not None})
