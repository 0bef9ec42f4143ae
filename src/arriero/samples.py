"""What the model says while it is trained: the recipe's prompts, continued greedily every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from arriero.engine.engine import Engine
from arriero.engine.parallel import World
from arriero.errors import UserError
from arriero.resolve import Inputs

_NEW_TOKENS = 48
# Rows are filled up to a multiple of this, so that compiled layers see few lengths.
_FILLED = 64


def prompt_ids(inputs: Inputs) -> list[list[int]]:
    """The prompts' ids; ``UserError`` for one that is empty or leaves no room in a row."""
    found, seq_len = [], inputs.recipe.data.seq_len
    for number, text in enumerate(inputs.recipe.log.sample_prompts):
        ids = list(inputs.tokenizer(text).input_ids)
        if not 0 < len(ids) < seq_len:
            raise UserError(
                f"log.sample_prompts.{number}: {len(ids)} tokens; expected at least 1 and fewer than data.seq_len {seq_len}"
            )
        found.append(ids)
    return found


def continue_prompts(engine: Engine, inputs: Inputs, world: World, alive: Callable[[], None]) -> list[dict[str, Any]]:
    """Each prompt with its likeliest continuation: objects with prompt, text and tokens. Every rank must call it."""
    tokenizer, prompts = inputs.tokenizer, inputs.recipe.log.sample_prompts
    said = continue_ids(engine, prompt_ids(inputs), inputs.recipe.data.seq_len, tokenizer.eos_token_id, world, alive)
    return [
        {"prompt": text, "text": tokenizer.decode(ids, skip_special_tokens=True), "tokens": len(ids)}
        for text, ids in zip(prompts, said, strict=True)
    ]


def continue_ids(
    engine: Engine, prompts: Sequence[list[int]], seq_len: int, eos: int, world: World, alive: Callable[[], None]
) -> list[list[int]]:
    """The likeliest tokens behind each prompt: 48 at most, up to an end of text and within ``seq_len``.

    Every rank must call it, in any layout: all run the same rows together, in evaluation mode. It draws no random
    number and changes nothing. There is no cache: rows are short. alive: called before each token.
    """
    length = min(-(-(max(map(len, prompts)) + _NEW_TOKENS) // _FILLED) * _FILLED, seq_len)
    found = []
    for ids in prompts:
        row = torch.zeros(1, length, dtype=torch.int64, device=world.device)
        row[0, : len(ids)] = torch.tensor(ids)
        said: list[int] = []
        for place in range(len(ids), min(len(ids) + _NEW_TOKENS, length)):
            alive()
            logits = engine.logits(row)[0, place - 1]
            # The ranks' own sums may differ in the last bit, and their next rows must not.
            said.append(world.from_first(int(logits.argmax())))
            if said[-1] == eos:
                break
            row[0, place] = said[-1]
        found.append(said)
    return found
