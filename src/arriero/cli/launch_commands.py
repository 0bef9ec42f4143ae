"""``arriero launch``."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.errors import UserError
from arriero.run_folder import RunFolder

if TYPE_CHECKING:
    from arriero.config.schema import Recipe
    from arriero.launch.hostfile import HostJob

_PREEMPTED = 75


def launch_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", metavar="RECIPE", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change, e.g. optim.learning_rate=2e-4.", metavar="[section.key=value …]"),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", help="Start on these hosts over ssh: lines of HOST slots=RANKS.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Give a batch script to sbatch.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Give manifests to kubectl.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print what would be started, and stop.")] = False,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Hosts.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="GPUs of a host, each with a rank; 0: none.")
    ] = None,
    ranks_per_node: Annotated[
        int, typer.Option("--ranks-per-node", min=1, help="Ranks of a host that has no GPUs.")
    ] = 1,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="A variable of every rank.", metavar="NAME=VALUE")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The job's; default: the run folder's.")] = None,
    python: Annotated[
        str, typer.Option("--python", help="Interpreter on the hosts that has arriero.", show_default="this one")
    ] = sys.executable,
    cpus: Annotated[int | None, typer.Option("--cpus", min=1, help="Cores of a rank.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory of a host: 500G, for Kubernetes 500Gi.")
    ] = None,
    save_s: Annotated[
        int, typer.Option("--save-s", min=60, help="Seconds that ranks are given to save when they must stop.")
    ] = 300,
    master_addr: Annotated[
        str | None,
        typer.Option("--master-addr", help="Hostfile: the first host as the others see it.", show_default="its name"),
    ] = None,
    master_port: Annotated[
        int | None, typer.Option("--master-port", help="Hostfile: a port of it.", show_default="by the run folder")
    ] = None,
    ssh_port: Annotated[int | None, typer.Option("--ssh-port", help="Hostfile: of ssh, on all hosts.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="Slurm: the limit of the job: 24:00:00.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="Slurm: an option such as --partition=h100.", metavar="--NAME=VALUE"),
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option("--setup", help="Slurm: shell to run first.", metavar="'module load cuda'")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Kubernetes: an image that has arriero.")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option("--volume", help="Kubernetes: a volume claim that all pods can write to.", metavar="CLAIM:/PATH"),
    ] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Kubernetes: the job's.")] = None,
    kind: Annotated[
        str, typer.Option("--kind", help="Kubernetes: Job, or PyTorchJob for the Kubeflow training operator.")
    ] = "Job",
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Kubernetes: how often hosts may fail and begin again.")
    ] = 3,
) -> None:
    """Start a recipe on many hosts: over ssh, by Slurm or by Kubernetes. The same command goes on after a stop.

    Example: arriero launch recipe.yaml --slurm --nodes 8 --gpus-per-node 8 --time 24:00:00 --print
    """
    from arriero.config.load import load_recipe

    if (hostfile is not None) + slurm + kubernetes != 1:
        raise UserError("arriero launch needs one of --hostfile FILE, --slurm and --kubernetes")
    changes = overrides or []
    loaded = load_recipe(recipe, changes)
    variables = _variables(env or [])
    arguments = ["train", str(recipe), *changes]
    if hostfile is not None:
        from arriero.launch.hostfile import HostJob, default_port, read_hostfile

        hosts = read_hostfile(hostfile)
        port = default_port(loaded.output_dir) if master_port is None else master_port
        addr = master_addr or next(iter(hosts))
        job = HostJob(hosts, hostfile.resolve(), arguments, Path.cwd(), python, addr, port, ssh_port, variables)
        _over_ssh(job, loaded, only_print)
        return
    _need(
        "--slurm" if slurm else "--kubernetes",
        {"--nodes": nodes, "--gpus-per-node": gpus_per_node}
        | ({"--time": time} if slurm else {"--image": image, "--volume": volume}),
    )
    common: dict[str, Any] = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "ranks_per_node": gpus_per_node or ranks_per_node,
        "cpus": cpus,
        "memory": memory,
        "save_s": save_s,
        "variables": variables,
    }
    if slurm:
        from arriero.launch.slurm import SlurmJob, sbatch_script

        script = sbatch_script(
            SlurmJob(
                **common,
                name=name or Path(loaded.output_dir).name,
                arguments=arguments,
                folder=str(Path.cwd()),
                python=python,
                time=time or "",
                options=sbatch or [],
                setup=setup or [],
            )
        )
        file = Path(loaded.output_dir) / "launch.sbatch"
        _hand_over(script, ["sbatch", str(file)], file, only_print)
        return
    from arriero.launch.kubernetes import KubernetesJob, indexed_job, job_name, parse_volumes, pytorch_job

    makers: dict[str, Callable[[KubernetesJob], str]] = {"job": indexed_job, "pytorchjob": pytorch_job}
    if kind.lower() not in makers:
        raise UserError(f"--kind {kind}: expected Job or PyTorchJob")
    manifests = makers[kind.lower()](
        KubernetesJob(
            **common,
            name=name or job_name(loaded.output_dir),
            recipe=recipe.read_text(encoding="utf-8"),
            overrides=changes,
            output_dir=loaded.output_dir,
            image=image or "",
            volumes=parse_volumes(volume or []),
            namespace=namespace,
            max_restarts=max_restarts,
        )
    )
    _hand_over(manifests, ["kubectl", "apply", "-f", "-"], None, only_print)


def _variables(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"--env {text}: expected NAME=VALUE")
        found[name] = value
    return found


def _need(way: str, given: dict[str, Any]) -> None:
    """All that is missing at once."""
    missing = [option for option, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"arriero launch {way} needs {', '.join(missing)} as well", "arriero launch --help says what for."
        )


def _hand_over(text: str, command: list[str], file: Path | None, only_print: bool) -> None:
    """Print what was composed, or give it to the program that takes it, as a file or by its standard input."""
    if only_print:
        typer.echo(text, nl=False)
        return
    if shutil.which(command[0]) is None:
        raise UserError(
            f"there is no {command[0]} on this machine",
            f"Run this where it is, or take the text elsewhere: arriero launch … --print, then {' '.join(command[:-1])} FILE",
        )
    if file is not None:
        from arriero.run_folder import replace_text

        replace_text(file, text)
    done = subprocess.run(command, input=None if file else text, text=True)
    if done.returncode:
        raise UserError(f"{command[0]} ended with exit code {done.returncode}", exit_code=1)


def _over_ssh(job: HostJob, recipe: Recipe, only_print: bool) -> None:
    from arriero.launch.hostfile import check_hosts, runner_command

    command = runner_command(job)
    if only_print:
        typer.echo(shlex.join(command))
        return
    missing = [program for program in ("pdsh", "ssh") if shutil.which(program) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} isn't on this machine, and DeepSpeed's runner starts hosts by it",
            "On Debian: apt-get install pdsh openssh-client. Without ssh: arriero launch --slurm, or srun or mpirun.",
        )
    check_hosts(job)
    code = _run_until_end(command, job, recipe.output_dir)
    state = RunFolder(Path(recipe.output_dir)).read_state()
    # pdsh and ssh have codes of their own.
    if code not in (0, 1, 2, _PREEMPTED) and isinstance(state.get("exit_code"), int):
        code = state["exit_code"]
    raise typer.Exit(code)


def _run_until_end(command: list[str], job: HostJob, output_dir: str) -> int:
    """Run DeepSpeed's runner and give its exit code; a signal becomes a request to rank 0 to save and stop."""
    from arriero.launch.hostfile import ask_to_stop

    # In a session of its own, a Ctrl-C in the terminal doesn't reach pdsh, which would drop the connections.
    runner = subprocess.Popen(command, start_new_session=True)

    def stop(number: int, frame: Any) -> None:
        typer.echo(f"{signal.Signals(number).name}: asking the ranks to save and stop", err=True)
        if not ask_to_stop(job, output_dir):
            typer.echo("rank 0 could not be asked: it hasn't begun, or its host can't be reached", err=True)
            runner.kill()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        return runner.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
