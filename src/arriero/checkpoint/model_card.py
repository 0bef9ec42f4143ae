"""The README of an exported model: what it was trained on, for how long, by which recipe, how it scored, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arriero.checkpoint.saved import read_json
from arriero.config.load import parse_yaml

# A folder may be replaced by an export only if an export wrote it.
MARK = "tags: [arriero, deepspeed]"

_USE = {
    "hf": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")
inputs = tokenizer("…", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

Transformers from 4.46 on reads it, and what reads its folders: vLLM, SGLang, lm-eval, llama.cpp's converter.""",
    "gguf": "With llama.cpp and what is built on it: `llama-cli -m FILE.gguf -p …`, `llama-server -m FILE.gguf`.",
    "universal": """Masters and Adam's moments in DeepSpeed's universal layout, for a script of your own at ZeRO stage 1, 2 or 3 and any
number of ranks. Its DeepSpeed configuration says `"checkpoint": {"load_universal": true}`, and then
`engine.load_checkpoint("FOLDER")` before the first step.""",
}


def model_card(checkpoint: Path, *, parameters: int, dtype: str, form: str) -> str:
    """Markdown with Hugging Face's header. form: hf, gguf or universal."""
    trainer, data = read_json(checkpoint, "trainer_state.json"), read_json(checkpoint, "data_state.json")
    recipe = parse_yaml(trainer["recipe"])
    base = recipe["model"].get("model_name_or_path")
    evaluation = {key: value for key, value in trainer.get("evaluation", {}).items() if key != "eval_step"}
    scored = (
        "\n".join(["| | |", "|---|---|", *(f"| {_words(key)} | {value:.5g} |" for key, value in evaluation.items())])
        if evaluation
        else "None was made."
    )
    return f"""---
library_name: {"gguf" if form == "gguf" else "deepspeed" if form == "universal" else "transformers"}
pipeline_tag: text-generation
{MARK}
---

# A causal language model trained with arriero

{parameters:,} parameters in {dtype}, from `{checkpoint.name}`: {trainer["step"]:,} steps, {trainer["tokens"]:,} tokens,
{f"continuing `{base}`" if base else "from random weights"}, trained in {trainer["precision"]}.

## Use

{_USE[form]}

## Data

{_data_table(trainer, data, recipe["data"]["seq_len"])}

## Evaluation on held-out documents

{scored}

## Recipe

```yaml
{trainer["recipe"].strip()}
```
"""


def _data_table(trainer: dict[str, Any], data: dict[str, Any], seq_len: int) -> str:
    epochs = {source["name"]: source["epochs"] for source in trainer["sources"]}
    prints = {source["name"]: source.get("fingerprint") or "" for source in data["sources"]}
    rows = [
        f"| {name} | {taken * seq_len:,} | {epochs.get(name, 0):.3g} | `{prints.get(name, '')}` |"
        for name, taken in data["taken"].items()
    ]
    return "\n".join(["| source | tokens seen | epochs | dataset's fingerprint |", "|---|--:|--:|---|", *rows])


def _words(key: str) -> str:
    return key.removeprefix("eval_").replace("_", " ")
