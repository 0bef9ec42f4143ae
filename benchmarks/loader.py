"""What the data costs a run: its share of a step on the demo, and the cursor's restore at 10⁹ rows; Markdown tables.

python benchmarks/loader.py                     makes the demo's data and trains 60 steps: a minute or two
python benchmarks/loader.py --run runs/demo     reads the metrics of a run that is there
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arriero.data.order import DataState, Mixture, MixtureSource

ROWS = 10**9
STEP_ROWS = 1024
# The place: about two passes in, as after a long run.
POSITION = 3_456_789_012


def share_of_step(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # The first step warms up kernels and maps the shards.
    steps = [row for row in rows if "step_time_s" in row and row["step"] > 1]
    data_s, step_s = ([row[name] for row in steps] for name in ("data_time_s", "step_time_s"))
    print("\n| steps logged | median step | median data | share of the time | largest share of one step |")
    print("| --: | --: | --: | --: | --: |")
    print(
        f"| {len(steps)} | {statistics.median(step_s) * 1e3:.0f} ms | {statistics.median(data_s) * 1e3:.2f} ms "
        f"| {sum(data_s) / sum(step_s):.2%} | {max(d / s for d, s in zip(data_s, step_s, strict=True)):.2%} |",
        flush=True,
    )


def demo_run(folder: Path, steps: int) -> Path:
    """The demo's recipe, shorter, with every step logged."""
    from arriero.config.load import recipe_yaml
    from arriero.demo import VOCAB_SIZE, demo_recipe, standard_library

    arriero, lenient = [sys.executable, "-m", "arriero"], ["--on-bad-input", "skip"]
    library, limit = [str(path) for path in standard_library()[0]], ["--max-megabytes", "12"]
    recipe, tokenizer = folder / "recipe.yaml", str(folder / "tokenizer")
    recipe.write_text(recipe_yaml(demo_recipe(folder)), encoding="utf-8")
    for command in (
        ["tokenizer", "train", *library, "--vocab-size", str(VOCAB_SIZE), "--out", tokenizer, *limit, *lenient],
        ["prepare", *library, "--tokenizer", tokenizer, "--out", str(folder / "data"), *lenient],
        ["train", str(recipe), f"train.max_steps={steps}", "log.logging_steps=1", "--nproc", "2"],
    ):
        subprocess.run([*arriero, *command], check=True, stdout=subprocess.DEVNULL)
    return folder


def restore() -> None:
    print(f"\n| two sources | made | state at {POSITION:,} | {STEP_ROWS} rows there | memory more |")
    print("| --- | --: | --: | --: | --: |")
    cases = {
        "10⁹ rows each, no weights": ((ROWS, None), (ROWS, None)),
        "10⁹ rows each, weights 0.7 and 0.3": ((ROWS, 0.7), (ROWS, 0.3)),
        "10⁹ and 999,999,937 rows, no weights": ((ROWS, None), (999_999_937, None)),
    }
    for name, sources in cases.items():
        specs = [MixtureSource(f"source-{n}", rows, weight) for n, (rows, weight) in enumerate(sources)]
        before = peak_bytes()
        clock = [time.perf_counter()]
        mixture = Mixture(specs, seed=1)
        clock.append(time.perf_counter())
        state: DataState = mixture.state_at(POSITION)
        clock.append(time.perf_counter())
        refs = mixture.rows_at(POSITION, POSITION + STEP_ROWS)
        clock.append(time.perf_counter())
        assert sum(state.taken.values()) == POSITION
        assert len(refs.row) == STEP_ROWS
        assert refs.row.max() < ROWS
        made, at, rows = (f"{(stop - start) * 1e3:.1f} ms" for start, stop in itertools.pairwise(clock))
        print(f"| {name} | {made} | {at} | {rows} | {(peak_bytes() - before) / 2**20:.1f} MiB |", flush=True)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a run folder, instead of training one")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    restore()
    if args.run is not None:
        share_of_step(args.run)
        return
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as name:
        share_of_step(demo_run(Path(name), args.steps))


if __name__ == "__main__":
    main()
