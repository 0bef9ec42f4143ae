"""DeepSpeed's operations that are compiled at first use: built once on a host, before any rank waits for another."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from arriero.config.schema import Recipe
from arriero.doctor.building import build_turn, compiler_check, libaio_check
from arriero.doctor.finding import Check
from arriero.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's own imports warn about torch's deprecations
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

logger = logging.getLogger(__name__)

# Loading one builds another first.
_BUILT_WITH = {"async_io": ("pin_memory", "async_io")}


def needed_ops(recipe: Recipe) -> list[Any]:
    """Builders of what the recipe needs compiled: nothing without offload."""
    parallel = recipe.parallel
    needed = [CPUAdamBuilder()] if parallel.offload_optimizer != "none" else []
    if "nvme" in (parallel.offload_optimizer, parallel.offload_param):
        needed.append(AsyncIOBuilder())
    return needed


def build_ops(recipe: Recipe) -> None:
    """Build and load what the recipe needs; ``UserError`` where the machine can't, naming the package that is missing.

    One process of a host at a time: the first compiles (45 s for the optimizer on two cores, 3 minutes for NVMe), those
    behind it find the library there. They wait for a file lock, not in a collective, so nothing times out meanwhile.
    """
    if recipe.optim.optimizer == "muon" and not (check := compiler_check()).ok:
        raise UserError(
            f"optim.optimizer muon needs torch.compile, and nothing can be compiled here: {check.detail}",
            f"{check.remedy}\nOr use optim.optimizer adamw.",
        )
    for builder in needed_ops(recipe):
        build_op(builder, _wanted_by(recipe))


def build_op(builder: Any, wanted_by: str) -> None:
    """Build and load one operation, in turn; ``UserError`` with what is missing, and ``wanted_by``."""
    if not installed_ops.get(builder.name, False):  # built when DeepSpeed was installed: nothing to compile
        missing = [check for check in _requirements(builder) if not check.ok]
        if missing:
            raise UserError(
                f"{wanted_by} needs DeepSpeed's {builder.name}, which is compiled on first use, and that can't be done "
                "here: " + "; ".join(check.detail for check in missing),
                "\n".join([*(check.remedy for check in missing), "Or set the offload keys to none."]),
            )
    with build_turn(_BUILT_WITH.get(builder.name, (builder.name,))) as said:
        for line in said:
            logger.warning("%s", line)
        try:
            builder.load(verbose=False)
        except Exception as error:
            raise UserError(
                f"DeepSpeed's {builder.name} could not be compiled: {str(error).strip().splitlines()[-1]}",
                f"{wanted_by} needs it. `arriero doctor` checks compiler and libraries.",
            ) from error


def _requirements(builder: Any) -> list[Check]:
    checks = [compiler_check()]
    return [*checks, libaio_check()] if isinstance(builder, AsyncIOBuilder) and checks[0].ok else checks


def _wanted_by(recipe: Recipe) -> str:
    parallel = recipe.parallel
    wanted = {
        "parallel.offload_optimizer": parallel.offload_optimizer,
        "parallel.offload_param": parallel.offload_param,
    }
    return " and ".join(f"{key} {device}" for key, device in wanted.items() if device != "none")
