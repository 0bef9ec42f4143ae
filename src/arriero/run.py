"""Where a run stands and what one start of it is assembled from: what the loop and its helpers hand to one another."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from arriero.checkpoint.save import Saver
from arriero.checkpoint.saved import read_json
from arriero.config.schema import Recipe
from arriero.data.loader import TrainingData
from arriero.engine.engine import Engine
from arriero.engine.parallel import World
from arriero.engine.schedule import learning_rates
from arriero.launch.signals import StopRequest
from arriero.monitor.health import Health
from arriero.monitor.heartbeat import Heartbeat
from arriero.monitor.monitor import Monitor
from arriero.resolve import Inputs, Plan
from arriero.run_folder import RunFolder


@dataclass(frozen=True)
class State:
    """Where a run stands. All of it is in a checkpoint."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0
    """Updates that were applied: what the schedule and Adam count."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""
    health: Health = field(default_factory=Health)
    passed_over: tuple[tuple[int, int], ...] = ()
    """Positions [start, stop) whose rows a rollback left out."""
    rollbacks: int = 0
    """Times that the run went back since it last wrote a checkpoint."""

    @classmethod
    def saved(cls, checkpoint: Path) -> State:
        """The state in a checkpoint."""
        value = read_json(checkpoint, "trainer_state.json")
        known: dict[str, Any] = {field.name: value[field.name] for field in fields(cls)}
        health: dict[str, Any] = {
            key: tuple(item) if isinstance(item, list) else item for key, item in known["health"].items()
        }
        known["health"] = Health(**health)
        known["passed_over"] = tuple((int(start), int(stop)) for start, stop in known["passed_over"])
        return cls(**known)


@dataclass(frozen=True)
class Parts:
    """What one start of a run is assembled from."""

    folder: RunFolder
    inputs: Inputs
    world: World
    engine: Engine
    monitor: Monitor
    heart: Heartbeat
    saver: Saver
    stop: StopRequest
    started_s: float
    peak_flops: float | None
    """Of one rank's device in this precision; None where it isn't known."""

    @property
    def recipe(self) -> Recipe:
        return self.inputs.recipe

    @property
    def data(self) -> TrainingData:
        return self.inputs.data

    @property
    def plan(self) -> Plan:
        return self.inputs.plan

    def learning_rate(self, update: int) -> float:
        """Of update ``update``, counted from 1."""
        return learning_rates(self.recipe.optim, self.plan.steps)(update)


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def tell_status(parts: Parts, state: State, status: str, reason: str, exit_code: int | None) -> None:
    parts.monitor.status(status=status, reason=reason, step=state.step, tokens=state.tokens, exit_code=exit_code)
