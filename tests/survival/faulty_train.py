"""One rank that trains recipes whose loss goes wrong at given positions. Not a test file itself.

torchrun --nproc-per-node N tests/survival/faulty_train.py CASES.json OUT.json

CASES: a list of {"recipe": path, "faults": {position: factor}, "memory_share": s}; the loss of a micro-batch that holds the position is
multiplied by the factor ("nan" too), as a broken kernel or a bad row would. A checkpoint's copy may take that share of
the memory that is free; 0: none.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")

from arriero.engine.parallel import join_world, leave_world

world = join_world()

from arriero import training
from arriero.checkpoint import save
from arriero.config.load import load_recipe
from arriero.errors import UserError
from arriero.model.build import PretrainModel

faults: dict[int, float] = {}
wrong: dict[int, float] = {}
forward, on_device = PretrainModel.forward, training.on_device


def marked(batch: Any, world: Any) -> Any:
    sent = on_device(batch, world)
    wrong.pop(sent.input_ids.data_ptr(), None)
    for place in batch.places:
        if place.position in faults:
            wrong[sent.input_ids.data_ptr()] = faults[place.position]
    return sent


def faulty(model: Any, input_ids: Any, targets: Any, position_ids: Any) -> Any:
    out = forward(model, input_ids, targets, position_ids)
    factor = wrong.get(input_ids.data_ptr()) if model.training else None
    return out if factor is None or targets is None else tuple(part * factor for part in out)


training.on_device, PretrainModel.forward = marked, faulty
outcomes = []
for case in json.loads(Path(sys.argv[1]).read_text()):
    faults = {int(position): float(factor) for position, factor in case["faults"].items()}
    save._MEMORY_SHARE = case["memory_share"]
    try:
        outcomes.append({"code": training.train(load_recipe(case["recipe"]), [], world), "error": ""})
    except UserError as error:
        outcomes.append({"code": error.exit_code, "error": str(error)})
if world.rank == 0:
    Path(sys.argv[2]).write_text(json.dumps(outcomes))
world.barrier()
leave_world()
os._exit(0)
