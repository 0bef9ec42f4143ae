"""Tasks of EleutherAI's lm-eval, run in this process on an exported model; tasks of one's own from a folder, offline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import torch

from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError

# Resamplings behind a standard error that has no formula, of perplexities say; lm-eval's own 100,000 take minutes.
_BOOTSTRAPS = 1_000


def run_tasks(
    folder: Path, tasks: Sequence[str], *, task_folder: Path | None, max_rows: int | None, batch_size: int
) -> dict[str, dict[str, float]]:
    """Scores of a Hugging Face folder by task and metric, each with its ``…_stderr`` where it has one.

    task_folder: of lm-eval's YAML files; only its tasks are known then, and files that they name are looked for in it.
    None: lm-eval's own tasks, whose data comes from the hub. max_rows: questions of each task. Raises ``UserError``
    without the extra, for a task that isn't known, and where its data can't be had.
    """
    folder = folder.absolute()
    if task_folder is not None and not task_folder.is_dir():
        raise UserError(
            f"--task-folder {task_folder}: there is no such folder", "Give the folder of the tasks' YAML files."
        )
    lm_eval, HFLM, TaskManager = _harness()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that is handed over, which is meant
    manager = (
        TaskManager()
        if task_folder is None
        else TaskManager(include_path=str(task_folder.absolute()), include_defaults=False)
    )
    _check_names(tasks, manager.all_tasks, task_folder)
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(device)
    judged = HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=batch_size)
    with chdir(task_folder) if task_folder is not None else nullcontext():
        try:
            answer = lm_eval.simple_evaluate(
                model=judged,
                tasks=list(tasks),
                task_manager=manager,
                limit=max_rows,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
            )
        except (OSError, ValueError, KeyError, AttributeError) as error:  # what a task's YAML or its data leads to
            raise UserError(
                f"lm-eval could not run {', '.join(tasks)}: {type(error).__name__}: {str(error).splitlines()[0][:300]}",
                "Its tasks fetch their data from the hub; with --task-folder yours can name files beside them.",
                exit_code=1,
            ) from error
    return {name: _metrics(values) for name, values in answer["results"].items()}


def _harness() -> tuple[Any, Any, Any]:
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"--tasks needs lm-eval, and it can't be imported: {error}", "pip install 'arriero[eval]'"
        ) from None
    return lm_eval, HFLM, TaskManager


def _check_names(tasks: Sequence[str], known: Sequence[str], task_folder: Path | None) -> None:
    """Also a group and a tag is a name; without a check lm-eval fails far inside."""
    unknown = [name for name in tasks if name not in known]
    if unknown:
        where = f"in {task_folder}" if task_folder is not None else "in lm-eval"
        some = ", ".join(sorted(known)[:20]) if task_folder is not None else "see `lm-eval ls tasks`"
        raise UserError(f"--tasks: there is no task {', '.join(unknown)} {where}", f"Known: {some or 'none'}.")


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """lm-eval's ``acc,none`` is acc; the answer filter is kept where a task has one. Its counts are no scores."""
    found = {}
    for name, value in values.items():
        metric, _, answers = name.partition(",")
        if isinstance(value, int | float) and metric != "sample_len" and not isinstance(value, bool):
            found[metric if answers in ("", "none") else name] = float(value)
    return found
