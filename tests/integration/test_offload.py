"""Offload as a person uses it: said before training where it can't be, and a resume that goes on bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from workshop import Workshop, arriero, metrics

from arriero.doctor.building import compiler_check


def test_a_missing_compiler_is_said_before_training(workshop: Workshop, tmp_path: Path) -> None:
    recipe = workshop.recipe("no-compiler", parallel={"zero_stage": 2, "offload_optimizer": "cpu"})
    done = arriero("train", recipe, check=False, CXX=str(tmp_path / "none"))
    assert done.returncode == 2
    assert "parallel.offload_optimizer cpu needs DeepSpeed's cpu_adam, which is compiled on first use" in done.stderr
    assert "apt-get install g++" in done.stderr or "unset CXX" in done.stderr
    assert not workshop.run("no-compiler").joinpath("metrics.jsonl").exists()
    doctor = arriero("doctor", recipe, "--json", check=False, CXX=str(tmp_path / "none"))
    check = next(one for one in json.loads(doctor.stdout)["checks"] if one["name"] == "c++ compiler")
    assert not check["ok"]
    assert doctor.returncode == 1


def test_kernels_that_are_missing_are_said_before_training(workshop: Workshop) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels are here")
    recipe = workshop.recipe(
        "quantized", parallel={"zero_stage": 3}, deepspeed={"zero_optimization": {"zero_quantized_weights": True}}
    )
    done = arriero("train", recipe, check=False)
    assert done.returncode == 2
    assert "zero_quantized_weights: DeepSpeed quantizes on CUDA devices only" in done.stderr


@pytest.mark.skipif(not compiler_check().ok, reason=f"optimizer offload needs a compiler: {compiler_check().detail}")
def test_an_offloaded_run_goes_on_bit_for_bit(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "offloaded",
        train={"precision": "bf16", "max_steps": 8},
        parallel={"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    )
    run = workshop.run("offloaded")
    arriero("train", recipe, "--nproc", 2)
    losses = [row["loss"] for row in metrics(run) if "event" not in row]
    final = load_file(run / "final/model.safetensors")
    assert losses[-1] < losses[0] - 0.1
    for name in ("checkpoint-8", "final"):
        shutil.rmtree(run / name)
    arriero("train", recipe, "--nproc", 2)
    assert [row["loss"] for row in metrics(run) if "event" not in row][8:] == losses[4:]
    again = load_file(run / "final/model.safetensors")
    assert all(torch.equal(final[name], again[name]) for name in final)
