"""Tokens a second of `arriero generate` against Transformers' `generate`: the same weights, prompts and process, in turns.

python benchmarks/generate.py [--turns N] [--tokens N] [--threads N] [--json]
python benchmarks/generate.py --quality FOLDER --text FILE

Greedy, bf16, prompts of a few tokens, as many new ones for every row. Both sides are timed from their call to their
return, so ours includes its tokenizer and the prompt. Models have random weights of two shapes: the demo's, and
SmolLM2-135M's. --quality: what 8 bits cost a real model, as perplexity of a text by the same forward pass.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore", module=r"torch|transformers")
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from arriero.data.tokenizer import load_tokenizer, train_tokenizer
from arriero.inference.decode import Cache, Decoder
from arriero.inference.generate import generate_many, load_model, load_tokenizer_of
from arriero.inference.sampling import Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "demo-size, 8.5M": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    },
    "SmolLM2's shape, 135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip
ROW = 512  # tokens that perplexity is taken over at once


def sides(shape: dict[str, Any], tokenizer: Any, tokens: int) -> dict[str, Callable[[int], None]]:
    """What takes turns: each continues so many prompts by ``tokens`` tokens."""
    torch.manual_seed(1)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, **ids)).to(torch.bfloat16).eval()
    ours = Decoder(copy.deepcopy(theirs))
    rounded = Decoder(copy.deepcopy(theirs), quantize="int8")
    prompt = "def main"
    greedy = Sampling(max_new_tokens=tokens, temperature=0, ignore_eos=True)

    def transformers(rows: int) -> None:
        inputs = tokenizer([prompt] * rows, return_tensors="pt")
        out = theirs.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=tokens,
            min_new_tokens=tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        assert out.shape == (rows, inputs.input_ids.shape[1] + tokens)

    def arriero(decoder: Decoder, rows: int) -> None:
        done = list(generate_many(decoder, tokenizer, [prompt] * rows, greedy, batch_size=rows))
        assert [one.tokens for one in done] == [tokens] * rows

    return {
        "Transformers": transformers,
        "arriero": lambda rows: arriero(ours, rows),
        "arriero, int8": lambda rows: arriero(rounded, rows),
    }


def measure(name: str, tokenizer: Any, turns: int, tokens: int) -> list[dict[str, Any]]:
    """Medians over the turns, after one that isn't counted."""
    made = sides(SHAPES[name], tokenizer, tokens)
    found = []
    for rows in (1, 8):
        speeds: dict[str, list[float]] = {side: [] for side in made}
        for _ in range(turns + 1):
            for side, run in made.items():
                began = time.perf_counter()
                run(rows)
                speeds[side].append(rows * tokens / (time.perf_counter() - began))
        for side, each in speeds.items():
            ratios = [one / base for one, base in zip(each, speeds["Transformers"], strict=True)][1:]
            found.append({
                "model": name, "rows": rows, "side": side, "tokens_per_second": statistics.median(each[1:]),
                "ratio": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios),
            })  # fmt: skip
    return found


def quality(folder: Path, text: Path) -> dict[str, float]:
    """Perplexity of a text, in rows of 512 tokens, with the folder's weights and with them in 8 bits."""
    ids = torch.tensor(load_tokenizer_of(folder)(text.read_text(encoding="utf-8")).input_ids)
    rows = ids[: len(ids) // ROW * ROW].view(-1, ROW)[:64]
    found = {"targets": float(rows[:, 1:].numel())}
    for quantize in (None, "int8"):
        model = load_model(folder, "cpu").to(torch.bfloat16)
        decoder = Decoder(model, quantize=quantize)
        total = 0.0
        for row in rows:
            logits = decoder(Cache([0]), row[None], last=False)[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        found["bf16" if quantize is None else quantize] = float(torch.tensor(total / rows[:, 1:].numel()).exp())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quality", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    set_verbosity_error()
    disable_progress_bar()
    if asked.quality is not None:
        print(json.dumps(quality(asked.quality, asked.text)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = (Path(sysconfig.get_path("stdlib")) / "heapq.py").read_text(encoding="utf-8")
        train_tokenizer([source], 512, Path(scratch) / "tokenizer")
        tokenizer = load_tokenizer(Path(scratch) / "tokenizer")
    found = [row for name in SHAPES for row in measure(name, tokenizer, asked.turns, asked.tokens)]
    if asked.json:
        print(json.dumps(found))
        return
    print(f"{asked.turns} turns of {asked.tokens} tokens, {asked.threads} threads; medians, in brackets the extremes\n")
    print("| bf16 | rows | Transformers | arriero | | int8 | |\n| --- | --: | --: | --: | --: | --: | --: |")
    for theirs, ours, rounded in zip(found[::3], found[1::3], found[2::3], strict=True):
        told = [
            f"{one['tokens_per_second']:,.0f} | {one['ratio']:.1f}× ({one['smallest']:.1f}–{one['largest']:.1f})"
            for one in (ours, rounded)
        ]
        print(f"| {theirs['model']} | {theirs['rows']} | {theirs['tokens_per_second']:,.0f} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
