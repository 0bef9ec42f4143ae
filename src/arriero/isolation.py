"""Whether documents of one row are kept apart by the engine that trains them, tried on a real row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arriero.data.loader import MicroBatch, Source, isolation_batch
from arriero.data.packing import IGNORED_TARGET
from arriero.engine.engine import Engine
from arriero.engine.parallel import World
from arriero.engine.state import Batch


def on_device(batch: MicroBatch, world: World) -> Batch:
    """A micro-batch as the engine takes it."""
    tensors = (batch.input_ids, batch.targets, batch.position_ids)
    if world.device.type == "cuda":
        # From ordinary memory each copy would wait for the device.
        return Batch(*(tensor.pin_memory().to(world.device, non_blocking=True) for tensor in tensors))
    return Batch(*(tensor.to(world.device) for tensor in tensors))


def leak(engine: Engine, sources: Sequence[Source], world: World, *, micro_batch: int, vocab_size: int) -> float | None:
    """Change every token of a row's first document: by how much does a later document's loss move? It must be 0.

    None where no row of the data holds two documents. Two forward passes of one micro-batch; every rank calls it.
    """
    batch = isolation_batch(sources, micro_batch)
    if batch is None:
        return None
    changed = batch.input_ids.clone()
    first = (batch.targets != IGNORED_TARGET).int().argmax(1)
    for row, stop in enumerate(first.tolist()):
        changed[row, :stop] = (changed[row, :stop] + 1) % vocab_size
    losses = engine.row_losses(on_device(batch, world))
    return float((engine.row_losses(on_device(replace(batch, input_ids=changed), world)) - losses).abs().max())
