"""Public names of the data package, loaded when first used so that importing the package costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arriero.data.order import Mixture
    from arriero.data.prepare import prepare
    from arriero.data.pretrain import create_pretrain_dataset
    from arriero.data.sampler import ExactSampler
    from arriero.data.shards import Dataset, open_dataset

__all__ = ["Dataset", "ExactSampler", "Mixture", "create_pretrain_dataset", "open_dataset", "prepare"]

_HOME = {
    "Dataset": "shards",
    "ExactSampler": "sampler",
    "Mixture": "order",
    "create_pretrain_dataset": "pretrain",
    "open_dataset": "shards",
    "prepare": "prepare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'arriero.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"arriero.data.{_HOME[name]}"), name)
