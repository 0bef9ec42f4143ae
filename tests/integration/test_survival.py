"""Killed, stopped, failing and misused runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from workshop import Workshop, arriero, metrics

LONG = {"train": {"max_steps": 24, "precision": "bf16"}, "checkpoint": {"save_steps": 6, "save_total_limit": 9}}


def start(recipe: Path, nproc: int, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "arriero", "train", str(recipe), "--nproc", str(nproc)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def wait_for(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def last_step(run: Path) -> int:
    try:
        return max((row["step"] for row in metrics(run) if "loss" in row), default=0)
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def state_tensors(checkpoint: Path) -> dict:
    """Every tensor of a checkpoint, whichever rank wrote it; the slices of one name in order."""
    found: dict = {}
    for file in sorted(checkpoint.glob("state-*.safetensors")):
        for name, tensor in load_file(file).items():
            found.setdefault(name, []).append(tensor)
    return {name: [part.tolist() for part in parts] for name, parts in found.items()}


def losses(run: Path) -> dict[int, tuple]:
    return {r["step"]: (r["loss"], r["learning_rate"], r["grad_norm"]) for r in metrics(run) if "loss" in r}


@pytest.fixture(scope="module")
def straight(workshop: Workshop) -> Path:
    arriero("train", workshop.recipe("straight", **LONG), "--nproc", 2)
    return workshop.run("straight")


@pytest.fixture(scope="module")
def killed(workshop: Workshop) -> Path:
    """A run whose processes were all killed behind its second checkpoint."""
    process = start(workshop.recipe("killed", **LONG), 2)
    wait_for(lambda: last_step(workshop.run("killed")) >= 14)
    everyone = family(process)
    for one in everyone:
        one.kill()
    psutil.wait_procs(everyone, timeout=10)
    process.wait()
    assert not (workshop.run("killed") / "checkpoint-24").exists()
    return workshop.run("killed")


def test_killed_and_started_again_it_is_the_same_run(workshop: Workshop, straight: Path, killed: Path) -> None:
    shutil.copytree(killed, workshop.run("killed-elsewhere"))
    # The newest checkpoint is damaged: the one before it must be found, and the damage said.
    checkpoints = sorted(killed.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    victim = checkpoints[-1] / "state-00000.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    done = arriero("train", workshop.folder / "killed.yaml", "--nproc", 2)
    assert f"passed over {checkpoints[-1].name}: state-00000.safetensors has" in done.stdout
    resumed = [row for row in metrics(killed) if row.get("event") == "resume"]
    assert [row["checkpoint"] for row in resumed] == [checkpoints[-2].name]
    assert losses(killed) == losses(straight)
    assert state_tensors(killed / "checkpoint-24") == state_tensors(straight / "checkpoint-24")


def test_it_continues_in_another_layout(workshop: Workshop, straight: Path, killed: Path) -> None:
    run = workshop.run("killed-elsewhere")
    if not run.exists():
        pytest.fail("the copy is made by the test before this one")
    recipe = workshop.recipe("killed-elsewhere", **LONG, parallel={"zero_stage": 3}, log={"logging_steps": 1})
    done = arriero("train", recipe, "--nproc", 1)
    assert "changed since the last start: parallel.zero_stage 1 → 3" in done.stdout
    assert "ranks: 2 saved, 1 continue" in done.stdout
    ours, theirs = losses(run), losses(straight)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[step][0] - theirs[step][0]) / theirs[step][0] for step in ours) < 2e-3
    assert all(ours[step][1] == theirs[step][1] for step in ours)


def test_sigterm_saves_and_the_same_command_goes_on(workshop: Workshop) -> None:
    recipe = workshop.recipe("stopped", train={"max_steps": 400}, checkpoint={"save_steps": 10_000})
    run = workshop.run("stopped")
    process = start(recipe, 2)
    wait_for(lambda: last_step(run) >= 3)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, output + errors
    state = json.loads((run / "run_state.json").read_text())
    assert (state["status"], state["exit_code"]) == ("preempted", 75)
    assert state["last_checkpoint"] == f"checkpoint-{state['step']}"
    done = arriero("train", recipe, f"train.max_steps={state['step'] + 2}", "--nproc", 2)
    assert f"step {state['step'] + 1}/{state['step'] + 2}" in done.stdout


def test_a_killed_rank_ends_the_run_with_its_name(workshop: Workshop) -> None:
    recipe = workshop.recipe("bereft", train={"max_steps": 4000})
    process = start(recipe, 2)
    wait_for(lambda: last_step(workshop.run("bereft")) >= 2)
    everyone = family(process)
    (victim,) = [one for one in everyone if one.environ().get("RANK") == "1"]
    victim.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in errors.splitlines()[-1]
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive
    state = json.loads((workshop.run("bereft") / "run_state.json").read_text())
    assert (state["status"], state["exit_code"]) == ("failed", 1)
    assert "rank 1" in state["reason"]


def test_a_failing_rank_shows_its_traceback(workshop: Workshop, tmp_path: Path) -> None:
    # What a bug in one rank does: sitecustomize is run by that rank's interpreter before anything else.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import arriero.data.loader as loader\n"
        "    plain = loader.TrainingData.micro_batches\n"
        "    def failing(self, position, **rest):\n"
        "        if position >= 16:\n"
        "            raise RuntimeError('the disk caught fire')\n"
        "        return plain(self, position, **rest)\n"
        "    loader.TrainingData.micro_batches = failing\n"
    )
    process = start(workshop.recipe("failing"), 2, PYTHONPATH=str(tmp_path))
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "rank 1 failed" in errors
    assert errors.splitlines()[-1] == "RuntimeError: the disk caught fire"
    assert "RuntimeError" in (workshop.run("failing") / "logs" / "rank_1.log").read_text()


def test_a_folder_in_use_and_a_folder_of_another_run_are_refused(workshop: Workshop, straight: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from arriero.run_folder import RunFolder\n"
            f"with RunFolder(pathlib.Path({str(straight)!r})).held(): print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    recipe = workshop.folder / "straight.yaml"
    refused = arriero("train", recipe, check=False)
    holder.kill()
    holder.wait()
    assert refused.returncode == 2
    assert f"is in use by a live process (pid {holder.pid}" in refused.stderr
    foreign = arriero("train", recipe, "model.config.hidden_size=32", "train.seed=8", check=False)
    assert foreign.returncode == 2
    assert "model.config.hidden_size: 64 in the folder, 32 in the recipe" in foreign.stderr
    assert "train.seed: 7 in the folder, 8 in the recipe" in foreign.stderr
    assert json.loads((straight / "run_state.json").read_text())["status"] == "completed"


def test_no_checkpoint_is_intact_or_none_is_wanted(workshop: Workshop, straight: Path, tmp_path: Path) -> None:
    from arriero.checkpoint.load import choose_checkpoint
    from arriero.errors import UserError

    copy = tmp_path / "run"
    shutil.copytree(straight, copy)
    with pytest.raises(UserError, match="resume_from_checkpoint is never"):
        choose_checkpoint(copy, "never")
    for manifest in copy.glob("checkpoint-*/manifest.json"):
        manifest.unlink()
    with pytest.raises(UserError, match="none is intact") as error:
        choose_checkpoint(copy, "auto")
    assert "checkpoint-24: it has no manifest.json" in str(error.value)
    with pytest.raises(UserError, match="can't be continued from"):
        choose_checkpoint(copy, str(copy / "checkpoint-24"))


def test_a_run_that_applies_no_update_stops_and_nothing_that_is_not_finite_is_saved(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "diverged",
        train={"precision": "bf16", "max_steps": 12},
        # The first updates are of a size that weights survive, the later ones are not.
        optim={"learning_rate": 1e30, "warmup_steps": 0, "max_grad_norm": 0},
        checkpoint={"save_steps": 1},
        log={"logging_steps": 5},
        health={"max_consecutive_skips": 4},
    )
    done = arriero("train", recipe, "--nproc", 2, check=False)
    assert done.returncode == 1
    assert "5 updates in a row were skipped" in done.stderr
    run = workshop.run("diverged")
    assert json.loads((run / "run_state.json").read_text())["status"] == "failed"
    for checkpoint in run.glob("checkpoint-*"):
        for file in checkpoint.glob("state-*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_a_named_checkpoint_is_gone_back_to(workshop: Workshop, straight: Path, tmp_path: Path) -> None:
    run = workshop.run("back")
    shutil.copytree(straight, run)
    recipe = workshop.recipe("back", **LONG)
    before = state_tensors(run / "checkpoint-24")
    done = arriero(
        "train", recipe, f"checkpoint.resume_from_checkpoint={run / 'checkpoint-12'}", "optim.learning_rate=5e-3",
        "train.global_batch_size=16", "--nproc", 2,
    )  # fmt: skip
    assert (
        "checkpoint-24 is behind the checkpoint that is continued from; it is now abandoned-checkpoint-24"
        in done.stdout
    )
    assert state_tensors(run / "abandoned-checkpoint-24") == before
    assert state_tensors(run / "checkpoint-24") != before
    rows = {row["step"]: row for row in metrics(run) if "loss" in row}
    # Twelve steps of 8 rows, then twelve of 16.
    assert (rows[24]["position"], rows[24]["tokens"]) == (12 * 8 + 12 * 16, (12 * 8 + 12 * 16) * 128)
    assert all(row["target_tokens"] > 0 and row["tokens_per_second"] > 0 for row in rows.values())


def test_ranks_do_not_outlive_the_process_that_started_them(workshop: Workshop) -> None:
    recipe = workshop.recipe("orphans", train={"max_steps": 4000}, checkpoint={"save_steps": 10_000})
    process = start(recipe, 2)
    wait_for(lambda: last_step(workshop.run("orphans")) >= 1)
    everyone = family(process)
    assert len(everyone) == 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive
    done = arriero("train", recipe, "train.max_steps=2", "--nproc", 2)
    # What the killed start had logged is done again, and that is marked.
    marks = [row for row in metrics(workshop.run("orphans")) if row.get("event") == "resume"]
    assert [(row["step"], row["checkpoint"]) for row in marks] == [(0, None)]
    assert "step 2/2" in done.stdout


def test_documents_that_leak_are_noticed_before_the_first_step(workshop: Workshop, tmp_path: Path) -> None:
    # The fault as it comes in the wild: an all-ones mask, which makes Transformers forget about position ids.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    import torch\n"
        "    import arriero.model.build as build\n"
        "    def forward(self, input_ids, targets, position_ids):\n"
        "        mask = torch.ones_like(input_ids)\n"
        "        hidden = self.causal_lm.model(\n"
        "            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False\n"
        "        ).last_hidden_state\n"
        "        if targets is None:\n"
        "            return self.causal_lm.lm_head(hidden)\n"
        "        loss, losses = self.causal_lm.lm_head(hidden, targets)\n"
        "        return loss, losses.view(targets.shape).sum(1)\n"
        "    build.PretrainModel.forward = forward\n"
    )
    recipe = workshop.recipe("leaking")
    done = arriero("train", recipe, check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "documents leak into one another" in done.stderr
    assert not [row for row in metrics(workshop.run("leaking")) if "loss" in row]
    assert "step 2/2" in arriero("train", recipe, "data.isolate_documents=false", "train.max_steps=2").stdout


def test_best_fit_trains_and_comes_back(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "whole-documents",
        data={"sources": [{"path": str(workshop.dataset), "name": "code"}], "seq_len": 512, "packing": "best_fit"},
        train={"max_steps": 3},
        checkpoint={"save_steps": 2},
    )
    arriero("train", recipe, "--nproc", 2)
    first = losses(workshop.run("whole-documents"))
    shutil.rmtree(workshop.run("whole-documents") / "checkpoint-3")
    arriero("train", recipe, "--nproc", 2)
    assert losses(workshop.run("whole-documents")) == first
    assert (workshop.dataset / "index" / "best_fit-train-512.npz").is_file()


def test_seq_len_may_change(workshop: Workshop, capsys: pytest.CaptureFixture) -> None:
    """The run of the test before, 3 steps of 8 rows of 512 tokens, goes on in rows of 640 from step 2 of it."""
    from arriero.cli.run_commands import data_seen, data_show, train_command
    from arriero.errors import UserError

    def answers(command, *arguments, **options) -> list[dict]:
        command(*arguments, as_json=True, **options)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    recipe, run = workshop.folder / "whole-documents.yaml", workshop.run("whole-documents")
    if not (run / "checkpoint-3").is_dir():
        pytest.fail("the run is made by the test before this one")
    shutil.rmtree(run / "checkpoint-3")
    now = ["data.seq_len=640", "train.max_tokens=24_000", "train.max_steps=null"]
    first = answers(data_show, recipe, steps=2)
    then = answers(data_show, recipe, now, start_step=3, steps=9)
    # 16 rows of 512 are 8,192 tokens; 15,808 more are four steps of 8 rows of 640, rounded up.
    assert Counter(row["step"] for row in then) == dict.fromkeys((3, 4, 5, 6), 8)
    assert {row["epoch"] for row in then} == {0}
    with pytest.raises(UserError, match="it stands at step 2"):
        data_show(recipe, now)
    (plan,) = answers(train_command, None, recipe, now, nproc="2", dry_run=True)
    assert (plan["continues_from"], plan["steps"], plan["tokens_per_step"]) == ("checkpoint-2", 6, 8 * 640)
    done = arriero("train", recipe, *now, "--nproc", 2)
    assert "changed since the last start: data.seq_len 512 → 640" in done.stdout
    rows = {row["step"]: row for row in metrics(run) if "loss" in row}
    assert [rows[step]["tokens"] for step in range(1, 7)] == [4096, 8192, *(8192 + 5120 * n for n in range(1, 5))]
    assert [rows[step]["position"] for step in range(1, 7)] == [8 * step for step in range(1, 7)]
    for step in range(3, 7):
        shown = sum(target != -100 for row in then if row["step"] == step for target in row["targets"])
        assert rows[step]["target_tokens"] == shown
    assert rows[6]["epoch"]["code"] == pytest.approx(plan["epochs"]["code"], abs=1e-6)
    assert json.loads((run / "final" / "config.json").read_text())["max_position_embeddings"] == 640
    # What was seen, by either checkpoint's own recipe.
    for step, documents in ((2, first), (6, [*first, *then])):
        (answer,) = answers(data_seen, run, step=step)
        assert answer["sources"]["code"]["rows"] == 8 * step
        assert answer["sources"]["code"]["documents_seen"] == len({d for row in documents for d in row["documents"]})
    with pytest.raises(UserError, match=r"data.packing: 'best_fit' in the folder, 'stream' in the recipe"):
        train_command(None, recipe, [*now, "data.packing=stream"], nproc="2", dry_run=True)
