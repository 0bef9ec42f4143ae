"""One rank of a self-test whose engine has been given a fault. Not a test file itself.

torchrun --nproc-per-node N tests/integration/check_worker.py RECIPE OUT.json FAULT
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")

from arriero.engine.parallel import join_world, leave_world

world = join_world()

from arriero import check
from arriero.config.load import load_recipe
from arriero.engine.engine import Engine
from arriero.model.build import PretrainModel

step, forward = Engine.optimizer_step, PretrainModel.forward


def twice_the_gradient(engine: Engine, batches: Any, target_tokens: int, learning_rate: float) -> Any:
    return step(engine, batches, target_tokens // 2, learning_rate)


def own_rows_only(engine: Engine, batches: Any, target_tokens: int, learning_rate: float) -> Any:
    """Divide by this rank's targets and not by all ranks': right only where they are equally many."""
    mine = sum(int((batch.targets != -100).sum()) for batch in batches)
    return step(engine, batches, max(1, mine * world.size), learning_rate)


def one_document(model: PretrainModel, input_ids: Any, targets: Any, position_ids: Any) -> Any:
    plain = position_ids.new_tensor(range(position_ids.shape[1])).expand_as(position_ids)
    return forward(model, input_ids, targets, plain)


fault = sys.argv[3]
if fault == "twice":
    Engine.optimizer_step = twice_the_gradient
elif fault == "own rows":
    Engine.optimizer_step = own_rows_only
elif fault == "leak":
    PretrainModel.forward = one_document
found = check.check_layouts(load_recipe(sys.argv[1]), world, 8)
if world.rank == 0:
    Path(sys.argv[2]).write_text(json.dumps([asdict(one) for one in found]))
world.barrier()
leave_world()
os._exit(0)
