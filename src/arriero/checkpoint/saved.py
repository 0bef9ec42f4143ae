"""The state in a checkpoint, by name: tensors, random generators and JSON. No DeepSpeed, no GPU, no other rank."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arriero.checkpoint.layout import read_manifest
from arriero.errors import UserError


class SavedState:
    """The state in a checkpoint by parameter name; reads any range of a parameter from whatever slices hold it."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.parameters: dict[str, Any] = read_manifest(checkpoint)["parameters"]
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """``UserError`` unless every parameter is there in that shape."""
        for name, shape in shapes.items():
            saved = self.parameters.get(name)
            if saved is None or tuple(saved["shape"]) != shape:
                found = "is not in it" if saved is None else f"has the shape {tuple(saved['shape'])} in it"
                raise UserError(f"{self.checkpoint}: {name}, {shape} in this model, {found}")

    def read(self, name: str, kind: str = "master") -> Tensor:
        """A whole tensor, fp32, in its own shape. kind: master, exp_avg, exp_avg_sq, or Muon's momentum_buffer."""
        shape = self.parameters[name]["shape"]
        whole = torch.empty(int(np.prod(shape)), dtype=torch.float32)
        self.read_into(whole, name, kind, 0)
        return whole.view(shape)

    def read_into(self, target: Tensor, name: str, kind: str, start: int) -> None:
        """Fill ``target``, fp32 ``[n]``, with elements ``[start, start + n)`` of the flat parameter."""
        stop, filled = start + target.numel(), 0
        for piece in self.parameters[name]["slices"]:
            low, high = max(start, piece["start"]), min(stop, piece["stop"])
            if low < high:
                tensor = self._slice(piece["file"], name, kind)
                target[low - start : high - start] = tensor[low - piece["start"] : high - piece["start"]].to(
                    target.device
                )
                filled += high - low
        if filled != target.numel():
            raise UserError(f"{self.checkpoint}: {name} lacks {target.numel() - filled} of its elements")

    def _slice(self, file: str, name: str, kind: str) -> Any:
        try:
            return self._file(file).get_slice(f"{name}/{kind}")
        except SafetensorError:
            raise UserError(
                f"{self.checkpoint}: {name} has no {kind} in it: it was trained by another optimizer",
                "Continue with the optim.optimizer that it was saved with.",
            ) from None

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self.checkpoint / name, framework="pt"))
        return self._files[name]


def read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    """One of the checkpoint's JSON files."""
    return dict(orjson.loads((checkpoint / name).read_bytes()))


def random_state() -> dict[str, Tensor]:
    """This process's random generators (Python's, NumPy's, torch's and the GPU's) as tensors: nothing is pickled."""
    numpy_state = np.random.get_state(legacy=False)
    version, internal, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy_words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor(
            [float(numpy_state["state"]["pos"]), float(numpy_state["has_gauss"]), numpy_state["gauss"]],
            dtype=torch.float64,
        ),
        "python_words": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss_next is None else [gauss_next], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Put back what ``random_state`` gave."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    words = state["numpy_words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    version, *internal = state["python_words"].tolist()
    gauss_next = state["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss_next[0] if gauss_next else None))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
