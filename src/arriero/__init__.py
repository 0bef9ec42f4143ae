"""arriero: raw text in, a trained and served LLaMA-family model out, on DeepSpeed.

The public names, loaded when first used so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arriero.__version__ import __version__

if TYPE_CHECKING:
    from arriero.checkpoint.export import export_checkpoint as export
    from arriero.config.load import load_recipe
    from arriero.data.prepare import prepare
    from arriero.inference.generate import generate
    from arriero.launch.local import train
    from arriero.planner.plan import plan

__all__ = ["__version__", "export", "generate", "load_recipe", "plan", "prepare", "train"]

_HOME = {
    "export": ("checkpoint.export", "export_checkpoint"),
    "generate": ("inference.generate", "generate"),
    "load_recipe": ("config.load", "load_recipe"),
    "plan": ("planner.plan", "plan"),
    "prepare": ("data.prepare", "prepare"),
    "train": ("launch.local", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'arriero' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOME[name]
    return getattr(import_module(f"arriero.{module}"), attribute)
