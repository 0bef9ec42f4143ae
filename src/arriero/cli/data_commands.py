"""``arriero tokenizer train``, ``arriero prepare`` and ``arriero data stats``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from arriero.data.plan import Progress
    from arriero.data.prepare import PrepareResult
    from arriero.data.stats import SplitStats

_PLAIN_EVERY_S = 5.0  # where no terminal shows a bar
_AGAIN_EVERY_S = 1.0

Sources = Annotated[
    list[str], typer.Argument(help="Files, folders, globs and hf://OWNER/NAME datasets that hold the text.")
]
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
    from arriero.data.plan import Progress
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
    share = limit_bytes / max(1, sum(file.size_bytes for file in files))
    total_bytes = min(limit_bytes, sum(file.size_bytes for file in files))
    with _shown_progress() as show, _said_again(show) as say:

        def progress(stage: str, documents: int, done_bytes: int) -> None:
            total = total_bytes if stage == "reading" else 0  # how far merging is, the trainer doesn't tell
            say(Progress(stage, done_bytes, total, documents, 0, time.perf_counter() - started))

        chosen = texts if share >= 1 else thin_out(texts, share)
        made = train_tokenizer(chosen, vocab_size, out, max_bytes=limit_bytes, progress=progress)
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
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Prepare only the I-th (from 0) of N shares, on one of N machines; then --merge."
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Make the dataset of the shards that lie beside it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Turn text into a packed dataset for training.

    Example: arriero prepare corpus/ more/*.jsonl.zst --tokenizer runs/tokenizer --out data/corpus
    """
    from arriero.data.prepare import prepare
    from arriero.data.shared_preparation import merge_shards, prepare_shard
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
    if merge and shard is not None:
        raise UserError("--shard and --merge are two steps", "Give --shard on each machine, then --merge on one.")
    loaded = load_tokenizer(tokenizer)
    with _shown_progress() as progress:
        options |= {"tokenizer": loaded, "out": out, "progress": progress}
        if shard is not None:
            result = prepare_shard(sources, shard, **options)
        else:
            result = (merge_shards if merge else prepare)(sources, **options)
    if as_json:
        typer.echo(json.dumps(asdict(result), default=str))
    else:
        typer.echo(_summary(result, loaded))


def _unescape(text: str) -> str:
    return text.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")


def _summary(result: PrepareResult, tokenizer: Any) -> str:
    from arriero.data.shards import is_dataset
    from arriero.units import format_count

    what = (
        f"{result.documents:,} documents ({result.validation_documents:,} held out), "
        f"{format_count(result.tokens)} tokens, {result.text_bytes / max(1, result.tokens):.2f} bytes a token"
    )
    if result.cache_hit:
        how = "there already: nothing was done"
    else:
        proof = f", {result.share_compared:.1%} of the text compared" if result.engine == "gigatoken" else ""
        how = f"{_duration(result.seconds)}, {result.mb_per_s:.0f} MB/s, engine {result.engine}{proof}"
    lines = [f"{result.path}: {what}", f"  {how}"]
    if is_dataset(result.path):
        lines.append(f"  a document is stored as {_sample_layout(result, tokenizer)}")
    else:
        lines.append("  a shard: when all are there, the same command with --merge makes the dataset")
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
            # a task whose total is not known, as of a dataset on the hub, shows that it lives
            total = now.bytes_total or None
            bar.update(task, description=now.stage, total=total, completed=now.bytes_done, speed=_speed(now))

        yield show


def _plain_lines() -> Callable[[Progress], None]:
    last = time.monotonic()

    def show(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last < _PLAIN_EVERY_S:
            return
        last = time.monotonic()
        share = f"{now.bytes_done / now.bytes_total:.0%} " if now.bytes_total else ""
        typer.echo(f"{now.stage}: {share}{_speed(now)}{_time_left(now)}", err=True)

    return show


@contextmanager
def _said_again(show: Callable[[Progress], None]) -> Iterator[Callable[[Progress], None]]:
    """Shows what was said last again every second, with its time, while nothing new comes."""
    from threading import Event, Lock, Thread

    ended, lock = Event(), Lock()
    last: tuple[Progress, float] | None = None

    def say(now: Progress) -> None:
        nonlocal last
        with lock:
            last = now, time.monotonic()
            show(now)

    def repeat() -> None:
        while not ended.wait(_AGAIN_EVERY_S):
            with lock:
                if last is not None and (waited := time.monotonic() - last[1]) >= _AGAIN_EVERY_S:
                    show(replace(last[0], seconds=last[0].seconds + waited))

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()


def _speed(now: Progress) -> str:
    from arriero.units import format_bytes, format_count

    seconds = max(now.seconds, 1e-9)
    tokens = f", {format_count(now.tokens / seconds)} tokens/s" if now.tokens else ""
    if not now.bytes_total:
        read = f" ({format_bytes(now.bytes_done)})" if now.bytes_done else ""
        return f"{now.documents:,} documents{read}{tokens}, {_duration(now.seconds)}"
    return f"{now.bytes_done / 1e6 / seconds:.0f} MB/s{tokens}"


def _time_left(now: Progress) -> str:
    from arriero.units import format_time

    if not now.bytes_done or not now.bytes_total:
        return ""
    return f", {format_time(now.seconds * (now.bytes_total / now.bytes_done - 1))} left"
