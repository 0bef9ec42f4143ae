"""``arriero tokenizer train``, ``arriero prepare`` and ``arriero data stats``."""

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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from arriero.data.plan import Progress
    from arriero.data.prepare import PrepareResult
    from arriero.data.stats import SplitStats

_PLAIN_EVERY_S = 5.0  # where no terminal shows a bar

Sources = Annotated[list[str], typer.Argument(help="Files, folders and globs that hold the text.")]
TextField = Annotated[
    str | None,
    typer.Option(help="The field of JSON records, or the column of tables, that holds the text (default: text)."),
]
OnBadInput = Annotated[
    str | None, typer.Option(help="What to do about text that can't be read: error, skip or replace (default: error).")
]


def tokenizer_train(
    sources: Sources,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary, 3 special ones included.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    text_field: TextField = None,
    max_megabytes: Annotated[
        float, typer.Option(min=0.001, help="Train on at most this much text, spread evenly over all documents.")
    ] = 200,
    on_bad_input: OnBadInput = None,
) -> None:
    """Train a byte-level BPE tokenizer (Llama-3 style) and save it as a Hugging Face folder.

    Example: arriero tokenizer train corpus/*.jsonl --vocab-size 32000 --out runs/tokenizer
    """
    from arriero.data.shards import is_dataset
    from arriero.data.sources import ReadLog, ReadOptions, list_files, read_documents
    from arriero.data.tokenizer import thin_out, train_tokenizer
    from arriero.units import format_bytes

    started = time.perf_counter()
    files, _ = list_files(sources, is_dataset=is_dataset)
    given = {"text_field": text_field, "on_bad_input": on_bad_input}
    log, options = ReadLog(), ReadOptions(**{name: value for name, value in given.items() if value is not None})
    texts = (document.text for document in read_documents(files, options, log))
    limit_bytes = int(max_megabytes * 1e6)
    share = limit_bytes / max(1, sum(file.path.stat().st_size for file in files))
    made = train_tokenizer(texts if share >= 1 else thin_out(texts, share), vocab_size, out, max_bytes=limit_bytes)
    typer.echo(
        f"{made.path}: {made.vocab_size:,} tokens, learnt from {made.documents:,} documents "
        f"({format_bytes(made.text_bytes)}) in {_duration(time.perf_counter() - started)}"
    )
    if log.skipped:
        typer.echo(f"  {_reasons(log.skipped)}")


def prepare_command(
    sources: Sources,
    tokenizer: Annotated[Path, typer.Option(help="A Hugging Face folder with the tokenizer.")],
    out: Annotated[Path, typer.Option(help="The dataset's folder.")],
    text_field: TextField = None,
    document_separator: Annotated[
        str | None,
        typer.Option(
            help=r"Splits text files into documents; \n and \t are understood (default: a file is a document)."
        ),
    ] = None,
    validation_split: Annotated[
        float | None, typer.Option(help="Share of the documents to hold out, 0 for none (default: 0.01).")
    ] = None,
    add_bos: Annotated[
        bool | None,
        typer.Option("--add-bos/--no-add-bos", help="BOS before each document (default: as the tokenizer does)."),
    ] = None,
    on_bad_input: OnBadInput = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare everything with tokenizers, at the speed of that (about 4 MB/s).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Turn text into a packed dataset for training.

    Example: arriero prepare corpus/ more/*.jsonl.zst --tokenizer runs/tokenizer --out data/corpus
    """
    from arriero.data.prepare import prepare
    from arriero.data.tokenizer import load_tokenizer

    given = {
        "text_field": text_field,
        "document_separator": None if document_separator is None else _unescape(document_separator),
        "validation_split": validation_split,
        "add_bos": add_bos,
        "on_bad_input": on_bad_input,
        "verify": verify,
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    loaded = load_tokenizer(tokenizer)
    with _shown_progress() as progress:
        result = prepare(sources, tokenizer=loaded, out=out, progress=progress, **options)
    if as_json:
        typer.echo(json.dumps(asdict(result), default=str))
    else:
        typer.echo(_summary(result, loaded))


def _unescape(text: str) -> str:
    return text.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")


def _summary(result: PrepareResult, tokenizer: Any) -> str:
    from arriero.units import format_count

    what = (
        f"{result.documents:,} documents ({result.validation_documents:,} held out), "
        f"{format_count(result.tokens)} tokens, {result.text_bytes / result.tokens:.2f} bytes a token"
    )
    if result.cache_hit:
        how = "there already: nothing was done"
    else:
        proof = f", {result.share_compared:.1%} of the text compared" if result.engine == "gigatoken" else ""
        how = f"{_duration(result.seconds)}, {result.mb_per_s:.0f} MB/s, engine {result.engine}{proof}"
    lines = [f"{result.path}: {what}", f"  {how}", f"  a document is stored as {_sample_layout(result, tokenizer)}"]
    if result.skipped:
        lines.append(f"  {_reasons(result.skipped_reasons)}")
    if result.replaced:
        lines.append(f"  {result.replaced:,} documents repaired with U+FFFD")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    from arriero.units import format_time

    return f"{seconds:.1f} s" if seconds < 60 else format_time(seconds)


def _reasons(skipped: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} × {reason}" for reason, count in skipped.items())
    return f"{sum(skipped.values()):,} skipped: {reasons}"


def _sample_layout(result: PrepareResult, tokenizer: Any) -> str:
    """The first document as its tokens stand in the dataset: what is in front, how it begins, what is behind."""
    from arriero.data.shards import open_dataset

    _, ids = next(open_dataset(result.path).splits["train"].iterate_documents())
    front = [str(tokenizer.bos_token)] if result.add_bos else []
    inner = ids[len(front) : -1].tolist()
    text = repr(tokenizer.decode(inner[:12]))[1:-1]
    end = tokenizer.convert_ids_to_tokens(int(ids[-1]))
    return " ".join([*front, f"{text}{'…' if len(inner) > 12 else ''}", end])


# --------------------------------------------------------------------------------------------------------------- stats

_BAR = 30  # characters of the longest bar


def data_stats(
    dataset: Annotated[Path, typer.Argument(help="A prepared dataset, or Megatron .bin/.idx pairs.")],
    longest: Annotated[int, typer.Option(min=0, help="How many of the longest documents to list per split.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a dataset holds, per split: tokens, lengths of its documents, copies among them, the longest ones.

    Example: arriero data stats data/corpus
    """
    from arriero.data.stats import dataset_stats

    found = dataset_stats(dataset, longest=longest)
    if as_json:
        typer.echo(json.dumps({name: asdict(split) for name, split in found.items()}, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(_split_text(name, split) for name, split in found.items()))


def _split_text(name: str, split: SplitStats) -> str:
    from arriero.units import format_count

    per_token = f", {split.bytes_per_token:.2f} bytes a token" if split.bytes_per_token is not None else ""
    lines = [
        f"{name}: {split.documents:,} documents, {format_count(split.tokens)} tokens{per_token}",
        f"  duplicates: {split.duplicates:,} documents ({split.duplicate_share:.1%}) are copies of earlier ones",
        f"  tokens of a document: mean {split.mean_tokens:,.0f}, shortest {split.shortest:,}, longest {split.longest:,}",
        "    " + ", ".join(f"{percent} %: {length:,}" for percent, length in split.percentiles.items()),
        f"  {'tokens':>17} {'documents':>11} {'of tokens':>9}",
    ]
    most = max(part.documents for part in split.histogram)
    for part in split.histogram:
        span = f"{part.shortest:,}–{part.longest:,}" if part.longest > part.shortest else f"{part.shortest:,}"
        bar = "█" * -(-part.documents * _BAR // most)
        lines.append(f"  {span:>17} {part.documents:>11,} {part.tokens / max(1, split.tokens):>9.1%} {bar}".rstrip())
    if split.longest_documents:
        lines.append("  the longest:")
    for document in split.longest_documents:
        origin = f"{document.file} row {document.row}" if document.file is not None else f"document {document.index}"
        lines.append(f"  {document.tokens:>17,} tokens  {origin}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ progress


@contextmanager
def _shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a line every few seconds elsewhere; on stderr, so that stdout stays a script's."""
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None, speed="")

        def show(now: Progress) -> None:
            bar.update(task, description=now.stage, total=now.bytes_total, completed=now.bytes_done, speed=_speed(now))

        yield show


def _plain_lines() -> Callable[[Progress], None]:
    last = time.monotonic()

    def show(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < _PLAIN_EVERY_S:
            return
        last = time.monotonic()
        share = now.bytes_done / now.bytes_total if now.bytes_total else 0
        typer.echo(f"{now.stage}: {share:.0%} {_speed(now)}{_time_left(now)}", err=True)

    return show


def _speed(now: Progress) -> str:
    from arriero.units import format_count

    seconds = max(now.seconds, 1e-9)
    tokens = f", {format_count(now.tokens / seconds)} tokens/s" if now.tokens else ""
    return f"{now.bytes_done / 1e6 / seconds:.0f} MB/s{tokens}"


def _time_left(now: Progress) -> str:
    from arriero.units import format_time

    if not now.bytes_done:
        return ""
    return f", {format_time(now.seconds * (now.bytes_total / now.bytes_done - 1))} left"
