"""Which parameters decay, by what they are, and the optimizer over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from arriero.config.schema import Optim

Role = Literal["embedding", "matrix", "bias", "vector"]
# A vector has nothing that decay could regularise: norms belong at 1, biases where the data puts them.
DECAYING: tuple[Role, ...] = ("embedding", "matrix")


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """What each parameter is, by the module that owns it; a tied one once, as its first owner has it.

    Names and ranks alone mislead: a norm may be called anything, and a bias of stacked experts has two dimensions.
    So: an embedding's weight is an embedding, a projection's weight a matrix and its bias a bias. In any other module
    (norms, rotary and gating vectors, stacked experts) an attribute that ends in ``bias`` is one, another with fewer
    than two dimensions a vector, the rest matrices.
    """
    roles: dict[str, Role] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                roles[f"{prefix}.{attribute}" if prefix else attribute] = _role(module, attribute, parameter)
    return roles


def _role(module: nn.Module, attribute: str, parameter: nn.Parameter) -> Role:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if attribute.endswith("bias"):
        return "bias"
    # A ZeRO-3 parameter is empty between uses; its full shape is in ds_shape.
    return "matrix" if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 else "vector"


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role],
    optim: Optim,
    *,
    offloaded: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """AdamW over two groups: embeddings and matrices decay, biases and vectors don't.

    torch's own fused AdamW; where masters are offloaded, ``offloaded``, DeepSpeed's AdamW for host memory. The rate
    starts at 0 because some of DeepSpeed's wrappers take an empty first step while they are set up; the loop sets the
    rate before every update.
    """
    decaying: list[nn.Parameter] = []
    constant: list[nn.Parameter] = []
    for name, parameter in parameters:
        (decaying if roles[name] in DECAYING else constant).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": optim.weight_decay},
        {"params": constant, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": 0.0,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_epsilon,
    }
    if offloaded is not None:
        return offloaded(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)
