"""A LLaMA-Factory YAML for pre-training (``stage: pt``) into a recipe: the Trainer's settings, and its own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arriero.convert.draft import Draft
from arriero.convert.hugging_face import carry_source, carry_trainer
from arriero.errors import UserError

_CUTOFF = 2048
# Names of its own, and why they have no key here; settings of the command line's own are silent.
_WHY = {
    "template": "pre-training reads plain text; a chat model's template stays with its tokenizer",
    "max_samples": "give arriero prepare less text",
    "tokenized_path": "arriero prepare --out is that",
    "eval_dataset": "documents are held out when a dataset is prepared (--validation-split)",
    "plot_loss": "metrics.jsonl and TensorBoard have the loss",
    "include_effective_tokens_per_second": "metrics.jsonl has tokens_per_second",
    "buffer_size": "a row's place is a permutation's, nothing is buffered",
    "enable_liger_kernel": "with pip install 'arriero[gpu]' they are used on GPUs",
    "use_unsloth": "arriero trains Transformers' own model code",
    "rope_scaling": "a folder's config.json has it",
    "quantization_bit": "weights are trained whole",
    "use_galore": "optim.optimizer is adamw or muon",
    "use_badam": "optim.optimizer is adamw or muon",
    "use_apollo": "optim.optimizer is adamw or muon",
    "use_adam_mini": "optim.optimizer is adamw or muon",
    "ray_run_name": "arriero starts its own ranks",
}
_SILENT = {"streaming", "overwrite_cache", "preprocessing_batch_size", "dataset_dir", "flash_attn", "resize_vocab"}


def convert_llama_factory(given: dict[str, Any], *, gpus: int | None, folder: Path) -> Draft:
    """A draft of its settings. Raises ``UserError`` for another stage than pt."""
    stage = given.get("stage", "sft")
    if stage != "pt":
        raise UserError(
            f"stage: {stage} isn't pre-training, and that is all arriero does",
            "Convert a file with stage: pt; what comes after it stays with LLaMA-Factory, on arriero export's folder.",
        )
    draft = Draft("LLaMA-Factory")
    left = {name: value for name, value in given.items() if value is not None and name not in {"stage", *_SILENT}}
    kind = left.pop("finetuning_type", "lora")
    if kind != "full":
        adapters = [f"{name} {left.pop(name)}" for name in list(left) if name.startswith(("lora_", "freeze_", "oft_"))]
        note = "; needs far more memory: see arriero plan"
        draft.drop("finetuning_type", f"{kind} {' '.join(adapters)}".strip(), f"arriero trains all weights{note}")
    draft.put("model.model_name_or_path", left.pop("model_name_or_path", "FOLDER"), "model_name_or_path")
    if left.pop("adapter_name_or_path", None):
        draft.drop("adapter_name_or_path", given["adapter_name_or_path"], "merge it into the model first")
    _carry_data(draft, left, given, folder)
    length = int(left.pop("cutoff_len", _CUTOFF))
    draft.put("data.seq_len", length, "cutoff_len", "" if "cutoff_len" in given else "LLaMA-Factory's default")
    _carry_packing(draft, left)
    for name in [name for name in left if name in _WHY]:
        if value := left.pop(name):
            draft.drop(name, value, _WHY[name])
    carry_trainer(draft, left, gpus=gpus, folder=folder)
    return draft


def _carry_data(draft: Draft, left: dict[str, Any], given: dict[str, Any], folder: Path) -> None:
    names = _listed(left.pop("dataset", None))
    probabilities = _listed(left.pop("interleave_probs", None))
    weights = [float(one) for one in probabilities] or None
    strategy = left.pop("mix_strategy", "concat")
    if weights and strategy == "concat":
        draft.clashes.append(f"data.sources[].weight: interleave_probs says {weights}, mix_strategy says concat")
    if weights and len(weights) != len(names):
        draft.clashes.append(f"data.sources[].weight: {len(names)} datasets, but {len(weights)} interleave_probs")
        weights = None
    if not weights and strategy != "concat":
        weights = [1.0] * len(names)
    place = folder / str(given.get("dataset_dir", "data"))
    found = [_text_of(name, place) for name in names]
    fields = {text: column for text, column in found if column != "text"}
    carry_source(draft, [text for text, _ in found], weights, fields)
    held = left.pop("val_size", 0)
    if isinstance(held, int | float) and held >= 1:
        draft.drop("val_size", held, "a number of texts there; give the share, data.validation_split")
    else:
        draft.put("data.validation_split", float(held), "val_size")


def _text_of(name: str, place: Path) -> tuple[str, str]:
    """(what ``dataset_info.json`` says that a dataset's name stands for, its column); the name itself where the file
    isn't here."""
    try:
        entry = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError):
        return name, "text"
    column = entry.get("columns", {}).get("prompt", "text")
    if "hf_hub_url" in entry:
        return f"hf://{entry['hf_hub_url']}" + (f"/{entry['subset']}" if entry.get("subset") else ""), column
    return str(place / entry["file_name"]) if "file_name" in entry else name, column


def _carry_packing(draft: Draft, left: dict[str, Any]) -> None:
    packing, apart = left.pop("packing", True), left.pop("neat_packing", False)
    if packing is False and apart:
        draft.clashes.append("data.isolate_documents: packing says false, neat_packing says true")
    if packing is False and not apart:
        draft.drop("packing", packing, "rows are always packed; best_fit keeps texts whole that fit into a row")
        draft.put("data.packing", "best_fit", "packing", "packing: false there, a text in each row")
        draft.put("data.isolate_documents", True, "packing")
        return
    note = "" if apart else "packing there attends across texts; true keeps them apart"
    draft.put("data.isolate_documents", bool(apart), "neat_packing", note)


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(","))]
