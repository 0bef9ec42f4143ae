"""Tensor parallelism by DeepSpeed's AutoTP: each rank of a replica holds a part of every layer's matrices.

Transformers' own plan says which: projections into heads and the feed-forward by rows, those out of them by columns.
Embeddings, norms and the output head stay whole on every rank, so the loss needs no exchange.
"""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import Tensor, nn

from arriero.engine.state import Region, whole
from arriero.errors import UserError

_WHOLE_HEADS = {"colwise", "rowwise", "replicated_with_grad_allreduce"}


def show_plan(model: Any) -> nn.Module:
    """Let AutoTP find Transformers' plan for this model's layers; ``UserError`` where there is none that it can follow."""
    config = model.causal_lm.config
    plan = getattr(config, "base_model_tp_plan", None) or {}
    styles = {style for pattern, style in plan.items() if pattern.startswith("layers.")}
    if not styles or not styles <= _WHOLE_HEADS:
        found = ", ".join(sorted(styles - _WHOLE_HEADS)) or "no plan"
        raise UserError(
            f"{config.model_type} models can't be split by tensor_parallel_size: Transformers has {found} for them",
            "Use sequence_parallel_size, pipeline_parallel_size or a higher zero_stage; Llama, Mistral and Qwen can be split.",
        )
    model.config = config
    module: nn.Module = model
    return module


def region_of(parameter: nn.Parameter | Tensor, place: int) -> Region:
    """The part of the whole parameter that this rank's is."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["replicated"] or meta["partition_dim"] is None:
        return whole(shape, counted=place == 0)
    full, axis, sizes = tuple(meta["logical_shape"]), meta["partition_dim"], meta["partition_sizes"]
    start = sum(sizes[:place])
    if axis == 0:
        width = full[1] if len(full) == 2 else 1
        return Region(full, start * width, None, counted=True)
    return Region(full, 0, (start, start + sizes[place]), counted=True)
