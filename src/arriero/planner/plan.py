"""What a run will need and take: its own layout, and every other that its recipe could have, best first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from arriero.config.load import check_recipe
from arriero.config.schema import ModelShape, Recipe
from arriero.errors import UserError
from arriero.planner.arithmetic import Setup, accumulation_steps, divisors, flops_per_token, parameter_count
from arriero.planner.calibration import calibrated
from arriero.planner.hardware import Device, Network, find_device, find_network, for_rank, gpus_here
from arriero.planner.layouts import choose_layout
from arriero.planner.memory import (
    MemoryEstimate,
    auto_micro_batch,
    estimate_memory,
    practice_of,
    row_choices,
)
from arriero.planner.shape import shape_of_model
from arriero.planner.throughput import StepTime, step_time, tokens_per_second, utilization

# What a node writes per second to local NVMe or a parallel file system, hashing included.
_DISK_BYTES_S = 2e9
# Of a device's memory that a plan may fill: steps differ, and the estimate errs by a few percent.
_FILL = 0.95
# Times this close are the same: no prediction is better than that.
_SAME = 1.02


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    device: Device
    network: Network
    ranks: int
    price_per_hour: float | None

    @property
    def rank_device(self) -> Device:
        """The device as one rank has it: CPU ranks share one."""
        return for_rank(self.device, self.ranks) if self.device.is_cpu else self.device


@dataclass(frozen=True)
class Forecast:
    """One layout, with all that is predicted of it."""

    layout: Setup
    memory: MemoryEstimate
    time: StepTime
    fits: bool
    tokens_per_second: float
    mfu: float
    days: float | None
    """Of the whole run; None where its length isn't known without its data."""
    cost: float | None
    checkpoint_bytes: int
    own: bool
    """Whether it is what the recipe says as it stands."""

    @property
    def checkpoint_s(self) -> float:
        """Seconds that a checkpoint takes to write, all nodes writing at once."""
        return self.checkpoint_bytes / _DISK_BYTES_S

    def keys(self) -> dict[str, Any]:
        """The recipe's keys that make this layout."""
        layout = self.layout
        every = layout.checkpoint_every
        return {
            "zero_stage": layout.zero_stage,
            "tensor_parallel_size": layout.tensor,
            "sequence_parallel_size": layout.sequence,
            "pipeline_parallel_size": layout.pipeline,
            "offload_optimizer": layout.offload_optimizer,
            "offload_param": layout.offload_param,
            "per_device_train_batch_size": layout.micro_batch,
            "activation_checkpointing": bool(every) if every < 2 else every,
        }

    def record(self) -> dict[str, Any]:
        """The object that `arriero plan --json` prints of a layout."""
        memory = self.memory
        parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total")
        return {
            **self.keys(),
            "gradient_accumulation_steps": self.layout.accumulation,
            "dp": self.layout.dp,
            "fits": self.fits,
            "memory_bytes": {name: getattr(memory, name) for name in parts},
            "allocated_bytes": memory.allocated,
            "host_memory_bytes": memory.host,
            "step_time_s": self.time.total,
            "step_time_parts_s": dict(self.time.__dict__),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "days": self.days,
            "cost": self.cost,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_time_s": self.checkpoint_s,
            "recipe": self.own,
        }


@dataclass(frozen=True)
class Planner:
    """Predicts layouts of one recipe on one machine."""

    recipe: Recipe
    shape: ModelShape
    vocab_size: int
    machine: Machine
    tokens: int | None
    """Of the whole run."""

    @property
    def parameters(self) -> int:
        return parameter_count(self.shape, self.vocab_size)

    def forecast(self, layout: Setup, *, own: bool = False) -> Forecast:
        """Everything that is predicted of one layout."""
        recipe, machine = self.recipe, self.machine
        device, seq_len = machine.rank_device, recipe.data.seq_len
        practice = practice_of(recipe, layout, on_gpu=not device.is_cpu)
        given: dict[str, Any] = {
            "parameters": self.parameters,
            "vocab_size": self.vocab_size,
            "seq_len": seq_len,
            "practice": practice,
        }
        memory = estimate_memory(self.shape, layout, on_gpu=not device.is_cpu, **given)
        time = step_time(self.shape, layout, device, machine.network, **given)
        speed = tokens_per_second(layout, seq_len, time.total)
        days = self.tokens / speed / 86_400 if self.tokens is not None else None
        price = machine.price_per_hour
        return Forecast(
            layout=layout,
            memory=memory,
            time=time,
            fits=fits(memory, machine),
            tokens_per_second=speed,
            mfu=utilization(
                flops_per_token(self.shape, self.vocab_size, seq_len),
                speed,
                layout.ranks,
                device.peak(practice.precision),
            ),
            days=days,
            cost=days * 24 * machine.ranks * price if days is not None and price is not None else None,
            # Master and moments in fp32, each once.
            checkpoint_bytes=12 * self.parameters,
            own=own,
        )

    def own_layout(self) -> Setup:
        """The layout that the recipe has as it stands, on all ranks of the machine.

        Raises ``UserError`` where the ranks or the batch don't come out.
        """
        recipe, ranks = self.recipe, self.machine.ranks
        parallel, train = recipe.parallel, recipe.train
        arranged = choose_layout(recipe, self.shape, ranks)
        layout = Setup(
            ranks=ranks,
            zero_stage=parallel.zero_stage,
            tensor=arranged.tensor,
            sequence=arranged.sequence,
            pipeline=arranged.pipeline,
            checkpoint_every=int(train.activation_checkpointing),
            offload_optimizer=parallel.offload_optimizer,
            offload_param=parallel.offload_param,
        )
        rows, _ = auto_micro_batch(
            recipe,
            self.shape,
            layout,
            parameters=self.parameters,
            vocab_size=self.vocab_size,
            memory_bytes=self.machine.rank_device.memory_bytes,
            on_gpu=not self.machine.device.is_cpu,
        )
        times = accumulation_steps(train, dp=layout.dp, micro_batch=rows)
        return replace(layout, micro_batch=rows, accumulation=times)

    def ranked(self) -> list[Forecast]:
        """The recipe's own layout and every other that it could have, best first: those that fit, by time; then those
        that don't, by memory. Of the micro-batches of a layout only the best is listed."""
        found: list[Forecast] = []
        with suppress(UserError):  # the caller says so, and the others are what helps then
            found.append(self.forecast(self.own_layout(), own=True))
        known = {one.layout for one in found}
        for layout in self._candidates():
            best = self._best_rows(layout)
            if best is not None and best.layout not in known:
                found.append(best)
        best_s = min((one.time.total for one in found if one.fits), default=0.0)
        return sorted(found, key=lambda one: _rank(one, best_s))

    def _best_rows(self, layout: Setup) -> Forecast | None:
        batch = self.recipe.train.global_batch_size
        if batch % layout.dp:
            return None
        found = []
        for rows in row_choices(self.recipe, layout, on_gpu=not self.machine.device.is_cpu):
            accumulation = batch // layout.dp // rows
            found.append(self.forecast(replace(layout, micro_batch=rows, accumulation=accumulation)))
        fitting = [one for one in found if one.fits]
        if not fitting:
            return min(found, key=lambda one: one.memory.total + one.memory.host)
        fastest = min(one.time.total for one in fitting)
        return [one for one in fitting if one.time.total <= _SAME * fastest][-1]

    def _candidates(self) -> Iterator[Setup]:
        """Layouts that split the model evenly and that the recipe's own checks take."""
        ranks, shape = self.machine.ranks, self.shape
        inside = (
            divisors(min(ranks, self.machine.device.per_node)) if not self.machine.device.is_cpu else divisors(ranks)
        )
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads or shape.num_attention_heads
        tensors = [n for n in inside if heads % n == 0 and kv_heads % n == 0]
        sequences = [n for n in divisors(ranks) if heads % n == 0 and self.recipe.data.seq_len % n == 0]
        pipelines = [n for n in divisors(ranks) if n <= shape.num_hidden_layers]
        # A CPU's own memory is the host's.
        offloads = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))[: 1 if self.machine.device.is_cpu else 3]
        whole = self.recipe.model_dump(mode="json")
        for tensor, sequence, pipeline in product(tensors, sequences, pipelines):
            if ranks % (tensor * sequence * pipeline):
                continue
            for stage, (optimizer, param) in product(range(4), offloads):
                parallel = {
                    "zero_stage": stage,
                    "tensor_parallel_size": tensor,
                    "sequence_parallel_size": sequence,
                    "pipeline_parallel_size": pipeline,
                    "offload_optimizer": optimizer,
                    "offload_param": param,
                }
                if not _takes(whole, parallel, shape, ranks):
                    continue
                for every in (0, 1):
                    yield Setup(ranks, stage, tensor, sequence, pipeline, 1, 1, every, optimizer, param)


def plan(
    recipe: Recipe,
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    per_node: int | None = None,
    network: str | None = None,
    price: float | None = None,
    tokens: int | None = None,
) -> Planner:
    """A planner of this recipe for ``gpus`` times ``gpu`` (default: what this machine has; ``cpu``: ranks on its CPU).

    per_node: GPUs of a node (8); network: between nodes, such as ``infiniband-3200`` (gigabits per second of a node); price: of a GPU-hour; both
    default to the table's. tokens: of the whole run, where the recipe counts in epochs. Nothing is loaded or started.
    Raises ``UserError`` for a name that isn't known, and where the model's size depends on a file that isn't there.
    """
    name, here = gpus_here()
    device, _ = calibrated(find_device(gpu or name))
    if per_node is not None:
        device = replace(device, per_node=per_node)
    ranks = gpus or (here if gpu is None else 1)
    if ranks < 1:
        raise UserError(f"--gpus {ranks}: expected at least 1")
    shape, vocab_size = shape_of_model(recipe.model)
    machine = Machine(
        device, find_network(network or device.network), ranks, device.price_per_hour if price is None else price
    )
    return Planner(recipe, shape, vocab_size, machine, tokens or tokens_of_run(recipe))


def tokens_of_run(recipe: Recipe) -> int | None:
    """Tokens of the whole run; None where it counts in passes over data that only its datasets know."""
    train = recipe.train
    if train.max_tokens is not None:
        return train.max_tokens
    if train.max_steps is not None:
        return train.max_steps * train.global_batch_size * recipe.data.seq_len
    return None


def _takes(whole: dict[str, Any], parallel: dict[str, Any], shape: ModelShape, ranks: int) -> bool:
    """Whether a recipe with these keys passes its own checks and can be arranged: nothing else is proposed."""
    try:
        choose_layout(check_recipe(whole | {"parallel": whole["parallel"] | parallel}, ""), shape, ranks)
    except UserError:
        return False
    return True


def fits(memory: MemoryEstimate, machine: Machine) -> bool:
    """Whether a rank's memory suffices, and its node's."""
    device = machine.rank_device
    on_node = min(machine.ranks, device.per_node)
    return memory.total <= _FILL * device.memory_bytes and memory.host * on_node <= _FILL * device.host_memory_bytes


def _rank(one: Forecast, best_s: float) -> tuple[bool, float, bool, int]:
    """Those that fit by time, where all that are as good as the best count the same, and the recipe's own is the first
    of them, then what needs least; those that don't fit by size."""
    size = one.memory.total + one.memory.host
    if not one.fits:
        return True, float(size), not one.own, 0
    same = one.time.total <= _SAME * best_s
    return False, best_s if same else one.time.total, same and not one.own, size


def recipe_lines(forecast: Forecast) -> str:
    """The lines of YAML that give a recipe this layout."""
    keys = forecast.keys()
    train = {name: keys.pop(name) for name in ("per_device_train_batch_size", "activation_checkpointing")}
    lines = ["train:", *(f"  {name}: {_yaml(value)}" for name, value in train.items())]
    return "\n".join([*lines, "parallel:", *(f"  {name}: {_yaml(value)}" for name, value in keys.items())])


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
