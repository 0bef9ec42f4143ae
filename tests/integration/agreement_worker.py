"""One of two ranks that see different things. Not a test file itself.

torchrun --nproc-per-node 2 tests/integration/agreement_worker.py RECIPE OTHER_DATASET OUT
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")

from arriero.engine.parallel import join_world, leave_world

world = join_world()

from arriero import agreement
from arriero.config.load import load_recipe
from arriero.errors import UserError
from arriero.resolve import resolve

agreement._PATIENCE_S = 0.3
path, other, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def recipe(*overrides: str) -> Any:
    return load_recipe(path, overrides)


def mine(overrides: str) -> Any:
    """The recipe, which is another one on rank 1."""
    return recipe(*([overrides] if world.rank else []))


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return "nothing"


shared, own = out.parent / "shared", out.parent / f"own-{world.rank}"
for folder in (shared, own):
    folder.mkdir(exist_ok=True)
os.chdir(own)  # where a relative path means another file on each rank
Path("ds.json").write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 1_000_000 + world.rank}}))
other_data, no_data = f"data.sources.0.path={other}", "data.sources.0.path=/nowhere"
found = {
    "alike": said(lambda: agreement.check_view(world, recipe(), shared)),
    "recipe": said(lambda: agreement.check_view(world, mine("optim.learning_rate=2e-3"), shared)),
    "folder": said(lambda: agreement.check_view(world, recipe(), own)),
    "inputs alike": said(lambda: agreement.check_inputs(world, resolve(recipe(), 2))),
    "data": said(lambda: agreement.check_inputs(world, resolve(mine(other_data), 2))),
    "missing on one": said(lambda: agreement.on_all(world, lambda: resolve(mine(no_data), 2))),
    "missing on both": said(lambda: agreement.on_all(world, lambda: resolve(recipe(no_data), 2))),
    "deepspeed": said(lambda: agreement.check_inputs(world, resolve(recipe("deepspeed=ds.json"), 2))),
    "left": ", ".join(path.name for path in shared.iterdir()),
}
(out.parent / f"{out.name}-{world.rank}").write_text(json.dumps(found))
leave_world()
os._exit(0)  # as `arriero train` ends its ranks: taking the interpreter down aborts now and then
