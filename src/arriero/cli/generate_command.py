"""``arriero generate``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.cli import options
from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.inference.generate import Generated
    from arriero.inference.sampling import Sampling


def generate_command(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.", show_default=False)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='Many: a text a line, or JSONL with "prompt".', show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the JSONL goes; default: standard output.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts continued at the same time.")] = 8,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="In the JSON, each token's log-probability too.")
    ] = False,
    quantize: options.Quantize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Continue a prompt with a model, streamed; or each prompt of a file, as JSON lines in the file's order.

    Example: arriero generate runs/demo --prompt "def " --temperature 0
    """
    from arriero.inference.generate import generate, load_for_generation
    from arriero.inference.sampling import Sampling

    if (prompt is None) == (prompts is None):
        raise UserError("give either --prompt or --prompts")
    if prompts is None and out is not None:
        raise UserError("--out is for the JSONL of --prompts", "For one prompt: --json, and the shell's >.")
    texts = read_prompts(prompts) if prompts is not None else []
    ends = tuple(stop or ())
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, ends, ignore_eos, min_p)
    decoder, tokenizer = load_for_generation(options.model_folder(model), quantize=quantize)
    if decoder.note:
        typer.echo(decoder.note, err=True)
    if prompt is None:
        _all_of(texts, out, decoder, tokenizer, sampling, batch_size, logprobs)
    elif as_json:
        typer.echo(_line(generate(decoder, tokenizer, prompt, sampling, logprobs=logprobs)))
    else:
        typer.echo(prompt, nl=False)
        done = generate(decoder, tokenizer, prompt, sampling, on_text=lambda piece: typer.echo(piece, nl=False))
        typer.echo("")
        context = decoder.config.max_position_embeddings
        if done.finish_reason == "length" and done.tokens < max_new_tokens:
            typer.echo(f"[stopped at the model's context of {context} tokens]", err=True)
        typer.echo(f"[{done.tokens} tokens, {done.tokens_per_second:.0f} a second, {done.finish_reason}]", err=True)


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: of each line the text or, in a ``.jsonl``, the value of "prompt". Empty lines are none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text: Any = line
        if file.suffix == ".jsonl":
            try:
                text = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f'{file}, line {number}: expected a JSON object with a text called "prompt"')
        found.append(text)
    if not found:
        raise UserError(f"--prompts {file}: there is no prompt in it")
    return found


def _all_of(
    texts: list[str],
    out: Path | None,
    decoder: Any,
    tokenizer: Any,
    sampling: Sampling,
    batch_size: int,
    logprobs: bool,
) -> None:
    from arriero.inference.generate import generate_many

    began, tokens = time.perf_counter(), 0
    with _written(out) as write:
        for done in generate_many(decoder, tokenizer, texts, sampling, batch_size=batch_size, logprobs=logprobs):
            write(_line(done) + "\n")
            tokens += done.tokens
    seconds = time.perf_counter() - began
    typer.echo(f"[{len(texts)} prompts, {tokens} tokens, {tokens / seconds:.0f} a second]", err=True)


@contextmanager
def _written(out: Path | None) -> Iterator[Any]:
    """Standard output, or a file that has its name when all of it is there."""
    if out is None:
        yield sys.stdout.write
        return
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file.write
        part.replace(out)
    except OSError as error:
        raise UserError(f"--out {out}: {error}", exit_code=1) from None


def _line(done: Generated) -> str:
    value = asdict(done)
    if done.logprobs is None:
        del value["token_ids"], value["logprobs"]
    return json.dumps(value, ensure_ascii=False)
