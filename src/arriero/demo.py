"""The whole road on an embedded default: the standard library's own source files, on this machine's CPU."""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from arriero.config.load import parse_yaml, recipe_yaml
from arriero.config.schema import Recipe
from arriero.errors import UserError
from arriero.units import format_bytes, format_count, format_time

VOCAB_SIZE = 8192
PROMPT = "def "
_LEAST_BYTES = 5_000_000
# The merges of 8,192 tokens settle long before 30 MB: learning them from all of it costs 6 s more and saves 0.3 %.
_TOKENIZER_BYTES = 12_000_000


def demo(output_dir: Path, nproc: int) -> None:
    """Run the road in ``output_dir`` with ``nproc`` ranks; what is there already is kept and continued.

    Raises ``UserError`` where the interpreter's sources are missing, or a stage fails.
    """
    stages: dict[str, float] = {}

    _say(f"arriero demo: everything lies in {output_dir}")
    with _stage("corpus", stages):
        files, size = standard_library()
    _say(f"  {len(files):,} source files of the Python standard library, {format_bytes(size)}")
    with _stage("tokenizer", stages):
        _say(f"  {_tokenizer(files, output_dir / 'tokenizer')}")
    with _stage("prepare", stages):
        _say(f"  {_prepare(files, output_dir)}")
    with _stage("train", stages):
        _train(output_dir, nproc)
    with _stage("generate", stages):
        text = _generate(output_dir / "final")
    _say(f"\n{PROMPT}{text}\n")
    _summary(output_dir, stages)


def standard_library() -> tuple[list[Path], int]:
    """The ``.py`` files of the running interpreter's standard library, sorted, and their size in bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    )
    size = sum(path.stat().st_size for path in files)
    if size < _LEAST_BYTES:
        raise UserError(
            f"{root} holds {format_bytes(size)} of Python sources, the demo needs {format_bytes(_LEAST_BYTES)} or more",
            "Use a Python with its standard library's sources installed, or follow the README with text of your own.",
        )
    return files, size


def _tokenizer(files: Sequence[Path], folder: Path) -> str:
    from arriero.data.sources import ReadLog, ReadOptions, list_files, read_documents
    from arriero.data.tokenizer import thin_out, train_tokenizer

    if (folder / "tokenizer.json").is_file():
        return f"{folder}: there already"
    found, _ = list_files(files)
    documents = read_documents(found, ReadOptions(on_bad_input="skip"), ReadLog())
    share = min(1.0, _TOKENIZER_BYTES / sum(path.stat().st_size for path in files))
    made = train_tokenizer(thin_out((document.text for document in documents), share), VOCAB_SIZE, folder)
    return (
        f"{made.path}: {made.vocab_size:,} tokens, learnt from {made.documents:,} documents "
        f"({format_bytes(made.text_bytes)})"
    )


def _prepare(files: Sequence[Path], output_dir: Path) -> str:
    from arriero.data.prepare import prepare

    # Some of the library's tests are files in odd encodings on purpose; they are counted and left out.
    result = prepare(
        files, tokenizer=output_dir / "tokenizer", out=output_dir / "data", validation_split=0.02, on_bad_input="skip"
    )
    how = "there already" if result.cache_hit else f"{result.mb_per_s:.0f} MB/s with {result.engine}"
    return (
        f"{result.path}: {result.documents:,} documents ({result.validation_documents} held out, {result.skipped} "
        f"skipped), {format_count(result.tokens)} tokens, {how}"
    )


def demo_recipe(output_dir: Path) -> Recipe:
    """The shipped recipe with its paths set to one folder."""
    text = resources.files("arriero.recipes").joinpath("demo/tiny_cpu.yaml").read_text(encoding="utf-8")
    value: dict[str, Any] = parse_yaml(text)
    value["output_dir"] = str(output_dir)
    value["model"]["tokenizer"] = str(output_dir / "tokenizer")
    value["data"]["sources"][0]["path"] = str(output_dir / "data")
    return Recipe.model_validate(value)


def _train(output_dir: Path, nproc: int) -> None:
    from arriero.launch.local import run_ranks

    path = output_dir / "recipe.yaml"
    path.write_text(recipe_yaml(demo_recipe(output_dir)), encoding="utf-8")
    sys.stdout.flush()
    outcome = run_ranks(["train", str(path)], nproc)
    if outcome.exit_code:
        raise UserError(outcome.message, exit_code=outcome.exit_code)


def _generate(folder: Path) -> str:
    from arriero.inference.generate import generate, load_for_generation
    from arriero.inference.sampling import Sampling

    model, tokenizer = load_for_generation(folder)
    return generate(model, tokenizer, PROMPT, Sampling(max_new_tokens=60, temperature=0.7, top_k=40, seed=1)).text


def _summary(output_dir: Path, stages: dict[str, float]) -> None:
    from arriero.monitor.metrics import latest_by_step, read_metrics

    rows = read_metrics(output_dir / "metrics.jsonl")
    scores = [row for row in rows if row.get("event") == "eval"]
    losses = [row for row in latest_by_step(rows) if row.get("loss") is not None]
    first, last = scores[0], scores[-1]
    _say(
        f"loss {losses[0]['loss']:.2f} → {losses[-1]['loss']:.2f}; on held-out documents {first['eval_bits_per_byte']:.2f} "
        f"→ {last['eval_bits_per_byte']:.2f} bits per byte, perplexity {first['eval_perplexity']:,.0f} → "
        f"{last['eval_perplexity']:,.0f}"
    )
    _say(", ".join(f"{name} {format_time(seconds)}" for name, seconds in stages.items()))
    _say(
        f"\nThe model is a Hugging Face folder: {output_dir / 'final'}. Go on with\n"
        f"  arriero generate {output_dir} --prompt 'class '\n"
        f"  tensorboard --logdir {output_dir / 'tb'}"
    )


@contextmanager
def _stage(name: str, stages: dict[str, float]) -> Iterator[None]:
    _say(f"\n{len(stages) + 1}/5 {name}")
    began = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - began


def _say(text: str) -> None:
    print(text, flush=True)
