"""Writes what each shipped recipe costs, by `arriero plan`, into its first lines and into the table of docs/recipes.md.

python docs/make_recipe_headers.py            writes them
python docs/make_recipe_headers.py --check    exit 1 if one of them isn't what the planner says today
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from arriero.config.load import load_recipe
from arriero.config.schema import ModelShape
from arriero.planner.header import certainty, cost_line
from arriero.planner.plan import Forecast, Planner, plan

HERE = Path(__file__).parent
RECIPES = HERE.parent / "src" / "arriero" / "recipes"
PAGE = HERE / "recipes.md"


@dataclass(frozen=True)
class Target:
    """The machine that a recipe is made for."""

    gpus: int
    gpu: str

    @property
    def start(self) -> str:
        """How it is started, as far as the file goes."""
        if self.gpus <= 8:
            return f"arriero train FILE --nproc {self.gpus}"
        return f"arriero launch FILE --slurm --nodes {self.gpus // 8} --gpus-per-node 8 (or --hostfile, --kubernetes)"


TARGETS = {
    "llama3_1_70b/continued_16x8xh100": Target(128, "H100-SXM"),
    "llama3_1_8b/continued_8xh100": Target(8, "H100-SXM"),
    "llama3_1_8b/continued_8xrtx4090_offload": Target(8, "RTX-4090"),
    "llama3_1_8b/long_128k_8xh100": Target(8, "H100-SXM"),
    "llama3_1_8b/scratch_4x8xh100": Target(32, "H100-SXM"),
    "llama3_2_1b/continued_8xrtx4090": Target(8, "RTX-4090"),
    "llama3_2_1b/scratch_8xh100": Target(8, "H100-SXM"),
    "mistral_7b/continued_8xh100": Target(8, "H100-SXM"),
    "qwen3_8b/continued_8xh100": Target(8, "H100-SXM"),
}


def _shape(hidden: int, feed: int, layers: int, heads: int, vocab: int, **more: object) -> ModelShape:
    return ModelShape.model_validate(
        {
            "hidden_size": hidden,
            "intermediate_size": feed,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "vocab_size": vocab,
            **more,
        }
    )


# What the config.json of each hub name says, so that this runs without the hub.
HUB = {
    "meta-llama/Llama-3.2-1B": _shape(2048, 8192, 16, 32, 128_256, head_dim=64, tie_word_embeddings=True),
    "meta-llama/Llama-3.1-8B": _shape(4096, 14336, 32, 32, 128_256),
    "meta-llama/Llama-3.1-70B": _shape(8192, 28672, 80, 64, 128_256),
    "Qwen/Qwen3-8B-Base": _shape(4096, 12288, 36, 32, 151_936, model_type="qwen3", head_dim=128),
    "mistralai/Mistral-7B-v0.3": _shape(4096, 14336, 32, 32, 32_768, model_type="mistral"),
}


def forecast(name: str) -> tuple[Planner, Forecast]:
    """The plan of a recipe as it stands, on the machine that it is made for."""
    recipe, target = load_recipe(RECIPES / f"{name}.yaml"), TARGETS[name]
    hub = recipe.model.model_name_or_path
    if hub is not None:  # the planner would ask the hub for the shape
        model = recipe.model.model_copy(update={"model_name_or_path": None, "config": HUB[hub], "tokenizer": hub})
        recipe = recipe.model_copy(update={"model": model})
    planner = plan(recipe, gpus=target.gpus, gpu=target.gpu)
    return planner, planner.forecast(planner.own_layout(), own=True)


def render(name: str) -> str:
    """The recipe's text with the opening lines as they should be."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    body = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    planner, one = forecast(name)
    if not one.fits:
        sys.exit(f"{name} doesn't fit: {cost_line(planner, one)}")
    says = [
        f"Planned: {cost_line(planner, one)}.",
        f"How sure: {certainty(planner, one)} (docs/planner.md). No run of arriero itself on such a machine is known yet.",
        f"Start: {TARGETS[name].start}. Other GPUs: arriero plan FILE --gpus N --gpu NAME",
    ]
    wrapped = [
        line
        for sentence in says
        for line in textwrap.wrap(sentence, 116, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    ]
    return "\n".join([lines[0], *(f"# {line}" for line in wrapped), *lines[body:]]) + "\n"


def page() -> str:
    """docs/recipes.md with its table as it should be."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- shipped -->\n")
    _, end, after = rest.partition("<!-- /shipped -->")
    rows = ["", "| recipe | what it is | planned |", "| --- | --- | --- |"]
    for name in TARGETS:
        title = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ").rstrip(".")
        rows.append(f"| `{name}` | {title} | {cost_line(*forecast(name)).partition(', list price')[0].rstrip(')')}) |")
    return "\n".join([f"{before}{mark}".rstrip("\n"), *rows, "", f"{end}{after}"])


def main() -> None:
    wrong = []
    texts = {RECIPES / f"{name}.yaml": render(name) for name in TARGETS} | {PAGE: page()}
    for file, text in texts.items():
        if file.read_text(encoding="utf-8") != text:
            wrong.append(file.name)
            if "--check" not in sys.argv[1:]:
                file.write_text(text, encoding="utf-8")
    if wrong and "--check" in sys.argv[1:]:
        sys.exit(f"not what the planner says: {', '.join(wrong)}: run `make docs`")


if __name__ == "__main__":
    main()
