"""Arguments and options that several commands take, declared once; each command says its own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path, typer.Argument(help="A run folder or a Hugging Face folder.", metavar="MODEL", show_default=False)
]
# Hugging Face's names of how the next token is chosen.
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Smallest set of that probability.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Only the k most likely; 0: all.")]
MinP = Annotated[float, typer.Option("--min-p", min=0.0, max=1.0, help="At least that share of the likeliest's.")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", min=0.01, help="Above 1: repeat less.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.", show_default=False)]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text.", show_default=False)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of text.")]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", help="int8: matrices in 8 bits, faster on a CPU; what it costs: docs/generate.md."),
]
