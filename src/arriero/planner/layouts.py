"""How the ranks of a run are arranged: which ranks share one copy of the model, and what DeepSpeed can't arrange.

A *replica* is one copy of the model; its ranks see the same rows. Ranks = replica × dp.
"""

from __future__ import annotations

from dataclasses import dataclass

from arriero.config.schema import ModelShape, Recipe
from arriero.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Ranks by axis. At most one of the sizes is above 1 (``layout_problems``)."""

    ranks: int = 1
    tensor: int = 1
    """Ranks that share one layer's matrices."""
    sequence: int = 1
    """Ranks that share one row."""
    pipeline: int = 1
    """Ranks that each hold some of the layers."""

    @property
    def replica(self) -> int:
        """Ranks of one replica: they see the same rows."""
        return self.tensor * self.sequence * self.pipeline

    @property
    def dp(self) -> int:
        """Replicas, each with rows of its own."""
        return self.ranks // self.replica

    def dp_rank(self, rank: int) -> int:
        """Number of the rank's replica. DeepSpeed puts ranks of one pipeline stage side by side, else those of a replica."""
        return rank % self.dp if self.pipeline > 1 else rank // self.replica

    def place(self, rank: int) -> int:
        """Number of the rank within its replica: its part of the matrices, its part of the row, or its stage."""
        return rank // self.dp if self.pipeline > 1 else rank % self.replica

    def holder(self, rank: int) -> int:
        """Number of the rank among those that hold the same parameters, which ZeRO splits their state over.

        With sequence parallelism all ranks hold the same ones.
        """
        return rank if self.sequence > 1 else self.dp_rank(rank)

    @property
    def holders(self) -> int:
        """Ranks that hold the same parameters."""
        return self.dp * self.sequence

    def stage_layers(self, layers: int, stage: int) -> range:
        """The decoder layers of a pipeline stage, as even as they come, the first stages one longer."""
        length, longer = divmod(layers, self.pipeline)
        start = stage * length + min(stage, longer)
        return range(start, start + length + (stage < longer))

    def describe(self) -> str:
        """As in ``2 replicas of 2 ranks (tensor parallel)``."""
        names = {"tensor": self.tensor, "sequence": self.sequence, "pipeline": self.pipeline}
        axes = ", ".join(f"{name} parallel" for name, size in names.items() if size > 1)
        if not axes:
            return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{self.dp} replica{'s' if self.dp > 1 else ''} of {self.replica} ranks ({axes})"


def choose_layout(recipe: Recipe, shape: ModelShape, ranks: int) -> Layout:
    """The recipe's layout on this many ranks.

    Raises ``UserError``, with all problems and for each the nearest that works, where DeepSpeed can't run it.
    """
    parallel = recipe.parallel
    problems = [*_combination_problems(recipe), *_shape_problems(recipe, shape)]
    replica = parallel.replica_ranks
    if ranks % replica:
        below, above = ranks // replica * replica, -(-ranks // replica) * replica
        nearest = " or ".join(str(count) for count in dict.fromkeys([below, above]) if count)
        problems.append(
            f"{ranks} rank{'s' if ranks > 1 else ''} can't hold whole replicas of {replica} ranks "
            f"(tensor {parallel.tensor_parallel_size} × sequence {parallel.sequence_parallel_size} × pipeline "
            f"{parallel.pipeline_parallel_size}); nearest: {nearest} ranks (--nproc on one host)"
        )
    if problems:
        raise UserError("this layout can't be run:\n" + "\n".join(f"  {problem}" for problem in problems))
    return Layout(
        ranks, parallel.tensor_parallel_size, parallel.sequence_parallel_size, parallel.pipeline_parallel_size
    )


def _combination_problems(recipe: Recipe) -> list[str]:
    """What DeepSpeed 0.19 can't combine, or combines inexactly; docs/parallelism.md has what was seen."""
    parallel, problems = recipe.parallel, []
    sizes = {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "sequence_parallel_size": parallel.sequence_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
    }
    given = {name: size for name, size in sizes.items() if size > 1}
    if len(given) > 1:
        listed = " and ".join(f"{name} {size}" for name, size in given.items())
        most = max(given, key=lambda name: given[name])
        problems.append(
            f"parallel: {listed}: DeepSpeed arranges its groups for one of them beside data parallelism; nearest: "
            f"{most} {given[most]} alone"
        )
    if parallel.pipeline_parallel_size > 1 and parallel.zero_stage != 1:
        why = "DeepSpeed's pipeline can't split gradients or weights" if parallel.zero_stage else "it reports no norm"
        problems.append(
            f"parallel.zero_stage {parallel.zero_stage} with pipeline_parallel_size {parallel.pipeline_parallel_size}: "
            f"{why}; nearest: zero_stage 1"
        )
    if parallel.pipeline_parallel_size > 1 and recipe.train.precision == "fp16":
        problems.append(
            f"train.precision fp16 with pipeline_parallel_size {parallel.pipeline_parallel_size}: DeepSpeed keeps no "
            "fp32 sums of tied gradients there; nearest: bf16"
        )
    if parallel.sequence_parallel_size > 1 and recipe.model.attn_implementation not in ("auto", "sdpa"):
        problems.append(
            f"model.attn_implementation {recipe.model.attn_implementation} with sequence_parallel_size "
            f"{parallel.sequence_parallel_size}: documents are kept apart by a mask that only sdpa takes; nearest: sdpa"
        )
    if given and recipe.optim.optimizer == "muon":
        problems.append(
            f"optim.optimizer muon with {' and '.join(given)}: Muon's steps are made of whole matrices, and each rank has "
            "a part of them or of their gradients; nearest: adamw"
        )
    offloaded = [key for key in ("offload_optimizer", "offload_param") if getattr(parallel, key) != "none"]
    if given and offloaded:
        problems.append(
            f"parallel.{' and '.join(offloaded)} with {' and '.join(given)}: state that is split twice isn't offloaded; "
            "nearest: offload none"
        )
    return problems


def _shape_problems(recipe: Recipe, shape: ModelShape) -> list[str]:
    parallel, problems = recipe.parallel, []
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads or shape.num_attention_heads
    for key in ("tensor_parallel_size", "sequence_parallel_size"):
        size = getattr(parallel, key)
        counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        if key == "tensor_parallel_size":
            counts["intermediate_size"] = shape.intermediate_size
        problems += _indivisible(f"parallel.{key}", size, counts)
    problems += _indivisible(
        "parallel.sequence_parallel_size", parallel.sequence_parallel_size, {"data.seq_len": recipe.data.seq_len}
    )
    if parallel.pipeline_parallel_size > shape.num_hidden_layers:
        problems.append(
            f"parallel.pipeline_parallel_size {parallel.pipeline_parallel_size}: the model has only "
            f"{shape.num_hidden_layers} layers, and a stage holds at least one; nearest: {shape.num_hidden_layers}"
        )
    return problems


def _indivisible(key: str, size: int, counts: dict[str, int]) -> list[str]:
    wrong = {name: count for name, count in counts.items() if count % size}
    if not wrong:
        return []
    listed = ", ".join(f"{name} {count}" for name, count in wrong.items())
    fitting = next(low for low in range(size - 1, 0, -1) if not any(count % low for count in counts.values()))
    return [f"{key} {size} doesn't divide {listed}; nearest: {fitting}"]
