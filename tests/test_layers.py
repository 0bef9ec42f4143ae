"""Imports go one way: a module may import what stands above it, and each boundary has its owners.

Imports inside functions and under TYPE_CHECKING count. A new module fails here until somebody places it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src/arriero"

# Each row may import the rows above it; names in one row don't import each other.
LADDER = [
    "__version__ disk errors oracle units",
    "config run_folder",
    "doctor launch planner",
    "data engine model monitor",
    "checkpoint convert evaluate inference",
    "calibrate history isolation resolve",
    "agreement compiling describe new_recipe samples",
    "run",
    "assembly saving scoring",
    "setbacks",
    "check demo training",
    "cli",
    "__main__",
    "__init__",
]
# The same inside each package.
INSIDE = {
    "config": ["keys schema", "load"],
    "doctor": ["finding children", "building devices machine network packages", "recipe", "run"],
    "launch": ["environment hostfile kubernetes local signals slurm"],
    "planner": ["arithmetic hardware layouts shape", "calibration memory", "throughput", "plan", "header"],
    "data": [
        "hub order packing shards tokenizer",
        "sources",
        "batches loader plan sampler stats",
        "parts",
        "prepare",
        "pretrain seen shared_preparation",
        "__init__",
    ],
    "engine": [
        "ds_keys state",
        "ds_config ops optimizer parallel schedule",
        "pipeline sequence tensor",
        "engine",
    ],
    "model": ["attention layers loss", "build"],
    "monitor": ["health heartbeat metrics", "progress record sinks", "report", "monitor watch"],
    "checkpoint": [
        "layout",
        "saved",
        "gguf_vocabulary hf_folder model_card universal",
        "gguf_file reload",
        "export load save",
    ],
    "convert": ["draft", "deepspeed_json", "hugging_face", "deepspeed_chat llama_factory", "convert"],
    "evaluate": ["harness perplexity", "model"],
    "inference": ["decode measured sampling", "protocol rows", "batching generate", "chat split", "serve"],
    "cli": [
        "folders options ranks",
        "check_commands data_commands generate_command info_commands launch_commands model_commands plan_commands recipe_commands report_commands run_commands serve_commands",
        "main",
    ],
}
# Who may import what. A dotted name covers what is below it.
OWNERS = {
    "deepspeed": {
        "engine/ds_keys.py",
        "engine/engine.py",
        "engine/ops.py",
        "engine/pipeline.py",
        "engine/sequence.py",
        "engine/tensor.py",
        "inference/split.py",
    },
    "torch.distributed": {"data/sampler.py", "engine/parallel.py", "engine/sequence.py", "launch/local.py"},
    # torchrun hears of a rank's error through this one.
    "torch.distributed.elastic.multiprocessing.errors": {"launch/local.py", "cli/ranks.py"},
    "datasets": {"data/hub.py"},
    "gguf": {"checkpoint/gguf_file.py"},
    "gigatoken": {"data/tokenizer.py"},
    "huggingface_hub": {"data/hub.py", "model/build.py", "planner/shape.py"},
    "lm_eval": {"evaluate/harness.py"},
    "pyarrow": {"data/parts.py", "data/seen.py", "data/sources.py", "data/stats.py"},
    "pydantic": {"config/load.py", "config/schema.py", "inference/protocol.py"},
    "rich": {"cli/data_commands.py", "cli/info_commands.py", "monitor/progress.py"},
    "sentencepiece": {"data/tokenizer.py"},
    "starlette": {"inference/serve.py"},
    "mlflow": {"monitor/sinks.py"},
    "swanlab": {"monitor/sinks.py"},
    "tensorboard": {"monitor/sinks.py"},
    "trackio": {"monitor/sinks.py"},
    "wandb": {"monitor/sinks.py"},
    "tokenizers": {"data/tokenizer.py"},
    "typer": {"cli/"},
    "uvicorn": {"inference/serve.py"},
    "yaml": {"config/load.py", "launch/kubernetes.py"},
    "zstandard": {"data/sources.py"},
    "os.environ": {
        "cli/check_commands.py",
        "cli/generate_command.py",
        "cli/plan_commands.py",
        "cli/ranks.py",
        "cli/run_commands.py",
        "data/sampler.py",
        "doctor/",
        "engine/parallel.py",
        "launch/environment.py",
        "launch/hostfile.py",
        "launch/local.py",
        "monitor/sinks.py",
    },
}
# What a file must not know.
IGNORANT = {
    "torch": (
        "config/ planner/ monitor/ data/hub.py data/order.py data/packing.py data/shards.py data/sources.py data/batches.py data/parts.py "
        "data/plan.py data/prepare.py data/shared_preparation.py data/stats.py engine/ds_config.py checkpoint/layout.py run_folder.py errors.py units.py doctor/"
    ),
    "transformers": (
        "config/ planner/ monitor/ launch/ data/hub.py data/order.py data/packing.py data/shards.py data/loader.py data/batches.py data/parts.py "
        "data/plan.py data/prepare.py data/shared_preparation.py data/sampler.py data/stats.py engine/ds_config.py engine/engine.py engine/parallel.py engine/optimizer.py engine/state.py "
        "engine/tensor.py engine/pipeline.py checkpoint/layout.py "
        "evaluate/perplexity.py assembly.py run.py saving.py scoring.py setbacks.py training.py run_folder.py errors.py units.py"
    ),
    "numpy": "config/ planner/ monitor/ launch/ cli/ engine/ds_config.py checkpoint/layout.py run_folder.py units.py",
    "arriero.model": "checkpoint/layout.py checkpoint/load.py checkpoint/save.py checkpoint/saved.py evaluate/perplexity.py",
    "arriero.data": (
        "checkpoint/ inference/batching.py inference/chat.py inference/decode.py inference/protocol.py inference/rows.py "
        "inference/sampling.py inference/serve.py inference/split.py"
    ),
    "arriero.engine": "evaluate/ inference/",
    "arriero.run_folder": "data/ model/ engine/ evaluate/ inference/",
}


def modules() -> list[Path]:
    return sorted(path.relative_to(SRC) for path in SRC.rglob("*.py"))


def imports(text: str) -> Iterator[str]:
    """Every dotted name that is imported, and ``os.environ`` where it is read."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"}:
            yield "os.environ"


def below(name: str, parent: str) -> bool:
    return f"{name}.".startswith(f"{parent}.")


def listed(file: str, names: set[str] | list[str]) -> bool:
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in names)


def rung(ladder: list[str], name: str) -> int:
    return next(number for number, row in enumerate(ladder) if name in row.split())


def wrong(file: Path, text: str) -> list[str]:
    """What this file imports and shouldn't."""
    name, here = file.as_posix(), file.with_suffix("").parts
    found = []
    for target in imports(text):
        owned = [owner for owner in OWNERS if below(target, owner)]
        # The most particular rule decides.
        if owned and not listed(name, OWNERS[max(owned, key=len)]):
            found.append(f"{name}: {target} belongs to {', '.join(sorted(OWNERS[max(owned, key=len)]))}")
        if any(below(target, unknown) and listed(name, files.split()) for unknown, files in IGNORANT.items()):
            found.append(f"{name}: must not know {target}")
        package, *there = target.split(".")
        if package == "arriero" and there and not _points_down(here, there):
            found.append(f"{name}: {target} doesn't stand above it")
        if not package:
            found.append(f"{name}: {target} is relative")
    return found


def _points_down(here: tuple[str, ...], there: list[str]) -> bool:
    if here[0] != there[0]:
        return rung(LADDER, there[0]) < rung(LADDER, here[0])
    return rung(INSIDE[here[0]], there[1]) < rung(INSIDE[here[0]], here[1])


def test_every_import_points_down() -> None:
    found = [line for file in modules() for line in wrong(file, (SRC / file).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_every_module_has_its_place_and_every_place_its_module() -> None:
    placed = {name for row in LADDER for name in row.split() if name not in INSIDE}
    placed |= {f"{package}/{name}" for package, rows in INSIDE.items() for row in rows for name in row.split()}
    # An empty __init__ needs no place.
    there = {
        file.with_suffix("").as_posix()
        for file in modules()
        if file.name != "__init__.py" or (SRC / file).read_text(encoding="utf-8").strip()
    }
    assert there == placed
    assert {name for row in LADDER for name in row.split()} >= set(INSIDE)


def test_owners_and_the_ignorant_exist() -> None:
    named = {file for files in OWNERS.values() for file in files} | {
        f for files in IGNORANT.values() for f in files.split()
    }
    assert not [file for file in named if not (SRC / file).exists()]


def test_package_inits_are_empty_but_for_the_public_names() -> None:
    full = [file.as_posix() for file in modules() if file.name == "__init__.py" and (SRC / file).stat().st_size]
    assert full == ["__init__.py", "data/__init__.py"]
    for file in full:
        body = ast.parse((SRC / file).read_text(encoding="utf-8")).body
        loaded = [
            target
            for node in body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for target in imports(ast.unparse(node))
        ]
        assert set(loaded) <= {
            "__future__.annotations",
            "typing.TYPE_CHECKING",
            "typing.Any",
            "arriero.__version__.__version__",
        }, "the rest is loaded when it is first used"


def test_public_names_exist() -> None:
    import arriero
    import arriero.data

    for package in (arriero, arriero.data):
        assert all(getattr(package, name) is not None for name in package.__all__)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            package.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("data/order.py", "import torch", "must not know torch"),
        ("data/order.py", "def f():\n    from arriero.data.loader import Rows", "doesn't stand above it"),
        ("data/order.py", "from arriero.data import packing", "doesn't stand above it"),
        ("data/packing.py", "from arriero.training import train", "doesn't stand above it"),
        ("config/schema.py", "import arriero.config.load", "doesn't stand above it"),
        ("config/schema.py", "from .keys import KEY_MAP", "is relative"),
        ("training.py", "import deepspeed.comm", "belongs to engine/ds_keys.py, engine/engine.py, engine/ops.py"),
        (
            "training.py",
            "import torch.distributed as dist",
            "belongs to data/sampler.py, engine/parallel.py, engine/sequence.py, launch/local.py",
        ),
        (
            "training.py",
            "from torch import distributed",
            "belongs to data/sampler.py, engine/parallel.py, engine/sequence.py, launch/local.py",
        ),
        (
            "cli/run_commands.py",
            "import torch.distributed",
            "belongs to data/sampler.py, engine/parallel.py, engine/sequence.py, launch/local.py",
        ),
        ("training.py", "import os\nos.environ['X'] = '1'", "belongs to"),
        ("training.py", "from os import environ", "belongs to"),
        ("model/build.py", "if TYPE_CHECKING:\n    from arriero.engine.engine import Engine", "doesn't stand above it"),
        ("evaluate/perplexity.py", "from arriero.engine.engine import Engine", "must not know arriero.engine"),
        ("monitor/progress.py", "from arriero.monitor.sinks import TensorBoardSink", "doesn't stand above it"),
    ],
)
def test_the_check_finds(file: str, text: str, problem: str) -> None:
    assert any(problem in line for line in wrong(Path(file), text))
