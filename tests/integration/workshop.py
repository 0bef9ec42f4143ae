"""A tokenizer, a dataset and recipes for the tests that use arriero as a person does: by its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def arriero(*arguments: object, check: bool = True, cwd: Path | None = None, **environment: str) -> Any:
    """Run a command; its output is shown when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "arriero", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        timeout=300,
    )
    if check and done.returncode:
        raise AssertionError(f"exit {done.returncode}: {arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Workshop:
    """Prepared inputs, and recipes written on demand."""

    folder: Path
    corpus: Path
    tokenizer: Path
    dataset: Path

    def recipe(self, name: str, **sections: Any) -> Path:
        value: dict[str, Any] = {
            "output_dir": str(self.folder / "runs" / name),
            "model": {"tokenizer": str(self.tokenizer), "config": dict(SHAPE)},
            "data": {"sources": [{"path": str(self.dataset), "name": "code"}], "seq_len": 128},
            "train": {
                "global_batch_size": 8,
                "per_device_train_batch_size": 2,
                "max_steps": 12,
                "precision": "fp32",
                "seed": 7,
            },
            "optim": {"learning_rate": 1e-3, "warmup_steps": 2},
            "checkpoint": {"save_steps": 4},
            "eval": {"max_rows": 16},
            "log": {"logging_steps": 1},
        }
        for section, keys in sections.items():
            value[section] = value.get(section, {}) | keys if isinstance(keys, dict) else keys
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(value), encoding="utf-8")
        return path

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name


def write_corpus(path: Path, size: int) -> None:
    """Real text that every machine has: the standard library's sources as JSON lines."""
    root = Path(sysconfig.get_path("stdlib"))
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(root.glob("*.py")):
            file.write(json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n")
            if file.tell() > size:
                return
    raise AssertionError(f"{root} holds less than {size} bytes")


def make_workshop(folder: Path) -> Workshop:
    made = Workshop(folder, folder / "code.jsonl", folder / "tokenizer", folder / "code")
    write_corpus(made.corpus, 2_000_000)
    arriero("tokenizer", "train", made.corpus, "--vocab-size", 1024, "--out", made.tokenizer)
    arriero("prepare", made.corpus, "--tokenizer", made.tokenizer, "--out", made.dataset, "--validation-split", 0.05)
    return made
