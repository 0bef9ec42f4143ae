"""What must start at once loads nothing heavy: each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "deepspeed", "numpy", "pyarrow", "tokenizers", "tensorboard")
DEMO = Path(__file__).parents[1] / "src/arriero/recipes/demo/tiny_cpu.yaml"
REPORT = f"import sys; print('heavy:', *sorted(set({HEAVY!r}) & set(sys.modules)))"


def heavy_after(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", f"{code}\n{REPORT}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].removeprefix("heavy:").split()


def command(*arguments: str) -> str:
    """The command as a person starts it, in this process, whatever it exits with."""
    return (
        f"import sys; sys.argv = {['arriero', *arguments]!r}\n"
        "from arriero.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code"
    )


@pytest.mark.parametrize(
    "module",
    [
        "arriero",
        "arriero.data",
        "arriero.cli.main",
        "arriero.config.load",
        "arriero.planner.plan",
        "arriero.planner.shape",
        "arriero.engine.ds_config",
        "arriero.monitor.metrics",
        "arriero.launch.local",
        "arriero.checkpoint.layout",
        "arriero.run_folder",
    ],
)
def test_imports(module: str) -> None:
    assert heavy_after(f"import {module}") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["chat", "--help"],
        ["serve", "--help"],
        ["data", "show", "--help"],
        ["recipes", "list"],
        ["keys"],
        ["keys", "hf"],
        ["plan", "--help"],
        ["plan", str(DEMO), "model.config.vocab_size=8192", "--gpus", "8", "--gpu", "H100", "--json"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_commands(arguments: list[str]) -> None:
    assert heavy_after(command(*arguments)) == []


def test_the_check_can_find_something() -> None:
    assert heavy_after("import arriero.data.order") == ["numpy"]
