"""Which parameters decay, by what they are, and the optimizer over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from arriero.config.schema import Optim

Role = Literal["embedding", "head", "matrix", "bias", "vector"]
# A vector has nothing that decay could regularise: norms belong at 1, biases where the data puts them.
DECAYING: tuple[Role, ...] = ("embedding", "head", "matrix")
# Muon's step at rate 1 has a root mean square of 0.2, AdamW's typical one: one learning rate serves both.
_MUON_RMS = 0.2


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """What each parameter is, by the module that owns it; a tied one once, as its first owner has it.

    Names and ranks alone mislead: a norm may be called anything, and a bias of stacked experts has two dimensions.
    So: an embedding's weight is an embedding, the output projection's the head, another projection's a matrix and its
    bias a bias. In any other module
    (norms, rotary and gating vectors, stacked experts) an attribute that ends in ``bias`` is one, another with fewer
    than two dimensions a vector, the rest matrices.
    """
    roles: dict[str, Role] = {}
    output_embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = output_embeddings()
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                roles[f"{prefix}.{attribute}" if prefix else attribute] = _role(module, attribute, parameter)
                if module is head and not attribute.endswith("bias"):
                    roles[f"{prefix}.{attribute}"] = "head"
    return roles


def _role(module: nn.Module, attribute: str, parameter: nn.Parameter) -> Role:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if attribute.endswith("bias"):
        return "bias"
    return "matrix" if len(_shape(parameter)) >= 2 else "vector"


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """A ZeRO-3 parameter is empty between uses; its full shape is in ds_shape."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role],
    optim: Optim,
    *,
    offloaded: Callable[..., torch.optim.Optimizer] | None = None,
    muon: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The recipe's optimizer: embeddings, head and matrices decay, biases and vectors don't.

    torch's own fused AdamW; where masters are offloaded, ``offloaded``, DeepSpeed's AdamW for host memory. With
    ``optim.optimizer`` muon, ``muon``, DeepSpeed's, takes the matrices and AdamW the rest. A group's rate is the
    step's times its ``lr_factor``. The rate starts at 0 because some of DeepSpeed's wrappers take an empty first step
    while they are set up; the loop sets the rate before every update.
    """
    assert (muon is not None) == (optim.optimizer == "muon")
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in parameters:
        by_muon = muon is not None and roles[name] == "matrix" and len(_shape(parameter)) == 2
        if muon is not None:
            parameter.use_muon = by_muon  # type: ignore[attr-defined]  # DeepSpeed's wrappers look for it
        settings = _muon_settings(parameter, optim) if by_muon else _adam_settings(roles[name], optim)
        groups.setdefault(tuple(settings.values()), {"params": [], **settings})["params"].append(parameter)
    # Decaying ones first, whatever the model's order.
    ordered = sorted(groups.values(), key=lambda group: group["weight_decay"] == 0)
    if muon is not None:
        ordered = [{"use_muon": "momentum" in group, **group} for group in ordered]
        return muon(ordered, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True})
    if offloaded is not None:
        return offloaded(ordered)
    return torch.optim.AdamW(ordered, fused=True)


def _adam_settings(role: Role, optim: Optim) -> dict[str, Any]:
    return {
        "weight_decay": optim.weight_decay if role in DECAYING else 0.0,
        "lr": 0.0,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_epsilon,
    }


def _muon_settings(parameter: nn.Parameter, optim: Optim) -> dict[str, Any]:
    """DeepSpeed scales an orthogonal step of ``[rows, columns]`` by √max(1, rows/columns); by 0.2·√columns more its root
    mean square is 0.2 (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982, §2.2). Decay keeps to the rate
    that the recipe gives.
    """
    factor = _MUON_RMS * math.sqrt(_shape(parameter)[1])
    return {
        "weight_decay": optim.weight_decay / factor,
        "lr": 0.0,
        "momentum": optim.muon_momentum,
        "lr_factor": factor,
    }
