"""What a run is, written into its folder at every start, and whether a folder belongs to a recipe."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from arriero.checkpoint.layout import list_checkpoints, verify
from arriero.config.load import differing_keys, parse_yaml, recipe_yaml
from arriero.config.schema import Recipe
from arriero.errors import UserError
from arriero.resolve import Inputs
from arriero.run_folder import RunFolder, replace_text

# What makes a run another run: with these changed, its weights or the rows that it has taken mean something else.
# data.seq_len isn't among them: rows that weren't taken are cut anew (arriero.data.loader.cut_anew).
_IDENTITY = (
    "model.",
    "data.packing",
    "data.isolate_documents",
    "data.validation_split",
    "train.seed",
)


def check_same_run(run: RunFolder, recipe: Recipe) -> list[str]:
    """Notes on what has changed since the last start; ``UserError`` where the folder belongs to another run."""
    if not run.config.is_file():
        return []
    changes = differing_keys(parse_yaml(run.config.read_text(encoding="utf-8")), recipe.model_dump(mode="json"))
    foreign = [change for change in changes if change[0].startswith(_IDENTITY)]
    if foreign:
        listed = "\n".join(f"  {path}: {old!r} in the folder, {new!r} in the recipe" for path, old, new in foreign)
        raise UserError(
            f"{run.path} belongs to another run:\n{listed}",
            "Give this recipe another output_dir, or set these keys back to continue the old run.",
        )
    return [f"changed since the last start: {path} {old!r} → {new!r}" for path, old, new in changes]


def goes_on_from(recipe: Recipe) -> Path | None:
    """The checkpoint that ``arriero train`` would go on from, judged by its files' sizes alone; None for a new run.

    Raises ``UserError`` where the folder belongs to another run.
    """
    run, resume = RunFolder(Path(recipe.output_dir)), recipe.checkpoint.resume_from_checkpoint
    check_same_run(run, recipe)
    found = {"auto": list_checkpoints(run.path), "never": []}.get(resume, [Path(resume)])
    return next((path for path in reversed(found) if verify(path, content=False).intact), None)


def describe_run(run: RunFolder, inputs: Inputs, overrides: Sequence[str], ds_config: Mapping[str, Any]) -> None:
    """Write what the run is: recipe, overrides, DeepSpeed's dictionary, versions, and the model without its weights."""
    replace_text(run.config, recipe_yaml(inputs.recipe))
    replace_text(run.path / "overrides.txt", "".join(f"{line}\n" for line in overrides))
    replace_text(run.path / "ds_config.json", json.dumps(ds_config, indent=2) + "\n")
    replace_text(run.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
    inputs.config.save_pretrained(run.model)
    write_tokenizer_files(inputs, run.model)


def write_tokenizer_files(inputs: Inputs, folder: Path) -> None:
    """Tokenizer and generation files, unchanged where they come from a folder."""
    from transformers import GenerationConfig

    model = inputs.recipe.model
    name = model.tokenizer or model.model_name_or_path
    assert name is not None
    files = [path for path in Path(name).glob("*") if is_tokenizer_file(path)] if Path(name).is_dir() else []
    if any(path.name == "tokenizer.json" for path in files):
        for path in files:
            shutil.copyfile(path, folder / path.name)
    else:
        inputs.tokenizer.save_pretrained(folder)
        name_as_version_4(folder / "tokenizer_config.json")
    base = Path(model.model_name_or_path or "") / "generation_config.json"
    if model.model_name_or_path and base.is_file():
        shutil.copyfile(base, folder / base.name)
    else:
        config = inputs.config
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ).save_pretrained(folder)


def name_as_version_4(path: Path) -> None:
    """The same settings by the names that Transformers 4 knows too: it refuses version 5's class and its list of tokens."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    replace_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def is_tokenizer_file(path: Path) -> bool:
    """Whether a file of a Hugging Face folder belongs to the tokenizer."""
    names = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template")
    return path.is_file() and path.name.startswith(names)


def environment() -> dict[str, Any]:
    """Versions and the machine, without names, addresses or variables that may hold secrets."""
    packages = ("arriero", "torch", "deepspeed", "transformers", "tokenizers", "gigatoken", "safetensors", "numpy")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {name: version(name) for name in packages},
    }
