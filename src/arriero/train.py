"""A run: data, model, engine, checkpoints and monitor meet here, and nowhere else."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from arriero.checkpoint.export import export_checkpoint
from arriero.checkpoint.layout import folder_name, prune
from arriero.checkpoint.load import choose_checkpoint, load_random_state, load_state, read_json
from arriero.checkpoint.save import save_checkpoint
from arriero.config.load import differing_keys, parse_yaml, recipe_yaml
from arriero.config.schema import ModelShape, Recipe
from arriero.data.loader import MicroBatch, Source, TrainingData, mixture_sources, open_sources, validation_batches
from arriero.data.order import DataState, Mixture
from arriero.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from arriero.engine.ds_config import compile_ds_config, read_deepspeed_json
from arriero.engine.engine import Batch, Engine, gather_parameter, parameter_placement
from arriero.engine.parallel import World
from arriero.engine.schedule import learning_rates
from arriero.errors import UserError
from arriero.evaluate.perplexity import Score, score, sum_by_source
from arriero.model.build import build_model, model_config
from arriero.monitor.metrics import MetricsFile
from arriero.monitor.progress import Progress
from arriero.monitor.sinks import TensorBoardSink
from arriero.planner.arithmetic import (
    accumulation_steps,
    check_rows,
    flops_per_token,
    micro_batch_rows,
    parameter_count,
    run_rows,
    total_steps,
)
from arriero.run_folder import RunFolder, replace_text
from arriero.units import format_count

PREEMPTED = 75
_PROBE_TOKENS = 16
# What makes a run another run: with these changed, its weights or the rows that it has taken mean something else.
_IDENTITY = ("model.", "data.seq_len", "data.packing", "data.isolate_documents", "data.validation_split", "train.seed")


@dataclass(frozen=True)
class Plan:
    """The numbers that follow from a recipe, its data and the number of data-parallel ranks."""

    steps: int
    end: int
    """Position at which the run ends; rows behind it are padding."""
    seq_len: int
    global_batch_size: int
    micro_batch: int
    accumulation: int
    dp: int
    parameters: int
    flops_per_token: float
    epochs: dict[str, float]
    """How often each source will have been passed through."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True)
class State:
    """Where a run stands. All of it is in a checkpoint."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0
    """Updates that were applied: what the schedule and Adam count."""


@dataclass(frozen=True)
class Inputs:
    """A recipe with its data and tokenizer opened and found to fit together."""

    recipe: Recipe
    sources: list[Source]
    tokenizer: Any
    config: Any
    plan: Plan


def resolve(recipe: Recipe, dp: int) -> Inputs:
    """Open what the recipe names and derive the plan; ``UserError`` for whatever doesn't fit, before anything starts."""
    name = recipe.model.tokenizer or recipe.model.model_name_or_path
    assert name is not None
    tokenizer = load_tokenizer(name)
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = model_config(recipe.model, vocab_size=len(tokenizer), seq_len=recipe.data.seq_len, token_ids=ids)
    sources = open_sources(recipe.data)
    check_tokenizer(sources, tokenizer, config.vocab_size, name)
    return Inputs(recipe, sources, tokenizer, config, make_plan(recipe, sources, config, dp))


def show_dataset(path: Path, dp: int, seq_len: int) -> Inputs:
    """One dataset as a run of single rows per rank would read it, for looking at it without a recipe."""
    placeholder = {"hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1}
    recipe = Recipe.model_validate(
        {
            "output_dir": "",
            "model": {"config": placeholder, "tokenizer": ""},
            "data": {"sources": [{"path": str(path)}], "seq_len": seq_len},
            "train": {"global_batch_size": dp, "per_device_train_batch_size": 1, "num_train_epochs": 1},
        }
    )
    sources = open_sources(recipe.data)
    assert recipe.model.config is not None
    config = recipe.model.config.model_copy(update={"vocab_size": sources[0].dataset.largest_id + 1})
    return Inputs(recipe, sources, None, config, make_plan(recipe, sources, config, dp))


def check_tokenizer(sources: Sequence[Source], tokenizer: Any, embeddings: int, name: str) -> None:
    """``UserError`` where a dataset was made with another tokenizer, or holds ids that the model can't embed."""
    ours = tokenizer_fingerprint(tokenizer)
    for source in sources:
        theirs = source.dataset.tokenizer_fingerprint
        if theirs is not None and theirs != ours:
            raise UserError(
                f"{source.dataset.path} was prepared with another tokenizer than {name}: fingerprint {theirs}, "
                f"the model's is {ours}",
                f"Prepare it again: arriero prepare … --tokenizer {name} --out {source.dataset.path}",
            )
        if source.dataset.largest_id >= embeddings:
            raise UserError(
                f"{source.dataset.path} holds token id {source.dataset.largest_id:,}, the model has only "
                f"{embeddings:,} embeddings",
                "Use the tokenizer that belongs to the model.",
            )


def make_plan(recipe: Recipe, sources: Sequence[Source], config: Any, dp: int) -> Plan:
    """Batches, steps and epochs; ``UserError`` where they don't come out."""
    train, seq_len = recipe.train, recipe.data.seq_len
    micro_batch = micro_batch_rows(train, dp=dp, seq_len=seq_len)
    accumulation = accumulation_steps(train, dp=dp, micro_batch=micro_batch)
    epoch_rows = sum(len(source.training) for source in sources)
    steps = total_steps(train, seq_len=seq_len, epoch_rows=epoch_rows)
    end = run_rows(train, epoch_rows=epoch_rows, steps=steps)
    mixture = Mixture(mixture_sources(sources), train.seed)
    check_rows(end, mixture.end, mixture.epochs_at(mixture.end or 0))
    shape = shape_of(config)
    return Plan(
        steps,
        end,
        seq_len,
        train.global_batch_size,
        micro_batch,
        accumulation,
        dp,
        parameter_count(shape, config.vocab_size),
        flops_per_token(shape, config.vocab_size, seq_len),
        mixture.epochs_at(end),
    )


def shape_of(config: Any) -> ModelShape:
    """The part of a Transformers configuration that sizes and times follow from."""
    known = {name: getattr(config, name) for name in ModelShape.model_fields if hasattr(config, name)}
    return ModelShape(**{name: value for name, value in known.items() if value is not None})


def train(recipe: Recipe, overrides: Sequence[str], world: World) -> int:
    """Train, or continue: the same call after a crash goes on from the newest intact checkpoint. Returns the exit code.

    Every rank calls it. Raises ``UserError`` for what can be mended; ``run_state.json`` says how the run ended.
    """
    run = RunFolder(Path(recipe.output_dir))
    with ExitStack() as stack:
        _together(world, lambda: stack.enter_context(run.held()) if world.rank == 0 else None)
        inputs = resolve(recipe, world.dp_size)
        found, notes = world.from_first(_choose(run, inputs) if world.rank == 0 else None)
        if isinstance(found, UserError):
            raise found
        raw, origin = read_deepspeed_json(recipe.deepspeed)
        plan = inputs.plan
        ds_config, ds_notes = compile_ds_config(
            recipe, raw, origin, micro_batch=plan.micro_batch, accumulation=plan.accumulation, dp=plan.dp
        )
        monitor = stack.enter_context(Monitor(run, inputs, world, resumed=found is not None))
        if world.rank == 0:
            describe_run(run, inputs, overrides, ds_config)
        for note in [*notes, *ds_notes]:
            monitor.note(note)
        stop = stack.enter_context(stop_requests())
        return _Run(run, inputs, ds_config, world, monitor, stop, found).go()


class _Run:
    """One start of a run: what the loop needs, assembled once."""

    def __init__(
        self,
        run: RunFolder,
        inputs: Inputs,
        ds_config: dict[str, Any],
        world: World,
        monitor: Monitor,
        stop: StopRequest,
        checkpoint: Path | None,
    ) -> None:
        self.run, self.inputs, self.recipe, self.plan = run, inputs, inputs.recipe, inputs.plan
        self.world, self.monitor, self.stop = world, monitor, stop
        torch.manual_seed(self.recipe.train.seed + world.rank)
        model = build_model(
            self.recipe.model,
            inputs.config,
            seed=self.recipe.train.seed,
            placement=parameter_placement(ds_config),
            gather=gather_parameter,
        )
        self.engine = Engine(self.recipe, model, ds_config, world)
        self.learning_rate = learning_rates(self.recipe.optim, self.plan.steps)
        self.evaluation: dict[str, float] = {}
        self.data, self.state = self._restore(checkpoint)
        self._compile()
        self.probe = inputs.sources[0].training[0].input_ids[:_PROBE_TOKENS]
        self.started_s = time.monotonic()

    def go(self) -> int:
        """The loop."""
        recipe, state = self.recipe, self.state
        if recipe.eval.eval_on_start and state.step == 0:
            self.evaluate(state)
        saved = state.step if state.step else None
        while state.step < self.plan.steps:
            state, row, stopping = self.step(state)
            self.monitor.row(row)
            if due(state.step, recipe.eval.eval_steps) or state.step == self.plan.steps:
                self.evaluate(state)
            if due(state.step, recipe.checkpoint.save_steps) or state.step == self.plan.steps or stopping:
                self.save(state)
                saved = state.step
            if stopping:
                return self.finish(state, *self.why(), saved)
        return self.finish(state, "completed", f"all {self.plan.steps} steps done", 0, saved)

    def step(self, state: State) -> tuple[State, dict[str, Any] | None, bool]:
        """One update; returns the next state, the row to log (on logged steps) and whether all ranks stop now."""
        began = time.perf_counter()
        plan, world = self.plan, self.world
        batches = list(
            self.data.micro_batches(
                state.position,
                end=plan.end,
                rank=world.dp_rank,
                size=world.dp_size,
                micro_batch=plan.micro_batch,
                accumulation=plan.accumulation,
            )
        )
        wanted = float(self.stop.requested or self.out_of_time())
        # One small all-reduce: the divisor of the loss, and whether anyone was asked to stop.
        targets, stopping = self.world.total([sum(batch.target_tokens for batch in batches), wanted]).tolist()
        data_s = time.perf_counter() - began
        rate = self.learning_rate(state.updates + 1)
        result = self.engine.optimizer_step([self.on_device(batch) for batch in batches], int(targets), rate)
        rows = min(plan.global_batch_size, plan.end - state.position)
        after = State(
            state.step + 1,
            state.position + rows,
            state.tokens + rows * plan.seq_len,
            state.updates + int(result.applied),
        )
        if not math.isfinite(result.grad_norm) and result.applied:
            self.diverged(state, batches, result.grad_norm)
        row = None
        if due(after.step, self.recipe.log.logging_steps) or after.step in (1, plan.steps):
            losses = self.losses_by_source(batches, result.row_losses)
            step_s = time.perf_counter() - began
            row = self.training_row(after, losses, targets, rows, step_s) | {
                "learning_rate": rate,
                "grad_norm": result.grad_norm,
                "skipped": not result.applied,
                "loss_scale": result.loss_scale,
                "data_time_s": round(data_s, 6),
            }
        return after, row, stopping > 0

    def on_device(self, batch: MicroBatch) -> Batch:
        device = self.world.device
        return Batch(batch.input_ids.to(device), batch.targets.to(device), batch.position_ids.to(device))

    def losses_by_source(self, batches: Sequence[MicroBatch], row_losses: Tensor) -> Tensor:
        """Summed loss and targets per source over all ranks, fp64 ``[2, sources]``."""
        count = len(self.inputs.sources)
        sums = torch.zeros(2, count, dtype=torch.float64)
        for batch, losses in zip(batches, row_losses.split(self.plan.micro_batch), strict=True):
            sums += sum_by_source(batch, losses, count)
        return self.world.total(sums)

    def training_row(self, state: State, losses: Tensor, targets: float, rows: int, step_s: float) -> dict[str, Any]:
        """The flat row of metrics.jsonl for one step."""
        sources = self.inputs.sources
        row: dict[str, Any] = {
            "step": state.step,
            "loss": float(losses[0].sum()) / max(targets, 1),
            "target_tokens": int(targets),
            "tokens": state.tokens,
            "position": state.position,
            "epoch": {name: round(value, 6) for name, value in self.data.mixture.epochs_at(state.position).items()},
            "tokens_per_second": round(rows * self.plan.seq_len / step_s, 3),
            "step_time_s": round(step_s, 6),
            "checkpoint_time_s": round(self.monitor.take_checkpoint_time(), 6),
            "mfu": None,
            "memory_bytes": memory_bytes(),
        }
        if len(sources) > 1:
            for number, source in enumerate(sources):
                if losses[1, number] > 0:
                    row[f"loss/{source.name}"] = float(losses[0, number] / losses[1, number])
                    row[f"target_tokens/{source.name}"] = int(losses[1, number])
        return row

    def evaluate(self, state: State) -> None:
        """Every validation row once, over all ranks; neither weights nor the data's position change."""
        held_out = [(n, source) for n, source in enumerate(self.inputs.sources) if source.validation is not None]
        if not held_out:
            return
        world, settings = self.world, self.recipe.eval
        began = time.perf_counter()

        def batches() -> Iterator[MicroBatch]:
            for number, source in held_out:
                assert source.validation is not None
                yield from validation_batches(
                    source.validation,
                    number,
                    max_rows=settings.max_rows,
                    rank=world.dp_rank,
                    size=world.dp_size,
                    micro_batch=settings.per_device_eval_batch_size or self.plan.micro_batch,
                )

        overall, each = score(
            batches(),
            lambda batch: self.engine.row_losses(self.on_device(batch)),
            world.total,
            [source.tokens_per_byte for source in self.inputs.sources],
        )
        row = score_row(overall, [source.name for source in self.inputs.sources], each)
        self.evaluation = {key: value for key, value in row.items() if isinstance(value, float)}
        self.monitor.row({"event": "eval", "step": state.step, **row, "seconds": time.perf_counter() - began})

    def save(self, state: State) -> None:
        """Write a checkpoint and drop the oldest beyond the limit."""
        began = time.perf_counter()
        evaluated = {key: value for key, value in self.evaluation.items() if "/" not in key}
        trainer = {
            "step": state.step,
            "position": state.position,
            "tokens": state.tokens,
            "updates": state.updates,
            "precision": self.recipe.train.precision,
            "recipe": recipe_yaml(self.recipe),
            "sources": [{"name": n, "epochs": e} for n, e in self.data.mixture.epochs_at(state.position).items()],
            "evaluation": evaluated,
        }
        path = save_checkpoint(
            self.run.path,
            self.engine,
            self.world,
            step=state.step,
            trainer=trainer,
            data=data_record(self.data, self.inputs.sources, state.position),
            probe=torch.from_numpy(self.probe)[None].to(self.world.device),
        )
        if self.world.rank == 0:
            prune(self.run.path, self.recipe.checkpoint.save_total_limit)
        self.monitor.checkpoint(state.step, path, time.perf_counter() - began)
        self.monitor.status(state, "running", "", None, path.name)

    def finish(self, state: State, status: str, reason: str, exit_code: int, saved: int | None) -> int:
        """Export a completed run, and write down how it ended."""
        last = folder_name(saved) if saved is not None else None
        if status == "completed" and self.world.rank == 0:
            assert last is not None
            export = export_checkpoint(self.run.path / last, self.run, self.run.final)
            self.monitor.note(
                f"exported {format_count(export.parameters)} parameters to {export.path}, largest difference of a logit "
                f"{export.max_logit_difference:.2g}"
            )
        self.monitor.status(state, status, reason, exit_code, last)
        self.monitor.row({"event": "stop", "step": state.step, "status": status, "reason": reason})
        self.world.barrier()
        return exit_code

    def why(self) -> tuple[str, str, int]:
        """Status, reason and exit code of a run that stops before its end; all ranks agree on a signal if any saw one."""
        signals = [name for name in self.world.gather(self.stop.signal_name) if name]
        if signals:
            return "preempted", f"{signals[0]}: saved and stopped, the same command continues", PREEMPTED
        return "stopped", f"train.max_time {self.recipe.train.max_time:g} s is over, the same command continues", 0

    def out_of_time(self) -> bool:
        limit_s = self.recipe.train.max_time
        return limit_s is not None and time.monotonic() - self.started_s > limit_s

    def diverged(self, state: State, batches: Sequence[MicroBatch], grad_norm: float) -> None:
        rows = [
            f"{self.inputs.sources[place.source].name} row {place.row}"
            for batch in batches
            for place in batch.places
            if place.source >= 0
        ]
        raise UserError(
            f"step {state.step + 1}: the gradient's norm is {grad_norm}, so the weights are lost; this rank's rows were "
            f"{', '.join(rows[:8])}{' …' if len(rows) > 8 else ''}",
            "The last checkpoint is intact. Lower optim.learning_rate, or look at these rows with `arriero data show`.",
            exit_code=1,
        )

    def _restore(self, checkpoint: Path | None) -> tuple[TrainingData, State]:
        sources, seed = self.inputs.sources, self.recipe.train.seed
        if checkpoint is None:
            return TrainingData(sources, seed=seed), State()
        trainer, record = read_json(checkpoint, "trainer_state.json"), read_json(checkpoint, "data_state.json")
        state = State(*(trainer[key] for key in ("step", "position", "tokens", "updates")))
        load_state(checkpoint, self.engine, updates=state.updates)
        note = load_random_state(checkpoint, self.world, seed=seed)
        self.evaluation = dict(trainer["evaluation"])
        self.monitor.resumed(state, checkpoint, note)
        return TrainingData(sources, seed=seed, start=data_start(record, sources)), state

    def _compile(self) -> None:
        choice = self.recipe.train.torch_compile
        if choice is True or (choice == "auto" and self.world.device.type == "cuda"):
            self.engine.compile_layers()


class Monitor:
    """Everything that rank 0 shows and writes down; on the other ranks it does nothing."""

    def __init__(self, run: RunFolder, inputs: Inputs, world: World, *, resumed: bool) -> None:
        self._run, self._inputs, self._world, self._resumed = run, inputs, world, resumed
        self._active = world.rank == 0
        self._checkpoint_s = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._active:
            plan, recipe = self._inputs.plan, self._inputs.recipe
            log = self._run.log(0)
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._stack.enter_context(log.open("a", encoding="utf-8"))
            self._metrics = self._stack.enter_context(MetricsFile(self._run.metrics))
            self._tensorboard: TensorBoardSink | None = None
            title = (
                f"{self._run.path.name} · {format_count(plan.parameters)} parameters · "
                f"{format_count(plan.steps * plan.tokens_per_step)} tokens · {self._world.size} "
                f"rank{'s' if self._world.size > 1 else ''} · ZeRO-{recipe.parallel.zero_stage} · "
                f"{recipe.train.precision}"
            )
            self._progress = self._stack.enter_context(Progress(plan.steps, title=title))
            if self._metrics.torn_bytes:
                self.note(f"metrics.jsonl: cut off {self._metrics.torn_bytes} bytes of an unfinished last line")
            if not self._resumed:
                self._open_tensorboard(None)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def row(self, row: Mapping[str, Any] | None) -> None:
        """A training row or an event, to metrics.jsonl, TensorBoard and the terminal."""
        if not self._active or row is None:
            return
        self._metrics.write(row)
        if self._tensorboard is not None:
            self._tensorboard.write(row)
        if "event" in row:
            self._progress.event(row)
        else:
            self._progress.train_row(row)

    def note(self, text: str) -> None:
        if self._active:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
            self._progress.note(text)

    def resumed(self, state: State, checkpoint: Path, note: str | None) -> None:
        """Mark that a run goes on from a checkpoint."""
        if self._active:
            self._open_tensorboard(state.step + 1)
        self.row({"event": "resume", "step": state.step, "checkpoint": checkpoint.name})
        if note:
            self.note(note)

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self._checkpoint_s += seconds
        self.row({"event": "checkpoint", "step": step, "path": path.name, "seconds": round(seconds, 6)})

    def take_checkpoint_time(self) -> float:
        """Seconds spent on checkpoints since the last logged step."""
        spent, self._checkpoint_s = self._checkpoint_s, 0.0
        return spent

    def status(self, state: State, status: str, reason: str, exit_code: int | None, checkpoint: str | None) -> None:
        if self._active:
            self._run.write_state(
                status=status,
                reason=reason,
                step=state.step,
                tokens=state.tokens,
                last_checkpoint=checkpoint,
                exit_code=exit_code,
            )

    def _open_tensorboard(self, purge_step: int | None) -> None:
        if "tensorboard" in self._inputs.recipe.log.report_to:
            sink = TensorBoardSink(self._run.tensorboard, purge_step=purge_step, tell=self.note)
            self._tensorboard = self._stack.enter_context(sink)


class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def requested(self) -> bool:
        return self.signal_name is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """SIGTERM, SIGUSR1 and the first SIGINT ask for a stop at the next step; a second SIGINT ends the process at once."""
    request = StopRequest()

    def ask(number: int, frame: Any) -> None:
        request.signal_name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def score_row(overall: Score, names: Sequence[str], each: Sequence[Score | None]) -> dict[str, Any]:
    """An evaluation by the keys of metrics.jsonl."""
    row = _score_keys(overall, "")
    if len(names) > 1:
        for name, one in zip(names, each, strict=True):
            row |= _score_keys(one, f"/{name}") if one else {}
    return row


def _score_keys(one: Score, suffix: str) -> dict[str, Any]:
    row: dict[str, Any] = {f"eval_loss{suffix}": one.loss, f"eval_perplexity{suffix}": one.perplexity}
    if one.bits_per_byte is not None:
        row[f"eval_bits_per_byte{suffix}"] = one.bits_per_byte
    return row | {f"eval_target_tokens{suffix}": one.target_tokens}


def data_record(data: TrainingData, sources: Sequence[Source], position: int) -> dict[str, Any]:
    """The data's state as a checkpoint keeps it: what was taken, and the mixture that it was taken by."""
    now, start = data.mixture.state_at(position), data.mixture.start
    return {
        "position": now.position,
        "taken": dict(now.taken),
        "start": {"position": start.position, "taken": dict(start.taken)},
        "sources": [_source_record(source) for source in sources],
    }


def _source_record(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "fingerprint": source.dataset.fingerprint,
        "rows": len(source.training),
        "weight": source.weight,
        "max_epochs": source.max_epochs,
    }


def data_start(record: Mapping[str, Any], sources: Sequence[Source]) -> DataState:
    """Where the order goes on: by the same plan if the mixture is the same, else anew from what has been taken.

    Raises ``UserError`` where a dataset has changed under the run.
    """
    before = {entry["name"]: entry for entry in record["sources"]}
    now = [_source_record(source) for source in sources]
    for entry in now:
        old = before.get(entry["name"])
        if old and old["fingerprint"] != entry["fingerprint"]:
            raise UserError(
                f"the dataset {entry['name']!r} has changed since the checkpoint was written: fingerprint "
                f"{old['fingerprint']} then, {entry['fingerprint']} now",
                "Put the old dataset back, or give the new one another name in data.sources.",
            )
    if now == record["sources"]:
        return DataState(**record["start"])
    return DataState(record["position"], record["taken"])


def _choose(run: RunFolder, inputs: Inputs) -> tuple[Path | UserError | None, list[str]]:
    """The checkpoint to continue from, decided on rank 0; an error travels to the other ranks as a value."""
    try:
        notes = check_same_run(run, inputs.recipe)
        checkpoint, more = choose_checkpoint(run.path, inputs.recipe.checkpoint.resume_from_checkpoint)
        if checkpoint is not None:
            data_start(read_json(checkpoint, "data_state.json"), inputs.sources)
    except UserError as error:
        return error, []
    return checkpoint, [*notes, *more]


def check_same_run(run: RunFolder, recipe: Recipe) -> list[str]:
    """Notes on what has changed since the last start; ``UserError`` where the folder belongs to another run."""
    if not run.config.is_file():
        return []
    changes = differing_keys(parse_yaml(run.config.read_text(encoding="utf-8")), recipe.model_dump(mode="json"))
    foreign = [change for change in changes if change[0].startswith(_IDENTITY)]
    if foreign:
        listed = "\n".join(f"  {path}: {old!r} in the folder, {new!r} in the recipe" for path, old, new in foreign)
        raise UserError(
            f"{run.path} belongs to another run:\n{listed}",
            "Give this recipe another output_dir, or set these keys back to continue the old run.",
        )
    return [f"changed since the last start: {path} {old!r} → {new!r}" for path, old, new in changes]


def describe_run(run: RunFolder, inputs: Inputs, overrides: Sequence[str], ds_config: Mapping[str, Any]) -> None:
    """Write what the run is: recipe, overrides, DeepSpeed's dictionary, versions, and the model without its weights."""
    import json

    replace_text(run.config, recipe_yaml(inputs.recipe))
    replace_text(run.path / "overrides.txt", "".join(f"{line}\n" for line in overrides))
    replace_text(run.path / "ds_config.json", json.dumps(ds_config, indent=2) + "\n")
    replace_text(run.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
    inputs.config.save_pretrained(run.model)
    write_tokenizer_files(inputs, run.model)


def write_tokenizer_files(inputs: Inputs, folder: Path) -> None:
    """Tokenizer and generation files, unchanged where they come from a folder."""
    import shutil

    from transformers import GenerationConfig

    model = inputs.recipe.model
    name = model.tokenizer or model.model_name_or_path
    assert name is not None
    files = [path for path in Path(name).glob("*") if is_tokenizer_file(path)] if Path(name).is_dir() else []
    if any(path.name == "tokenizer.json" for path in files):
        for path in files:
            shutil.copyfile(path, folder / path.name)
    else:
        inputs.tokenizer.save_pretrained(folder)
    base = Path(model.model_name_or_path or "") / "generation_config.json"
    if model.model_name_or_path and base.is_file():
        shutil.copyfile(base, folder / base.name)
    else:
        config = inputs.config
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ).save_pretrained(folder)


def is_tokenizer_file(path: Path) -> bool:
    """Whether a file of a Hugging Face folder belongs to the tokenizer."""
    names = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template")
    return path.is_file() and path.name.startswith(names)


def environment() -> dict[str, Any]:
    """Versions and the machine, without names, addresses or variables that may hold secrets."""
    import platform
    from importlib.metadata import version

    packages = ("arriero", "torch", "deepspeed", "transformers", "tokenizers", "gigatoken", "safetensors", "numpy")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {name: version(name) for name in packages},
    }


def memory_bytes() -> int:
    """Peak memory of this rank: allocated on its GPU, or resident on a CPU."""
    import resource

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _together(world: World, work: Any) -> None:
    """Run something that may fail on one rank, and fail on all if it did."""
    problem: UserError | None = None
    try:
        work()
    except UserError as error:
        problem = error
    first = next((other for other in world.gather(problem) if other is not None), None)
    if first is not None:
        raise first
