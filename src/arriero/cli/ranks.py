"""What every command does that runs as ranks: join the others, do the work, end the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.errors import UserError
from arriero.run_folder import RunFolder

if TYPE_CHECKING:
    from arriero.engine.parallel import World


def count_ranks(text: str, *, on_cpu: int = 1) -> int:
    """``--nproc``: a number, or auto: one per GPU, or ``on_cpu`` where there is none."""
    if text == "auto":
        from arriero.launch.local import default_nproc

        return default_nproc(on_cpu)
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--nproc {text}: expected auto or a number of ranks")
    return int(text)


def be_rank(work: Callable[[World], int], run: RunFolder | None) -> None:
    """Be one rank: join the others and do ``work``, which gives the exit code. Never returns.

    run: where failures and the output of all ranks but the first are written; None: nowhere. It ends the process
    itself: after everything is written, the interpreter's own end aborts one run in four here, when a communication
    thread is torn down.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    from arriero.launch.local import agent_code, begin_attempt, end_with_launcher

    end_with_launcher()
    begin_attempt()
    code = 1
    try:
        code = record(_joined)(work, run) or 0
    except BaseException:  # noqa: BLE001 - whatever it was, it is shown and the process ends
        _show_failure(run)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(agent_code(code))


def _joined(work: Callable[[World], int], run: RunFolder | None) -> int:
    import warnings

    warnings.filterwarnings("ignore", module=r"torch|deepspeed|transformers")
    from arriero.engine.parallel import join_world, leave_world
    from arriero.launch.local import leave_outcome

    world = join_world()
    if world.rank > 0 and run is not None:
        _to_log(run.log(world.rank))
    try:
        code = work(world)
    except UserError as error:
        if world.rank == 0 and run is not None and error.exit_code != 2:
            run.write_failure(error.problem.split("\n")[0], error.exit_code)
        leave_outcome(error.exit_code, str(error))
        return error.exit_code
    leave_world()
    return code


def _to_log(path: Path) -> None:
    """Send this rank's output, that of libraries included, to its log: the terminal is rank 0's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


def _show_failure(run: RunFolder | None) -> None:
    """The traceback to the terminal, or to rank 0's log where the process that started the ranks will show the first
    error last; the reason to ``run_state.json``."""
    import traceback

    from arriero.launch.local import OUTCOME_VARIABLE

    first = os.environ.get("RANK") == "0"
    if first and run is not None and run.read_state().get("status") == "running":
        run.write_failure(f"rank 0 failed: {traceback.format_exc().strip().splitlines()[-1]}", 1)
    if first and run is not None and OUTCOME_VARIABLE in os.environ and run.log(0).is_file():
        with run.log(0).open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    else:
        traceback.print_exc()
