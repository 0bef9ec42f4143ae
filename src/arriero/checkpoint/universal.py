"""A checkpoint in DeepSpeed's universal layout, for training scripts that don't know arriero.

What DeepSpeed reads back was read off version 0.19.8 (runtime/engine.py, runtime/base_optimizer.py, zero/stage3.py):
stages 1 and 2 take ``mp_rank_00_model_states.pt``, the top level of ``zero/optimizer_state.pt`` and each parameter's
``step.pt``; stage 3 takes ``zero_pp_rank_0_mp_rank_00_model_states.pt`` and ``optimizer_state_dict`` in the same file.
Everything is plain tensors, numbers and names, so ``torch.load`` needs no ``weights_only=False``.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from arriero.checkpoint.saved import SavedState, read_json
from arriero.config.load import parse_yaml
from arriero.config.schema import Optim
from arriero.engine.schedule import learning_rates

_LATEST = "latest_universal"


def write_universal(saved: SavedState, folder: Path) -> None:
    """Masters, moments and Adam's step by parameter name under ``folder/global_step<n>``, and ``latest_universal``."""
    trainer = read_json(saved.checkpoint, "trainer_state.json")
    target = folder / f"global_step{trainer['step']}"
    step = torch.tensor(float(trainer["updates"]))
    for name in saved.parameters:
        place = target / "zero" / name
        place.mkdir(parents=True)
        for kind, file in (("master", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            torch.save({"param": saved.read(name, kind), "cat_dim": 0}, place / f"{file}.pt")
        torch.save(step, place / "step.pt")
    optim = Optim.model_validate(parse_yaml(trainer["recipe"])["optim"])
    rate = learning_rates(optim, trainer["steps"])(min(trainer["updates"] + 1, trainer["steps"]))
    torch.save(_optimizer_state(rate, step, len(saved.parameters)), target / "zero" / "optimizer_state.pt")
    states = target / "mp_rank_00_model_states.pt"
    torch.save(_model_states(trainer), states)
    shutil.copyfile(states, target / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (folder / _LATEST).write_text(target.name, encoding="utf-8")


def universal_weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """The masters in such a folder by name, mapped from the disk; None where it is none."""
    if not (folder / _LATEST).is_file():
        return None
    zero = folder / (folder / _LATEST).read_text(encoding="utf-8") / "zero"
    return {
        path.parent.name: torch.load(path, weights_only=True, mmap=True)["param"] for path in zero.glob("*/fp32.pt")
    }


def _optimizer_state(rate: float, step: torch.Tensor, parameters: int) -> dict[str, Any]:
    """What belongs to no single parameter: the rate of the next update and Adam's step.

    Betas, epsilon and weight decay are left out, so the script's own stay: stage 3 would give every group the first
    group's. Stages 1 and 2 load as many groups as are listed and forget the rest of the script's, so there is one for
    each parameter: no script has more.
    """
    return {
        "ds_version": version("deepspeed"),
        "param_groups": [{"params": [number], "lr": rate} for number in range(parameters)],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [{"params": [], "lr": rate}]},
    }


def _model_states(trainer: dict[str, Any]) -> dict[str, Any]:
    """Counts, and a schedule's place for DeepSpeed's schedulers and torch's; ``load_checkpoint`` hands out the rest."""
    updates = trainer["updates"]
    return {
        "ds_version": version("deepspeed"),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": trainer["step"],
        "global_samples": trainer["position"],
        "skipped_steps": trainer["step"] - updates,
        "lr_scheduler": {
            "last_batch_iteration": updates - 1,  # DeepSpeed counts from 0, torch from 1
            "last_epoch": updates,
            "_step_count": updates + 1,
            "lr_lambdas": [],
        },
        "universal_checkpoint_info": {},
        "arriero": {key: trainer[key] for key in ("step", "updates", "position", "tokens", "precision", "recipe")},
    }
