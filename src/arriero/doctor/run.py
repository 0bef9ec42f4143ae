"""Every check, in the order in which they are best read."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from arriero.doctor.building import compiler_check, cuda_check, extension_folders, jit_lock_check, libaio_check
from arriero.doctor.children import CHILD_LIMIT_S, GLOO, IMPORTS, Answers, Child
from arriero.doctor.devices import torch_checks
from arriero.doctor.finding import Check
from arriero.doctor.machine import (
    disk_check,
    launcher_variables_check,
    locked_memory_check,
    machine_check,
    needs_locked_memory,
    open_files_check,
    openmp_check,
    processes_check,
    python_check,
    shared_memory_check,
    usable_cores,
)
from arriero.doctor.network import GLOO_LIMIT_S, gloo_check, host_name_check, rendezvous_check
from arriero.doctor.packages import (
    NAMED,
    bad_pair_check,
    conflict_check,
    installed_versions,
    module_of,
    own_requirements,
    package_checks,
)
from arriero.doctor.recipe import DRY_RUN, DRY_RUN_LIMIT_S, dry_run_checks, read_recipe


def run_checks(recipe_path: Path | None = None) -> list[Check]:
    """Every check; about five seconds, and with a recipe, whose dry run is made, about ten.

    With a recipe, also whether it could run here: its inputs, its layout, precision, memory, and room for its checkpoints.
    """
    requirements = own_requirements()
    modules = [module for module, _ in NAMED.values()]
    modules += [module_of(name) for name in requirements if name not in NAMED]
    recipe, recipe_checks = read_recipe(recipe_path)
    children = [Child(IMPORTS, *modules), Child(GLOO)]
    if recipe is not None:
        children.append(Child(DRY_RUN, str(recipe_path)))
    try:
        installed, cores = installed_versions(), usable_cores()
        answers = Answers(*children[0].result(CHILD_LIMIT_S))
        facts = answers.torch
        answer: dict[str, Any] = {}
        if recipe is not None:
            more, answer = dry_run_checks(*children[2].result(DRY_RUN_LIMIT_S), facts)
            recipe_checks += more
        checkpoint_bytes = 12 * answer["parameters"] if answer else None  # fp32 masters and two moments
        return [
            python_check(),
            *package_checks(requirements, installed, answers.errors),
            conflict_check(installed),
            bad_pair_check(installed),
            machine_check(cores),
            *torch_checks(facts, recipe),
            compiler_check(recipe),
            *([cuda_check(facts, recipe)] if facts is not None else []),
            libaio_check(recipe),
            jit_lock_check(extension_folders(os.environ)),
            gloo_check(*children[1].result(GLOO_LIMIT_S), os.environ),
            host_name_check(os.environ),
            rendezvous_check(os.environ),
            launcher_variables_check(os.environ),
            openmp_check(os.environ, cores=cores),
            shared_memory_check(Path("/dev/shm")),
            open_files_check(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            processes_check(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
            locked_memory_check(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], needed_for=needs_locked_memory(recipe)),
            disk_check(Path(recipe.output_dir) if recipe else Path.cwd(), checkpoint_bytes),
            *recipe_checks,
        ]
    finally:
        for child in children:
            child.stop()
