"""Ranks on a CPU that is told it computes fp16: it does, at a few hundred tokens a second. Not a test file itself.

torchrun --nproc-per-node N tests/parity/fp16_worker.py train RECIPE …    as ``arriero train``
torchrun --nproc-per-node N tests/parity/fp16_worker.py scales OUT.json   a growing loss scale against fixed ones
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from arriero.engine.parallel import choose_accelerator

choose_accelerator()

import deepspeed

deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def scales(out: Path) -> None:
    """Five steps at stages 1 and 3 with a fixed scale, and with one that doubles after every second step.

    Scales are powers of two, so gradients are the same numbers but for those that a small scale loses.
    """
    import torch
    from engine_worker import GLOBAL_BATCH, STEPS, build, full_state, make_recipe, run_steps, world

    from arriero.engine.ds_config import compile_ds_config
    from arriero.engine.engine import Engine

    found: dict[str, Any] = {}
    for stage in (1, 3):
        recipe = make_recipe(stage=stage, precision="fp16", micro=2)
        # Clipping divides by the norm itself and would hide a wrong scale.
        recipe = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"max_grad_norm": 0.0})})
        accumulation = GLOBAL_BATCH // (2 * world.size)
        masters = {}
        for kind, fp16 in (
            ("fixed", {"loss_scale": 65536.0}),
            ("growing", {"initial_scale_power": 14, "loss_scale_window": 2}),
        ):
            ds_config, _ = compile_ds_config(
                recipe, {"fp16": fp16}, "test", micro_batch=2, accumulation=accumulation, dp=world.size
            )
            engine = Engine(recipe, build(recipe, ds_config), ds_config, world)
            losses, norms = run_steps(engine, recipe, 2, accumulation, 1, STEPS)
            masters[kind] = {key: value for key, value in full_state(engine).items() if key.endswith("/master")}
            scale = engine.loss_scale_state().get("cur_scale")
            found[f"{kind} {stage}"] = {"losses": losses, "norms": norms, "scale": scale}
            tables = [b for name, b in engine._engine.module.named_buffers() if "inv_freq" in name]
            found[f"{kind} {stage}"]["tables"] = [str(table.dtype) for table in tables]
        apart = [(masters["fixed"][key] - masters["growing"][key]).abs().mean() for key in masters["fixed"]]
        found[f"apart {stage}"] = float(torch.stack(apart).mean())
    if world.rank == 0:
        out.write_text(json.dumps(found))
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "scales":
        scales(Path(sys.argv[2]))
    from arriero.__main__ import main

    sys.argv[0] = "arriero"
    main()
