"""Scores the planner on published runs and writes what it finds into docs/planner.md, with a scaling chart beside it.

python docs/make_planner_page.py            writes the page and the chart
python docs/make_planner_page.py --check    says whether they are as they should be
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arriero.config.schema import ModelShape
from arriero.planner.arithmetic import Setup, parameter_count
from arriero.planner.hardware import DEVICES, find_network
from arriero.planner.memory import Practice, estimate_memory
from arriero.planner.throughput import step_time, tokens_per_second

HERE = Path(__file__).parent
RUNS, PAGE, CHART = HERE / "published_runs.csv", HERE / "planner.md", HERE / "planner-scaling.svg"
GIB = 2**30


def _model(layers: int, hidden: int, heads: int, kv: int, feed: int, vocab: int, tied: bool) -> tuple[ModelShape, int]:
    shape = ModelShape(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=feed,
        tie_word_embeddings=tied,
    )
    return shape, vocab


MODELS = {
    "L3-8B": _model(32, 4096, 32, 8, 14336, 128_256, False),
    "L3-70B": _model(80, 8192, 64, 8, 28672, 128_256, False),
    "L2-7B": _model(32, 4096, 32, 32, 11008, 32_000, False),
    "L2-13B": _model(40, 5120, 40, 40, 13824, 32_000, False),
    "L2-70B": _model(80, 8192, 64, 8, 28672, 32_000, False),
    "TinyLlama": _model(22, 2048, 32, 4, 5632, 32_000, False),
    "K-7B": _model(32, 4096, 32, 8, 14336, 128_256, False),
    "K-13B": _model(40, 5120, 40, 8, 17920, 128_256, False),
    "L3.2-3B": _model(28, 3072, 24, 8, 8192, 128_256, True),
    "IL-7B": _model(32, 4096, 32, 32, 10923, 103_168, False),
}
# MPT's plain feed-forward of 4 × hidden has the products of a gated one of 8/3 × hidden.
MODELS |= {
    f"MPT-{name}": _model(layers, hidden, heads, heads, round(8 * hidden / 3), 50_368, True)
    for name, layers, hidden, heads in (
        ("125M", 12, 768, 12),
        ("350M", 24, 1024, 16),
        ("760M", 24, 1536, 12),
        ("1B", 24, 2048, 16),
        ("3B", 32, 2560, 20),
        ("7B", 32, 4096, 32),
        ("13B", 40, 5120, 40),
        ("30B", 48, 7168, 56),
        ("70B", 80, 8192, 64),
    )
}
# Triton's attention of 2023, which the MPT runs used, beside the kernels that the devices' shares are fitted with.
MPT_ATTENTION = 0.60

GROUPS = {
    "llama": "LLaMA, data parallel or one GPU",
    "llama-tp": "LLaMA, tensor parallel",
    "mpt": "MPT",
}


@dataclass(frozen=True)
class Run:
    """One published run, and what the planner says of it."""

    row: dict[str, str]

    @property
    def key(self) -> tuple[str, str]:
        return self.row["group"], self.row["set"]

    @property
    def layout(self) -> Setup:
        whole = {name: int(self.row[name]) for name in ("zero_stage", "tensor", "micro_batch", "accumulation")}
        return Setup(
            ranks=int(self.row["gpus"]),
            checkpoint_every=int(self.row["checkpoint_every"]),
            shard_ranks=int(self.row["shard_ranks"]) if self.row["shard_ranks"] else None,
            **whole,
        )

    @property
    def practice(self) -> Practice:
        """How the other program computes: what its page or its code says."""
        optional = {
            name: float(self.row[name]) if self.row[name] else None
            for name in ("logit_bytes", "weight_bytes", "state_bytes", "gradient_bytes")
        }
        flags = {name: self.row[name] == "1" for name in ("compiled", "selective", "gradients_whole")}
        return Practice(
            **optional,
            **flags,
            attention_speed=MPT_ATTENTION if self.row["group"] == "mpt" else 1.0,
            deepspeed=False,
            reduce_bucket=0,
            # "Reserved" is what torch's allocator holds, "allocated" what tensors do; neither counts the context.
            context_bytes=0,
            **({} if self.row["reserved"] == "1" else {"allocator_share": 0.0}),
        )

    @property
    def _given(self) -> dict[str, object]:
        shape, vocab = MODELS[self.row["model"]]
        return {
            "parameters": parameter_count(shape, vocab),
            "vocab_size": vocab,
            "seq_len": int(self.row["seq_len"]),
            "practice": self.practice,
        }

    def predicted_tokens(self) -> float:
        """Tokens per second and GPU."""
        device = replace(DEVICES[self.row["gpu"]], per_node=int(self.row["per_node"]))
        network, layout = find_network(self.row["network"]), self.layout
        time = step_time(MODELS[self.row["model"]][0], layout, device, network, **self._given)  # type: ignore[arg-type]
        return tokens_per_second(layout, int(self.row["seq_len"]), time.total) / layout.ranks

    def predicted_gib(self) -> float:
        return estimate_memory(MODELS[self.row["model"]][0], self.layout, **self._given).total / GIB  # type: ignore[arg-type]

    def tokens_error(self) -> float | None:
        """Predicted over published, less 1."""
        measured = self.row["tokens_s_gpu"]
        return self.predicted_tokens() / float(measured) - 1 if measured else None

    def memory_error(self) -> float | None:
        measured = self.row["memory_gib"]
        return self.predicted_gib() / float(measured) - 1 if measured else None


def runs() -> list[Run]:
    with RUNS.open(encoding="utf-8", newline="") as file:
        return [Run(row) for row in csv.DictReader(file)]


def middle_and_most(errors: Sequence[float]) -> tuple[float, float]:
    """(median, 90th percentile) of the errors' sizes."""
    sizes = sorted(abs(error) for error in errors)
    return statistics.median(sizes), sizes[math.ceil(0.9 * len(sizes)) - 1]


def summary(found: Sequence[Run]) -> Iterator[tuple[str, str, str, int, float, float]]:
    """(quantity, group, set, rows, median, 90th percentile) of every group that has such rows."""
    for quantity in ("tokens", "memory"):
        for group in GROUPS:
            for part in ("fit", "held"):
                errors = [getattr(run, f"{quantity}_error")() for run in found if run.key == (group, part)]
                errors = [error for error in errors if error is not None]
                if errors:
                    yield quantity, group, part, len(errors), *middle_and_most(errors)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def summary_table(found: Sequence[Run]) -> str:
    names = {"tokens": "tokens/s", "memory": "memory"}
    parts = {"fit": "fitted", "held": "held out"}
    lines = [
        "| quantity | runs | constants | rows | median error | 90th percentile |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    lines += [
        f"| {names[quantity]} | {GROUPS[group]} | {parts[part] if quantity == 'tokens' else 'counted'} | {count} "
        f"| {100 * median:.1f} % | {100 * most:.1f} % |"
        for quantity, group, part, count, median, most in summary(found)
    ]
    return "\n".join(lines)


def run_table(found: Sequence[Run]) -> str:
    head = (
        "row", "set", "source", "model", "rows of", "GPUs", "layout", "tokens/s/GPU", "planned", "error", "GiB", "planned",
        "error",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| --- | --- | --- | --- | --: | --- | --- " + "| --: " * 6 + "|"]
    for run in found:
        row, layout = run.row, run.layout
        words = [f"ZeRO-{layout.zero_stage}" if layout.ranks > 1 else "one"]
        words += [f"TP {layout.tensor}"] if layout.tensor > 1 else []
        words += [f"within {layout.shard_ranks}"] if layout.shard_ranks else []
        words += [f"{layout.micro_batch} × {layout.accumulation}"]
        again = {"0": "", "1": "checkpointed"}.get(row["checkpoint_every"], f"every {row['checkpoint_every']}nd layer")
        words += ["selective" if row["selective"] == "1" else again] if again else []
        tokens, memory = run.tokens_error(), run.memory_error()
        cells = [
            row["id"], row["set"], row["source"], row["model"], f"{int(row['seq_len']):,}",
            f"{layout.ranks:,} × {row['gpu']}", ", ".join(words),
            f"{float(row['tokens_s_gpu']):,.0f}" if tokens is not None else "",
            f"{run.predicted_tokens():,.0f}" if tokens is not None else "", _percent(tokens),
            row["memory_gib"], f"{run.predicted_gib():.1f}" if memory is not None else "", _percent(memory),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- the scaling chart

SCALES = [8, 16, 32, 64, 128, 256, 512, 1024]
CURVES = (
    ("8B, InfiniBand 3200", "L3-8B", "infiniband-3200", "#0b62a4"),
    ("8B, Ethernet 400", "L3-8B", "ethernet-400", "#7cb5ec"),
    ("70B, InfiniBand 3200", "L3-70B", "infiniband-3200", "#b3411e"),
    ("70B, Ethernet 400", "L3-70B", "ethernet-400", "#f2a07b"),
)


def scaling(model: str, network: str) -> list[float | None]:
    """Tokens per second and H100 under ZeRO-3 with 8,192 tokens at once and every layer recomputed; None: doesn't fit."""
    shape, vocab = MODELS[model]
    device, found = DEVICES["H100-SXM"], []
    for ranks in SCALES:
        layout = Setup(ranks=ranks, zero_stage=3, checkpoint_every=1)
        given = {"parameters": parameter_count(shape, vocab), "vocab_size": vocab, "seq_len": 8192}
        time = step_time(shape, layout, device, find_network(network), **given)  # type: ignore[arg-type]
        fits = estimate_memory(shape, layout, **given).total < 0.95 * device.memory_bytes  # type: ignore[arg-type]
        found.append(tokens_per_second(layout, 8192, time.total) / ranks if fits else None)
    return found


def scaling_table() -> str:
    lines = ["| GPUs | " + " | ".join(name for name, *_ in CURVES) + " |", "| --: " * (len(CURVES) + 1) + "|"]
    columns = [scaling(model, network) for _, model, network, _ in CURVES]
    for place, ranks in enumerate(SCALES):
        cells = ("doesn't fit" if column[place] is None else f"{column[place]:,.0f}" for column in columns)
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart() -> str:
    """Speed per GPU over the fastest point of its curve, against GPUs, as SVG."""
    left, top, width, height = 60, 30, 560, 300
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 390" font-family="sans-serif" font-size="13">',
        '<rect width="820" height="390" fill="#ffffff"/>',
        '<text x="60" y="20" fill="#222222">Tokens per second and GPU, over the best point of the curve</text>',
    ]
    for share in (0, 25, 50, 75, 100):
        y = top + height * (1 - share / 100)
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#dddddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#222222">{share} %</text>')
    places = [left + width * number / (len(SCALES) - 1) for number in range(len(SCALES))]
    for x, ranks in zip(places, SCALES, strict=True):
        lines.append(f'<text x="{x:.1f}" y="{top + height + 22}" text-anchor="middle" fill="#222222">{ranks:,}</text>')
    lines.append(
        f'<text x="{left + width / 2}" y="{top + height + 46}" text-anchor="middle" fill="#222222">GPUs</text>'
    )
    for number, (name, model, network, colour) in enumerate(CURVES):
        speeds = scaling(model, network)
        best = max(speed for speed in speeds if speed is not None)
        points = [(x, top + height * (1 - v / best)) for x, v in zip(places, speeds, strict=True) if v is not None]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        y = top + 20 + 24 * number
        lines.append(f'<line x1="640" y1="{y}" x2="664" y2="{y}" stroke="{colour}" stroke-width="2.5"/>')
        lines.append(f'<text x="670" y="{y + 4}" fill="#222222">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def page() -> str:
    """The page with its generated parts made anew."""
    text, found = PAGE.read_text(encoding="utf-8"), runs()
    for name, value in (("summary", summary_table(found)), ("runs", run_table(found)), ("scaling", scaling_table())):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->\n")
        assert end, f"{PAGE.name} has no <!-- {name} -->"
        text = f"{before}<!-- {name} -->\n\n{value}\n\n{end}{after}"
    return text


def main() -> None:
    made = {PAGE: page(), CHART: chart()}
    if "--check" in sys.argv:
        stale = [path.name for path, text in made.items() if not path.is_file() or path.read_text("utf-8") != text]
        sys.exit(f"make docs would change {', '.join(stale)}" if stale else 0)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
