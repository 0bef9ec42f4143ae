"""A recipe with what it names opened and found to fit together, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.config.schema import ModelShape, Recipe
from arriero.data.loader import Source, mixture_sources, open_sources
from arriero.data.order import DataState, Mixture
from arriero.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from arriero.errors import UserError
from arriero.model.build import model_config, model_folder, parameter_total
from arriero.planner.arithmetic import (
    Layout,
    accumulation_steps,
    check_rows,
    run_length,
)
from arriero.planner.memory import auto_micro_batch


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
    """A recipe with its data and tokenizer opened and found to fit together."""

    recipe: Recipe
    sources: list[Source]
    tokenizer: Any
    folder: Path | None
    """The Hugging Face folder of a model that is continued."""
    config: Any
    plan: Plan
    notes: list[str] = field(default_factory=list)
    """What was chosen for the user, and why."""


def resolve(recipe: Recipe, dp: int, *, memory_bytes: int | None = None, on_gpu: bool = False) -> Inputs:
    """Open what the recipe names and derive the plan; ``UserError`` for whatever doesn't fit, before anything starts.

    memory_bytes: of the device of one rank, a GPU or its part of a CPU, which ``per_device_train_batch_size: auto`` may
    fill; None: not known.
    """
    folder = model_folder(recipe.model.model_name_or_path) if recipe.model.model_name_or_path else None
    name = str(recipe.model.tokenizer or folder)
    tokenizer = load_tokenizer(name)
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = model_config(recipe.model, folder, vocab_size=len(tokenizer), seq_len=recipe.data.seq_len, token_ids=ids)
    sources = open_sources(recipe.data)
    check_tokenizer(sources, tokenizer, config.vocab_size, name)
    # Transformers' own count: a formula for LLaMA's layers would miss the biases or norms that others add.
    parameters = parameter_total(config)
    micro_batch, why = auto_micro_batch(
        recipe,
        shape_of(config),
        Layout(dp, recipe.parallel.zero_stage, checkpoint_every=int(recipe.train.activation_checkpointing)),
        parameters=parameters,
        vocab_size=config.vocab_size,
        memory_bytes=memory_bytes,
        on_gpu=on_gpu,
    )
    plan = make_plan(recipe, sources, parameters, dp, micro_batch)
    return Inputs(recipe, sources, tokenizer, folder, config, plan, [why] if why else [])


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
    return Inputs(recipe, sources, None, None, config, make_plan(recipe, sources, 0, dp, 1))


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
    sources: Sequence[Source],
    parameters: int,
    dp: int,
    micro_batch: int,
    *,
    step: int = 0,
    position: int = 0,
    start: DataState | None = None,
) -> Plan:
    """Batches, steps and epochs; ``UserError`` where they don't come out.

    parameters: of the model, carried along. step, position and start: where a run that is continued stands, and where its mixture began.
    """
    train, seq_len = recipe.train, recipe.data.seq_len
    accumulation = accumulation_steps(train, dp=dp, micro_batch=micro_batch)
    epoch_rows = sum(len(source.training) for source in sources)
    steps, end = run_length(train, seq_len=seq_len, epoch_rows=epoch_rows, step=step, position=position)
    mixture = Mixture(mixture_sources(sources), train.seed, start)
    last = max(position, mixture.start.position)
    check_rows(end, mixture.end, mixture.epochs_at(last if mixture.end is None else mixture.end))
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


def shape_of(config: Any) -> ModelShape:
    """The part of a Transformers configuration that sizes and times follow from."""
    known = {name: getattr(config, name) for name in ModelShape.model_fields if hasattr(config, name)}
    return ModelShape(**{name: value for name, value in known.items() if value is not None})
