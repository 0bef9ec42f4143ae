"""Pipeline parallelism by DeepSpeed's PipelineModule: each rank of a replica holds some of Transformers' own layers.

A stage is the model with the other stages' layers taken out. Letters: m rows, L tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from arriero.engine.state import Batch
from arriero.planner.layouts import Layout


def keep_stage(causal_lm: Any, layout: Layout, stage: int) -> None:
    """Take out of a model what other stages hold; what stays keeps its name.

    The first stage has the embeddings, the last the final norm and the head, and the embeddings too where they are the
    head's.
    """
    inner, last = causal_lm.model, stage == layout.pipeline - 1
    mine = layout.stage_layers(len(inner.layers), stage)
    for number in range(len(inner.layers)):
        if number not in mine:
            inner.layers[number] = _Elsewhere()
    if not last:
        inner.norm = nn.Identity()
        causal_lm.lm_head = None
    if stage > 0 and not (last and causal_lm.config.tie_word_embeddings):
        inner.embed_tokens = None


class _Elsewhere(nn.Module):
    """In the place of a layer that another stage runs."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class _Stage(nn.Module):
    """One stage as DeepSpeed runs it: token ids (in the first) or hidden states, and positions, in; both out, or the
    loss (in the last)."""

    def __init__(self, model: Any, first: bool, finish: Callable[[Tensor], Tensor] | None) -> None:
        """finish: hidden states → loss. Not a loss function of PipelineModule's: DeepSpeed runs that behind the module,
        and clears the head's bf16 gradient when the module's own backward pass begins."""
        super().__init__()
        self.model = model
        self._takes = "input_ids" if first else "inputs_embeds"
        self._finish = finish

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Any:
        given, positions = inputs
        decoder = self.model.causal_lm.model
        hidden: Tensor = decoder(
            **{self._takes: given}, position_ids=positions, use_cache=False
        ).last_hidden_state  # [m, L, H]
        return (hidden, positions) if self._finish is None else self._finish(hidden)


class _Tied(nn.Module):
    """The embeddings, for DeepSpeed to see that the first and the last stage hold the same."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Pipeline:
    """Micro-batches through the stages; every rank of a replica gives the same ones and gets the same results."""

    def __init__(self, model: Any, layout: Layout, stage: int) -> None:
        """model: the parts of one stage (``keep_stage``)."""
        self._last = stage == layout.pipeline - 1
        self._head = model.causal_lm.lm_head
        self._vocab_size = model.causal_lm.config.vocab_size
        self._wants_logits = False
        self._factor, self._rows = 1.0, 0
        self._targets: Iterator[Tensor] = iter(())
        self._found: list[Tensor] = []
        self._shape: torch.Size | None = None
        self._engine: Any = None
        finish = self._finish if self._last else None
        specs: list[Any] = [LayerSpec(_Stage, model, stage == 0, finish)] * layout.pipeline
        if model.causal_lm.config.tie_word_embeddings:
            embeddings = getattr(model.causal_lm.model.embed_tokens, "weight", None)
            tied = TiedLayerSpec("embeddings", _Tied, embeddings, forward_fn=lambda _, inputs: inputs)
            specs = [tied, *specs, tied]
        self.module = PipelineModule(specs, num_stages=layout.pipeline, partition_method=f"type:{_Stage.__name__}")
        here = self.module.parts[stage], self.module.parts[stage + 1]
        assert sum(specs[n].typename is _Stage for n in range(*here)) == 1, f"stages fell to {self.module.parts}"

    def run_on(self, engine: Any) -> None:
        """engine: what ``deepspeed.initialize`` made of ``module``."""
        self._engine = engine

    def step(self, batches: Sequence[Batch], factor: float) -> None:
        """One update from all micro-batches; each loss counts ``factor`` times."""
        self._factor = factor
        self._rows = sum(len(batch.input_ids) for batch in batches)
        self._engine.train_batch(self._feed(batches))

    def found_losses(self) -> Tensor:
        """The summed loss of each row of a step that is under way or done, fp32 ``[rows]``."""
        return self._from_last(self._rows)

    def row_losses(self, batch: Batch) -> Tensor:
        """The summed loss of each row, fp32 ``[m]``."""
        self._evaluate(batch)
        return self._from_last(len(batch.input_ids))

    def logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits, fp32 ``[m, L, V]``."""
        self._wants_logits = True
        self._evaluate(Batch(input_ids, input_ids, position_ids))
        self._wants_logits = False
        return self._from_last(*input_ids.shape, self._vocab_size)

    def _evaluate(self, batch: Batch) -> None:
        self._engine.eval_batch(self._feed([batch]), reduce_output=None, bcast_loss=False, num_micro_batches=1)

    def _finish(self, hidden: Tensor) -> Tensor:
        """What the last stage does with a micro-batch, which come in the order that they were fed in."""
        targets = next(self._targets)
        if self._wants_logits:
            self._found.append(self._head(hidden).float())
            return hidden.new_zeros(())
        loss: Tensor
        loss, losses = self._head(hidden, targets)
        self._found.append(losses.view(targets.shape).sum(1))
        return loss * self._factor

    def _feed(self, batches: Sequence[Batch]) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        """The micro-batches as DeepSpeed takes them. Its buffers between stages have the first one's shape until they
        are told of another."""
        shape = batches[0].input_ids.shape
        if shape != self._shape:
            self._engine.reset_activation_shape()
        self._shape, self._found = shape, []
        self._targets = iter([batch.targets for batch in batches])
        return iter([((batch.input_ids, batch.position_ids), batch.targets) for batch in batches])

    def _from_last(self, *shape: int) -> Tensor:
        """What the last stage has found, fp32, on every stage."""
        found = torch.cat(self._found) if self._last else torch.empty(shape, device=self._engine.device)
        grid = self._engine.grid
        comm.broadcast(found, grid.stage_to_global(grid.pipe_parallel_size - 1), group=grid.get_pipe_parallel_group())
        return found
