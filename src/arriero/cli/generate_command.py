"""``arriero generate``."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.cli import options
from arriero.cli.folders import loadable, model_folder
from arriero.cli.ranks import be_rank, count_ranks
from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.engine.parallel import World
    from arriero.inference.decode import Decoder
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
    engine: Annotated[
        str, typer.Option("--engine", help="arriero; deepspeed: the model split over the ranks of this machine.")
    ] = "arriero",
    nproc: Annotated[
        str, typer.Option("--nproc", help="Ranks of --engine deepspeed; auto: one per GPU, or two on a CPU.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Continue a prompt with a model, streamed; or each prompt of a file, as JSON lines in the file's order.

    Example: arriero generate runs/demo --prompt "def " --temperature 0
    """
    from arriero.inference.sampling import Sampling

    if (prompt is None) == (prompts is None):
        raise UserError("give either --prompt or --prompts")
    if prompts is None and out is not None:
        raise UserError("--out is for the JSONL of --prompts", "For one prompt: --json, and the shell's >.")
    if engine not in {"arriero", "deepspeed"}:
        raise UserError(f"--engine {engine}: expected arriero or deepspeed")
    texts = read_prompts(prompts) if prompts is not None else []
    ends = tuple(stop or ())
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, ends, ignore_eos, min_p)
    if engine == "deepspeed" and quantize is not None:
        raise UserError("--quantize is for --engine arriero")

    def wanted(folder: Path) -> Wanted:
        return Wanted(folder, prompt, texts, out, sampling, batch_size, logprobs, as_json)

    if engine == "deepspeed" and "RANK" in os.environ:
        be_rank(partial(_as_rank, wanted(model_folder(model))), None)
    with TemporaryDirectory(prefix="arriero-generate-") as aside:
        folder = next(iter(loadable(model, Path(aside)).values()))()
        if engine == "deepspeed":
            _start_ranks(model, folder, count_ranks(nproc, on_cpu=2))
        else:
            from arriero.inference.generate import load_for_generation

            _answer(wanted(folder), *load_for_generation(folder, quantize=quantize), typer.echo, {})


def _start_ranks(model: Path, folder: Path, count: int) -> None:
    """The same command as ranks, which are given the folder where this process may have exported a checkpoint to."""
    from arriero.launch.local import run_ranks

    arguments = sys.argv[1:]
    place = next(number for number, one in enumerate(arguments) if number > 0 and Path(one) == model)
    arguments[place] = str(folder)
    outcome = run_ranks(arguments, count)
    if outcome.exit_code:
        raise UserError(outcome.message, exit_code=outcome.exit_code)


@dataclass(frozen=True)
class Wanted:
    """What one call of the command is to answer."""

    folder: Path
    prompt: str | None
    texts: list[str]
    out: Path | None
    sampling: Sampling
    batch_size: int
    logprobs: bool
    as_json: bool


def _as_rank(wanted: Wanted, world: World) -> int:
    """One rank of a split model: all run the same rows, rank 0 says what came of it."""
    from arriero.inference.split import load_split  # after joining: DeepSpeed looks for an accelerator when imported

    seed = world.from_first(secrets.randbits(63) if wanted.sampling.seed is None else wanted.sampling.seed)
    wanted = replace(wanted, sampling=replace(wanted.sampling, seed=seed))
    decoder, tokenizer, held = load_split(wanted.folder, world.size, world.device)
    more = {"engine": "deepspeed", "ranks": world.size, "weights_bytes": world.gather(held)}
    if world.rank == 0:
        _answer(wanted, decoder, tokenizer, typer.echo, more)
    else:
        _answer(replace(wanted, out=None), decoder, tokenizer, lambda *_, **__: None, more)
    return 0


def _answer(wanted: Wanted, decoder: Decoder, tokenizer: Any, say: Callable[..., None], more: dict[str, Any]) -> None:
    """more: what the JSON holds besides."""
    from arriero.inference.generate import generate

    sampling = wanted.sampling
    if decoder.note:
        say(decoder.note, err=True)
    if wanted.prompt is None:
        _all_of(wanted, decoder, tokenizer, say)
    elif wanted.as_json:
        done = generate(decoder, tokenizer, wanted.prompt, sampling, logprobs=wanted.logprobs)
        say(_line(done, more))
    else:
        say(wanted.prompt, nl=False)
        done = generate(decoder, tokenizer, wanted.prompt, sampling, on_text=lambda piece: say(piece, nl=False))
        say("")
        context = decoder.config.max_position_embeddings
        if done.finish_reason == "length" and done.tokens < sampling.max_new_tokens:
            say(f"[stopped at the model's context of {context} tokens]", err=True)
        say(f"[{done.tokens} tokens, {done.tokens_per_second:.0f} a second, {done.finish_reason}]", err=True)


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


def _all_of(wanted: Wanted, decoder: Decoder, tokenizer: Any, say: Callable[..., None]) -> None:
    from arriero.inference.generate import generate_many

    began, tokens = time.perf_counter(), 0
    several = generate_many(
        decoder, tokenizer, wanted.texts, wanted.sampling, batch_size=wanted.batch_size, logprobs=wanted.logprobs
    )
    with _written(wanted.out, say) as write:
        for done in several:
            write(_line(done, {}))
            tokens += done.tokens
    seconds = time.perf_counter() - began
    say(f"[{len(wanted.texts)} prompts, {tokens} tokens, {tokens / seconds:.0f} a second]", err=True)


@contextmanager
def _written(out: Path | None, say: Callable[..., None]) -> Iterator[Callable[[str], None]]:
    """What takes lines: standard output, or a file that has its name when all of it is there."""
    if out is None:
        yield say
        return
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield lambda line: print(line, file=file)
        part.replace(out)
    except OSError as error:
        raise UserError(f"--out {out}: {error}", exit_code=1) from None


def _line(done: Generated, more: dict[str, Any]) -> str:
    value = asdict(done) | more
    if done.logprobs is None:
        del value["token_ids"], value["logprobs"]
    return json.dumps(value, ensure_ascii=False)
