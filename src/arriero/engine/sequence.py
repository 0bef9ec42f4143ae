"""Sequence parallelism after Ulysses (arXiv:2309.14509): each rank of a replica runs its part of every row.

In attention, and only there, ranks exchange: from all heads of their own tokens to some heads of all tokens, and back.
Letters: m rows, L tokens of a row, n = L / ranks of them here, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arriero.errors import UserError
from arriero.planner.layouts import Layout

# Under this name only: other models of this process keep their own sdpa.
_ATTENTION = "arriero_ulysses"


class SharedRows(nn.Module):
    """The model as one rank of a replica runs it: whole rows in, its part of them computed, whole rows' results out.

    ``forward`` is that of PretrainModel; the summed loss is this rank's part, which its gradient belongs to, and row
    losses are those of all ranks.
    """

    def __init__(self, model: Any, layout: Layout, place: int, seq_len: int) -> None:
        super().__init__()
        self.model = model
        self._size, self._place = layout.sequence, place
        self.groups = RowGroups(layout.sequence)
        self._group = self.groups.get_sequence_parallel_group()
        config = model.causal_lm.config
        window = getattr(config, "sliding_window", None)
        if window is not None and window < seq_len:
            raise UserError(
                f"the model's sliding window {window} is shorter than data.seq_len {seq_len}, and with "
                "parallel.sequence_parallel_size above 1 attention is over whole documents",
                f"Use data.seq_len {window} or less, or sequence_parallel_size 1.",
            )
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _exchanging_attention(self._group))
        config._attn_implementation = _ATTENTION

    def forward(self, input_ids: Tensor, targets: Tensor | None, position_ids: Tensor) -> Any:
        if targets is None:
            return self._logits(input_ids, position_ids)
        mine = self._mine(input_ids.shape[1])
        mask = document_mask(position_ids)
        loss, losses = self.model(input_ids[:, mine], targets[:, mine], position_ids[:, mine], mask)
        dist.all_reduce(losses, group=self._group)
        return loss, losses

    def _logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits ``[m, L, V]`` of rows of any length: they are filled up behind, which no token before can see."""
        length = input_ids.shape[1]
        padding = -length % self._size
        ids, positions = functional.pad(input_ids, (0, padding)), functional.pad(position_ids, (0, padding))
        mine = self._mine(length + padding)
        here = self.model(ids[:, mine], None, positions[:, mine], document_mask(positions)).contiguous()
        parts = [torch.empty_like(here) for _ in range(self._size)]
        dist.all_gather(parts, here, group=self._group)
        return torch.cat(parts, 1)[:, :length]

    def _mine(self, length: int) -> slice:
        assert length % self._size == 0, f"rows of {length} tokens over {self._size} ranks"
        part = length // self._size
        return slice(self._place * part, (self._place + 1) * part)


def document_mask(position_ids: Tensor) -> Tensor | None:
    """Which tokens each token attends to, bool ``[m, 1, L, L]``: those before it in its document, as positions restart.

    None where every row is one document, for which causal attention needs no mask.
    """
    restarts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    if not restarts.any():
        return None
    document = restarts.cumsum(1)
    length = position_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


def _exchanging_attention(group: Any) -> Any:
    """Transformers' sdpa over whole rows for some of the heads, between DeepSpeed's two exchanges."""

    def whole_rows(
        query: Tensor, key: Tensor, value: Tensor, module: nn.Module, mask: Tensor | None, **options: Any
    ) -> Tensor:
        # [m, L, h / ranks, d] → [m, h / ranks, L, d], and back from sdpa's own transpose
        output: Tensor
        output, _ = sdpa_attention_forward(module, *(t.transpose(1, 2) for t in (query, key, value)), mask, **options)
        return output

    exchange = DistributedAttention(whole_rows, group, scatter_idx=2, gather_idx=1)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        # [m, h, n, d] → [m, n, h, d]
        parts = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        return exchange(*parts, 0, None, module, attention_mask, **options), None

    return attention


class RowGroups:
    """The groups that DeepSpeed asks for where ranks share rows, by the names that it asks with.

    Its own module for them (parallel_state_sp) calls the ranks of a replica model parallel besides. With bf16 and ZeRO 1
    DeepSpeed then looks for the gradient's norm on the first of them alone, and the others fail with "stack expects a
    non-empty TensorList"; here each rank is its own model.
    """

    def __init__(self, size: int) -> None:
        rank = dist.get_rank()
        first = rank - rank % size
        # Each group is made by its own ranks: a thousand ranks would else wait for each other a thousand times.
        self._alone = dist.new_group([rank], use_local_synchronization=True)
        self._replica = dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
        self._together = dist.new_group()

    def initialize_sequence_parallel(self) -> None:
        """DeepSpeed tells by its name that these groups are for sequence parallelism; it isn't called."""

    def get_sequence_parallel_group(self) -> Any:
        return self._replica

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self._replica)

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self._replica)

    def get_sequence_data_parallel_group(self) -> Any:
        return self._together

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._together)

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self._together)

    def get_model_parallel_group(self) -> Any:
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
