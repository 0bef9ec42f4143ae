"""The key map: every key of ours exists in the recipe, and other systems' names lead to it."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from arriero.config.keys import KEY_MAP, NOTES, SYSTEMS, nearest, translate


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key that a recipe may have; ``x[]`` for the entries of a list, ``x.*`` under an open mapping."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        yield from _inside(field.annotation, path)


def _inside(annotation: Any, path: str) -> Iterator[str]:
    origin = get_origin(annotation)
    if isinstance(annotation, type) and origin is None and issubclass(annotation, BaseModel):
        yield from key_paths(annotation, f"{path}.")
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _inside(part, path)
    elif origin in (list, tuple):
        for part in get_args(annotation):
            yield from _inside(part, f"{path}[]")
    elif isinstance(origin or annotation, type) and issubclass(origin or annotation, Mapping):
        yield f"{path}.*"
    elif origin is not None:  # Annotated and its like
        yield from _inside(get_args(annotation)[0], path)


def test_paths_of_a_nested_model() -> None:
    class Source(BaseModel):
        path: str

    class Data(BaseModel):
        sources: tuple[Source, ...] = ()
        options: dict[str, int] | str | None = None

    class Whole(BaseModel):
        data: Data | None = None
        raw: Mapping[str, Any] = {}

    assert set(key_paths(Whole)) == {
        "data",
        "data.sources",
        "data.sources[].path",
        "data.options",
        "data.options.*",
        "raw",
        "raw.*",
    }


def test_every_key_of_ours_is_in_the_recipe() -> None:
    from arriero.config.schema import Recipe

    known = set(key_paths(Recipe))
    unknown = [key for key in KEY_MAP if key not in known and f"{key.rpartition('.')[0]}.*" not in known]
    assert not unknown, f"not in the schema: {unknown}"


def test_the_map_is_tidy() -> None:
    names = {word for systems in KEY_MAP.values() for text in systems.values() for word in text.split()}
    assert {system for systems in KEY_MAP.values() for system in systems} == set(SYSTEMS)
    assert not set(NOTES) - names, "a note on a name that no key has"
    for key, systems in KEY_MAP.items():
        for system, text in systems.items():
            assert text.split(), (key, system)
            assert len(set(text.split())) == len(text.split()), (key, system)


@pytest.mark.parametrize(
    ("name", "system", "ours"),
    [
        ("per_device_train_batch_size", "hf", "train.per_device_train_batch_size"),
        ("train.micro_batch_size", "litgpt", "train.per_device_train_batch_size"),
        ("micro_batch_size", "axolotl", "train.per_device_train_batch_size"),
        ("--micro-batch-size", "megatron", "train.per_device_train_batch_size"),
        ("train_micro_batch_size_per_gpu", "deepspeed", "train.per_device_train_batch_size"),
        ("gradient_accumulation_steps", "hf", "train.global_batch_size"),
        ("gradient_checkpointing", "hf", "train.activation_checkpointing"),
        ("warmup_ratio", "hf", "optim.warmup_steps"),
        ("training.local_batch_size", "torchtitan", "train.per_device_train_batch_size"),
        ("--zero_stage", "deepspeed-chat", "parallel.zero_stage"),
        ("optimizer.type", "deepspeed", "optim.optimizer"),
        ("--kv-channels", "megatron", "model.config.head_dim"),
        ("load_best_model_at_end", "hf", "checkpoint.keep_best"),
        ("pretraining_dataset", "axolotl", "data.sources[].path"),
        ("--tensor-model-parallel-size", "megatron", "parallel.tensor_parallel_size"),
        ("cutoff_len", "llama-factory", "data.seq_len"),
        ("sequence_len", "axolotl", "data.seq_len"),
        ("eval.interval", "litgpt", "eval.eval_steps"),
        ("checkpoint.interval", "torchtitan", "checkpoint.save_steps"),
        ("optim.lr", "megatron", "optim.learning_rate"),
        ("model.hidden_size", "hf", "model.config.hidden_size"),
        ("parallel.STAGE", "deepspeed", "parallel.zero_stage"),
    ],
)
def test_translate(name: str, system: str, ours: str) -> None:
    hints = translate(name)
    assert (system, ours) in hints
    assert hints[0][1] == ours


@pytest.mark.parametrize("name", ["enable", "type", "model.device", "no_such_thing", "", "train."])
def test_translate_does_not_guess(name: str) -> None:
    assert translate(name) == []


def test_one_name_for_two_of_our_keys() -> None:
    assert {ours for _, ours in translate("optimizer.params.betas")} == {"optim.adam_beta1", "optim.adam_beta2"}
    assert translate("train.steps")[0] == ("torchtitan", "train.max_steps")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optim.learning_rat", "optim.learning_rate"),
        ("train.learningrate", "optim.learning_rate"),
        ("data.seqlen", "data.seq_len"),
        ("train.max_step", "train.max_steps"),
        ("parallel.zerostage", "parallel.zero_stage"),
        ("evl.eval_steps", "eval.eval_steps"),
        ("train.max_epochs", None),
        ("foo", None),
    ],
)
def test_nearest(name: str, expected: str | None) -> None:
    assert nearest(name, KEY_MAP) == expected


def test_nearest_prefers_the_same_section() -> None:
    assert nearest("b.sed", ["a.seed", "b.seed", "c.seed"]) == "b.seed"
    assert nearest("learning_rat", ["weight_decay", "learning_rate"]) == "learning_rate"
    assert nearest("anything", []) is None


def test_needs_only_the_standard_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import arriero.config.keys\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= set(sys.stdlib_module_names) | {'arriero'}, new\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
