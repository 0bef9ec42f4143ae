"""All the DeepSpeed we train with: one call of ``initialize``, one update, and the state as named slices.

Letters: m rows of a micro-batch, L tokens of a row, n elements of a slice.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from arriero.config.schema import Recipe
from arriero.engine.optimizer import build_optimizer, parameter_roles
from arriero.engine.parallel import World
from arriero.engine.state import Batch, Region, StateSlice, whole
from arriero.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's own imports warn about torch's deprecations
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.utils.logging import logger as deepspeed_logger

    from arriero.engine.pipeline import Pipeline, keep_stage
    from arriero.engine.sequence import SharedRows
    from arriero.engine.tensor import region_of, show_plan

deepspeed_logger.setLevel(logging.WARNING)
# On a CPU DeepSpeed would compile this op when it starts (needs a compiler; half a minute once; a killed build leaves a
# lock on which the next process waits for ever). Only its inference engine's all-reduce uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
# What DeepSpeed's dynamic loss scale depends on (runtime/fp16/loss_scaler.py).
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepResult:
    """One update as this rank saw it. ``row_losses``: the summed loss of each of its rows, fp32 ``[rows]``."""

    row_losses: Tensor
    loss: float
    """Mean over the targets of the whole step, over all ranks."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    applied: bool
    """False where the update was not accepted, or DeepSpeed left it out (overflow, NaN)."""
    loss_scale: float


def parameter_placement(ds_config: dict[str, Any]) -> AbstractContextManager[Any]:
    """Where a model's parameters are born: with ZeRO-3 split over the ranks, else whole."""
    if ds_config["zero_optimization"]["stage"] < 3:
        return nullcontext()
    context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=ds_config)
    return context


def keep_part(world: World) -> Callable[[Any], None] | None:
    """What takes out of a new model's skeleton that which other ranks hold; None: every rank begins with all of it."""
    layout = world.layout
    if layout.pipeline == 1:
        return None
    return lambda causal_lm: keep_stage(causal_lm, layout, layout.place(world.rank))


def gather_parameter(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """The whole value of a ZeRO-3 parameter, for reading and writing; rank 0's is what stays."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return context


def check_device(precision: str, world: World) -> None:
    """``UserError`` where this rank's device can't compute in the precision."""
    if precision == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise UserError(
            f"train.precision fp16 isn't supported on this {world.device.type}",
            "Use bf16 (masters stay fp32), or fp32.",
        )


def check_quantizers(ds_config: Mapping[str, Any], world: World) -> None:
    """``UserError`` where ZeRO++ would quantize what ranks exchange on a device that DeepSpeed has no kernels for."""
    wanted = [key for key, value in ds_config["zero_optimization"].items() if "quantized" in key and value]
    if wanted and world.device.type != "cuda":
        raise UserError(
            f"zero_optimization.{wanted[0]}: DeepSpeed quantizes on CUDA devices only, this one is {world.device.type}",
            "Remove it; zero_hpz_partition_size works without it.",
        )


class Engine:
    """A model under DeepSpeed. It knows neither where rows come from nor what is logged or saved."""

    def __init__(self, recipe: Recipe, model: Any, ds_config: dict[str, Any], world: World) -> None:
        """model: gives ``parameters_by_name()`` and, from rows, their summed loss (arriero.model.build.PretrainModel)."""
        self.world = world
        self.stage: int = ds_config["zero_optimization"]["stage"]
        self._optimizer_name = recipe.optim.optimizer
        self._model = model
        # torch's groups exist by now; DeepSpeed's view of them doesn't, and some layouts make groups of their own.
        backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
        deepspeed.init_distributed(backend, dist_init_required=False)
        if recipe.train.activation_checkpointing:
            model.recompute_layers(int(recipe.train.activation_checkpointing))
        self.compiled = False
        offloaded = DeepSpeedCPUAdam if recipe.parallel.offload_optimizer != "none" else None
        named, roles = model.parameters_by_name(), parameter_roles(model.causal_lm)
        muon = _muon() if recipe.optim.optimizer == "muon" else None
        optimizer = build_optimizer(named, roles, recipe.optim, offloaded=offloaded, muon=muon)
        with redirect_stdout(StringIO()) as chatter:  # DeepSpeed prints its memory use, whatever its log level
            module, groups = self._arranged(recipe.data.seq_len)
            self._engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=ds_config, mpu=groups, dist_init_required=False
            )
        logger.debug("%s", chatter.getvalue())
        # Only now: tensor parallelism may have put other parameters in place of the model's.
        self._named: list[tuple[str, nn.Parameter]] = list(model.parameters_by_name())
        self._wrapper = self._engine.optimizer
        # At stage 0 in fp32 DeepSpeed uses ours as it is.
        self._adam: Any = getattr(self._wrapper, "optimizer", self._wrapper)
        # ZeRO-3's reduce-scatter averages over all ranks also where some of them share rows.
        shares_rows = self.stage == 3 and world.layout.sequence > 1
        self._averaged_over = world.size if shares_rows else world.dp_size
        self._accumulation: int = ds_config["gradient_accumulation_steps"]
        scaler = getattr(self._wrapper, "loss_scaler", None)
        self._scaler: Any = scaler if getattr(scaler, "dynamic", False) else None
        if self._scaler is not None:
            self._scaler.update_scale = self._update_scale
        if self._pipeline is not None:
            self._pipeline.run_on(self._engine)
        self.begin_optimizer_state(0)
        self._guard_updates()

    def _arranged(self, seq_len: int) -> tuple[nn.Module, Any]:
        """The model as this layout runs it, and what tells DeepSpeed of groups that it doesn't make itself."""
        layout, place = self.world.layout, self.world.layout.place(self.world.rank)
        self._pipeline: Pipeline | None = None
        if layout.pipeline > 1:
            self._pipeline = Pipeline(self._model, layout, place)
            return self._pipeline.module, None
        if layout.sequence > 1:
            shared = SharedRows(self._model, layout, place, seq_len)
            return shared, shared.groups
        return (show_plan(self._model) if layout.tensor > 1 else self._model), None

    def _guard_updates(self) -> None:
        """Let each step's verdict decide whether the optimizer moves anything.

        DeepSpeed knows the gradient's norm only inside its own step, right before it calls the optimizer; so that call
        is where a step can still be left out, on all ranks alike since loss and norm are sums over all of them.
        """
        update = self._adam.step
        self._accepts: Callable[[float], bool] = lambda norm: True
        self._accepted: bool | None = None

        def guarded(*arguments: Any, **options: Any) -> Any:
            if self._accepted is None:  # ZeRO-3 calls once for each of its buffers
                self._accepted = self._accepts(float(self._wrapper._global_grad_norm))
            return update(*arguments, **options) if self._accepted else None

        self._adam.step = guarded

    def compile_layers(self) -> None:
        """From the next call on, the model's decoder layers and its loss are compiled ones."""
        self._model.compile_layers()
        self.compiled = True

    def use_liger(self) -> int:
        """Take Liger's kernels for norms and gated units; how many modules changed. ``ImportError`` without them."""
        changed: int = self._model.use_liger()
        return changed

    def optimizer_step(
        self,
        batches: Sequence[Batch],
        target_tokens: int,
        learning_rate: float,
        accept: Callable[[float, float], bool] = lambda loss, norm: True,
    ) -> StepResult:
        """One update from this rank's micro-batches of a step.

        target_tokens: targets of the whole step, over all ranks and micro-batches; the step's loss is the sum of its
        targets' losses divided by it. DeepSpeed averages over replicas and accumulation, hence the factor.
        accept: called with the step's loss and gradient norm before clipping; where it says no, nothing is moved.
        """
        assert len(batches) == self._accumulation, f"{len(batches)} micro-batches, expected {self._accumulation}"
        factor = self._averaged_over * self._accumulation / max(target_tokens, 1)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate * group.get("lr_factor", 1.0)
        run = self._accumulate if self._pipeline is None else self._pipeline_step
        row_losses, step_loss, grad_norm = run(batches, factor, max(target_tokens, 1), accept)
        if self.stage > 0 and self._optimizer_name != "muon":
            grad_norm = float(self._engine.get_global_grad_norm())
        loss_scale = float(getattr(self._wrapper, "cur_scale", getattr(self._wrapper, "loss_scale", 1.0)))
        applied = bool(self._engine._step_applied) and self._accepted is not False
        return StepResult(row_losses, step_loss, grad_norm, applied, loss_scale)

    def _accumulate(
        self, batches: Sequence[Batch], factor: float, targets: int, accept: Callable[[float, float], bool]
    ) -> tuple[Tensor, float, float]:
        """Forward and backward of each micro-batch, and after the last the update: row losses, loss, stage 0's norm."""
        self._engine.train()
        parts: list[Tensor] = []
        row_losses, step_loss, grad_norm = torch.empty(0), 0.0, 0.0
        for number, batch in enumerate(batches):
            loss, losses = self._engine(batch.input_ids, batch.targets, batch.position_ids)
            parts.append(losses)
            self._engine.backward(loss * factor)
            if number == len(batches) - 1:
                row_losses = torch.cat(parts)
                step_loss = self._mean_loss(row_losses, targets)
                self._accepted, self._accepts = None, partial(accept, step_loss)
                if self.stage == 0 or self._optimizer_name == "muon":
                    # Here DeepSpeed clips before it calls the optimizer; there it makes Muon's steps before.
                    grad_norm = self._plain_grad_norm() if self.stage == 0 else self._split_grad_norm()
                    self._accepted = accept(step_loss, grad_norm)
            with self._kept_momentum():
                self._step()
        return row_losses, step_loss, grad_norm

    def _pipeline_step(
        self, batches: Sequence[Batch], factor: float, targets: int, accept: Callable[[float, float], bool]
    ) -> tuple[Tensor, float, float]:
        """The same by DeepSpeed's schedule, which also makes the update: the loss is first known when that begins."""
        assert self._pipeline is not None
        found: list[tuple[Tensor, float]] = []

        def collect() -> tuple[Tensor, float]:
            if not found and self._pipeline is not None:
                row_losses = self._pipeline.found_losses()
                found.append((row_losses, self._mean_loss(row_losses, targets)))
            return found[0]

        # All ranks of all stages call the optimizer together, so here they may meet.
        self._accepted, self._accepts = None, lambda norm: accept(collect()[1], norm)
        self._pipeline.step(batches, factor)
        return *collect(), 0.0

    def _mean_loss(self, row_losses: Tensor, targets: int) -> float:
        return float(self.world.total([float(row_losses.double().sum())])) / targets

    def _step(self) -> None:
        self._scale_may_grow = False
        try:
            self._engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise UserError(
                f"fp16: the gradient overflows even at the smallest loss scale {self._scaler.cur_scale:g}",
                "Use train.precision bf16, which needs no scale, or a lower optim.learning_rate; the last checkpoint is "
                "from before it.",
                exit_code=1,
            ) from None
        if self._scale_may_grow:
            type(self._scaler).update_scale(self._scaler, False)

    def _update_scale(self, overflow: bool) -> None:
        """Stands in for the loss scaler's own: DeepSpeed updates the scale before it divides the gradient by it, so
        each time that the scale doubled, that update would come from half the gradient."""
        if overflow:
            type(self._scaler).update_scale(self._scaler, True)
        else:
            self._scale_may_grow = True

    def loss_scale_state(self) -> dict[str, float]:
        """Where fp16's dynamic loss scale stands; empty where there is none."""
        return {name: getattr(self._scaler, name) for name in _LOSS_SCALE} if self._scaler is not None else {}

    def set_loss_scale_state(self, state: Mapping[str, float]) -> bool:
        """Put back what ``loss_scale_state`` gave; False where there is a dynamic scale and nothing to put back."""
        wanted = self.loss_scale_state()
        for name in wanted.keys() & state.keys():
            setattr(self._scaler, name, type(wanted[name])(state[name]))
        return wanted.keys() <= state.keys()

    @torch.no_grad()
    def row_losses(self, batch: Batch) -> Tensor:
        """The summed loss of each row, fp32 ``[m]``, in evaluation mode; the training mode is restored."""
        training = self._engine.module.training
        self._engine.eval()
        losses: Tensor
        if self._pipeline is not None:
            losses = self._pipeline.row_losses(batch)
        else:
            _, losses = self._engine(batch.input_ids, batch.targets, batch.position_ids)
        self._engine.train(training)
        return losses

    @torch.no_grad()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits of one row of one document, fp32 ``[1, L, V]`` on the CPU. Every rank must call it."""
        training = self._engine.module.training
        self._engine.eval()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        logits: Tensor
        if self._pipeline is not None:
            logits = self._pipeline.logits(input_ids, positions)
        else:
            logits = self._engine(input_ids, None, positions)
        self._engine.train(training)
        return logits.float().cpu()

    def _plain_grad_norm(self) -> float:
        """DeepSpeed reports no norm where it wraps nothing; here each rank's gradients are complete for what it holds."""
        counted = [p.grad for _, p in self._named if p.grad is not None and self._region(p).counted]
        total = sum(float(gradient.float().pow(2).sum()) for gradient in counted)
        if self.world.layout.replica > 1:
            total = float(self.world.sum_over_ranks([total])[0]) / self.world.layout.holders
        return math.sqrt(total)

    def _split_grad_norm(self) -> float:
        """The norm before Muon: DeepSpeed's own would be that of the orthogonal steps that Muon makes of gradients."""
        parts = [part for group in self._wrapper.averaged_gradients.values() for part in group]
        squares = sum(float(part.float().pow(2).sum()) for part in parts)
        return math.sqrt(float(self.world.total([squares])[0])) / float(self._wrapper.loss_scale)

    @contextmanager
    def _kept_momentum(self) -> Iterator[None]:
        """Keep Muon's momentum through a step that was left out: at stage 3 DeepSpeed moves it before the optimizer is
        called. The gradients are zeroed, since what isn't finite would poison it."""
        if self._optimizer_name != "muon" or self.stage != 3 or self._accepted is not False:
            yield
            return
        for part in (part for group in self._wrapper.averaged_gradients.values() for part in group):
            part.zero_()
        states = {master: self._adam.state[master] for master in self._masters()}
        kept = {m: state["momentum_buffer"].clone() for m, state in states.items() if "momentum_buffer" in state}
        yield
        for master, momentum in kept.items():
            self._adam.state[master]["momentum_buffer"].copy_(momentum)

    # State by parameter name. DeepSpeed keeps masters and moments in flat buffers; these are views into them.

    def begin_optimizer_state(self, step: int) -> None:
        """Give every master its Adam state, with moments 0 and the given count of applied updates.

        torch creates it at the first update only, and some of DeepSpeed's wrappers have taken an empty one by then;
        so the state is made here, whatever there was.
        """
        for group, master in enumerate(self._masters()):
            with self._resident(group, writes=True):
                state = self._adam.state[master]
                for moment in self._moments(group):
                    # In place where there is one: DeepSpeed's swapper knows these very tensors.
                    if moment in state:
                        state[moment].zero_()
                    else:
                        state[moment] = torch.zeros_like(master, dtype=torch.float32)
                if "exp_avg" in state:
                    count = torch.tensor(float(step), device=master.device)
                    state["step"] = step if isinstance(self._adam, DeepSpeedCPUAdam) else count
        if isinstance(self._adam, DeepSpeedCPUAdam):
            _count_up(self._adam, step)

    def _masters(self) -> list[Tensor]:
        """The tensors that the optimizer updates on this rank: one per parameter at stage 0, else flat buffers."""
        if self.stage == 3:
            return list(self._wrapper.fp32_partitioned_groups_flat)
        return [parameter for group in self._adam.param_groups for parameter in group["params"]]

    def _moments(self, group: int) -> tuple[str, ...]:
        """Names of the state beside the master ``group``: Muon has its momentum, AdamW two moments."""
        if self._optimizer_name != "muon":
            return MOMENTS
        if self.stage == 3:
            by_muon = self._wrapper.sub_groups_using_muon[group]
        else:
            by_muon = self._masters()[group].use_muon  # type: ignore[attr-defined]
        return ("momentum_buffer",) if by_muon else MOMENTS

    @contextmanager
    def _resident(self, group: int, *, writes: bool) -> Iterator[None]:
        """Masters and moments of one of ZeRO-3's groups in memory, where they may lie on NVMe; put back if written."""
        swapped = self.swaps and self._wrapper._swappable_optimizer_subgroup(group)
        if swapped:
            self._wrapper._optimizer_states_and_gradient_swap_in(group)
        yield
        if swapped and writes:
            self._wrapper._optimizer_states_and_gradient_swap_out(group)
        elif swapped:
            self._wrapper._release_swap_buffers(group)

    @property
    def swaps(self) -> bool:
        """Whether slices of the state live on NVMe, and in memory only while they are looked at."""
        return self.stage == 3 and bool(self._wrapper.swap_optimizer)

    def state_slices(self, *, writes: bool = False) -> Iterator[StateSlice]:
        """What this rank holds of each parameter's masters and moments.

        A slice lives until the next one is asked for: what is offloaded to NVMe is read in parts, and written back
        where ``writes`` is true.
        """
        # At stage 0 all ranks that hold a parameter hold all its state, and the first of them saves it.
        first = self.stage > 0 or self.world.layout.holder(self.world.rank) == 0
        owned = [(name, parameter, piece) for name, parameter in self._named if (piece := self._owned(parameter))]
        for group, flat in enumerate(self._masters()):
            with self._resident(group, writes=writes):
                state, moments = self._adam.state[flat], self._moments(group)
                for name, parameter, (holder, offset, start, length) in owned:
                    if holder is not flat:
                        continue
                    region = self._region(parameter)
                    own = slice(offset, offset + length)
                    master, *parts = (t.detach().view(-1)[own] for t in (flat, *map(state.get, moments)))
                    yield StateSlice(
                        name,
                        region.shape,
                        region.start + start,
                        region.columns,
                        region.counted and first,
                        master,
                        dict(zip(moments, parts, strict=True)),
                    )

    def _region(self, parameter: nn.Parameter) -> Region:
        """Which part of the whole parameter this rank's is."""
        layout = self.world.layout
        if layout.tensor > 1:
            region = region_of(parameter, layout.place(self.world.rank))
            # ZeRO-3 splits what AutoTP leaves whole over all ranks, the ranks of a replica among them.
            return replace(region, counted=True) if self._split_over(parameter) == layout.ranks else region
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        # The last stage's copy of tied embeddings is the first one's.
        return whole(shape, counted=not getattr(parameter, "ds_pipe_replicated", False))

    def _split_over(self, parameter: Any) -> int:
        """Ranks that ZeRO-3 splits a parameter over; 1 at other stages."""
        return int(deepspeed.comm.get_world_size(parameter.ds_process_group)) if self.stage == 3 else 1

    def _owned(self, parameter: Any) -> tuple[Tensor, int, int, int] | None:
        """(flat buffer, offset in it, start within the parameter, length) of this rank's part, if it has one."""
        if self.stage == 0:
            return parameter, 0, 0, parameter.numel()
        if self.stage == 3:
            group, offset, length = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
            # Each rank holds an equal share; the last ones may hold padding behind the parameter's end.
            start = deepspeed.comm.get_rank(parameter.ds_process_group) * length
            length = min(length, parameter.ds_numel - start)
            return (self._wrapper.fp32_partitioned_groups_flat[group], offset, start, length) if length > 0 else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self._masters()[mapping.param_group_index]
        address, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        return flat, address.start, low.start, address.numel

    def publish_masters(self) -> None:
        """Make the weights that forward passes use equal to the masters, on every rank."""
        if self.stage == 0:
            return
        if self.stage < 3:
            self._wrapper.update_lp_params()
            return
        for group in range(len(self._wrapper.fp32_partitioned_groups_flat)):
            with self._resident(group, writes=False):
                self._wrapper._reassign_or_swap_out_partitioned_parameters(group)
        if self._wrapper.persistent_parameters:
            # Small parameters stay whole on every rank between steps and must be fetched anew.
            self._wrapper.persistent_parameters[0].all_gather(self._wrapper.persistent_parameters)


def _muon() -> Any:
    # Imported only here: torch.compile decorates its kernels then, which takes a second.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return MuonWithAuxAdam


def _count_up(adam: Any, step: int) -> None:
    """Bring the beta powers of DeepSpeed's CPU Adam to where ``step`` updates leave them, bit for bit.

    The op multiplies β by itself at each update but takes ``pow(β, step)`` after a jump (csrc/includes/cpu_adam.h,
    IncrementStep), and the two part in the last bits: losses would drift by 1e-4 within five steps of a resume. So the
    updates are counted once more on a single number; 100,000 take half a second.
    """
    number, gradient, first, second = torch.zeros(4, 1)
    beta1, beta2 = adam.param_groups[0]["betas"]
    for count in range(1, step + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, count, 0.0, beta1, beta2, 1e-8, 0.0, True, number, gradient, first, second
        )
