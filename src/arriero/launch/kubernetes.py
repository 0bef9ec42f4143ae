"""A job for Kubernetes as manifests: a plain Indexed Job, or the Kubeflow training operator's PyTorchJob."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from arriero.errors import UserError

# Where the operator looks for the address of the first pod, and what it calls it: a port by this name in a container by
# this name.
_CONTAINER, _PORT_NAME, _PORT = "pytorch", "pytorchjob-port", 23456
_RECIPE = PurePosixPath("/etc/arriero/recipe.yaml")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_VOLUME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesJob:
    """What the pods are made of. A pod is a host; ``arriero train`` starts its ranks."""

    name: str
    recipe: str
    """The recipe's text; the pods get it by a ConfigMap."""
    overrides: Sequence[str]
    output_dir: str
    image: str
    volumes: Mapping[str, str]
    """Persistent volume claims that all pods can write to → where they are mounted."""
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    """All of them get a rank each, or there are none."""
    namespace: str | None = None
    max_restarts: int = 3
    save_s: int = 300
    """How long a pod that is told to stop may take to save."""
    cpus: int | None = None
    """Of a rank."""
    memory: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> PurePosixPath:
        """Where relative paths of the recipe begin: in the first volume."""
        return PurePosixPath(next(iter(self.volumes.values())))


def job_name(output_dir: str) -> str:
    """A name that Kubernetes takes, after the run folder."""
    name = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(output_dir).name.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def parse_volumes(texts: Sequence[str]) -> dict[str, str]:
    """``CLAIM:/PATH`` each; ``UserError`` for anything else, and for none."""
    if not texts:
        raise UserError(
            "--kubernetes needs --volume CLAIM:/PATH: a persistent volume claim that all pods can read and write",
            "It holds the data and output_dir, which must outlive the pods: --volume training-data:/data",
        )
    volumes: dict[str, str] = {}
    for text in texts:
        claim, _, path = text.partition(":")
        if not _VOLUME.fullmatch(claim) or not path.startswith("/") or path == "/" or claim in volumes:
            raise UserError(f"--volume {text}: expected CLAIM:/PATH, each claim once, such as training-data:/data")
        volumes[claim] = path.rstrip("/")
    return volumes


def indexed_job(job: KubernetesJob) -> str:
    """Manifests of a plain Job with one pod a host, the Service by which pods find the first one, and the recipe.

    A pod that ends with 75 (stopped, with a complete checkpoint) or that the cluster moved is started again without
    being counted; 2 (the recipe is wrong) ends the job.
    """
    _check(job)
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    pod = _pod(job, node_rank="$(NODE_RANK)", master_addr=f"{job.name}-0.{job.name}", master_port=str(_PORT))
    pod["spec"]["containers"][0]["env"].insert(0, {"name": "NODE_RANK", "valueFrom": rank})
    pod["spec"] |= {"restartPolicy": "Never", "subdomain": job.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        # Pods look the first one up before it is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}},
    }
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        # A host that fails takes the others along, and each is counted.
        "backoffLimit": job.max_restarts * job.nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [75]},
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [2]},
                },
            ]
        },
        "template": pod,
    }
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}
    return _dump([_config_map(job), service, body])


def pytorch_job(job: KubernetesJob) -> str:
    """Manifests of a PyTorchJob of the Kubeflow training operator (kubeflow.org/v1), and the recipe.

    The operator gives each pod its number and the first pod's address. ``OnFailure`` starts a pod again whatever it
    ended with, 75 included, ``max_restarts`` times.
    """
    _check(job)
    pod = _pod(job, node_rank="$(RANK)", master_addr="$(MASTER_ADDR)", master_port="$(MASTER_PORT)")
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    spec = {
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts * job.nodes},
        "pytorchReplicaSpecs": {
            kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
            for kind, count in replicas.items()
            if count
        },
    }
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(job), "spec": spec}
    return _dump([_config_map(job), body])


def _check(job: KubernetesJob) -> None:
    """``UserError`` for what would fail, or be lost, in the cluster."""
    if not _NAME.fullmatch(job.name):
        raise UserError(f"--name {job.name}: Kubernetes takes up to 52 of a-z, 0-9 and -, a letter first and no - last")
    where = job.folder / job.output_dir
    if not any(where.is_relative_to(path) for path in job.volumes.values()):
        mounts = ", ".join(job.volumes.values())
        raise UserError(
            f"output_dir {where} lies in no volume ({mounts}), so the run would be lost with its pods",
            f"Give another one: arriero launch … output_dir={job.folder}/runs/{job.name}",
        )


def _pod(job: KubernetesJob, *, node_rank: str, master_addr: str, master_port: str) -> dict[str, Any]:
    resources = {
        name: str(value)
        for name, value in {
            "nvidia.com/gpu": job.gpus_per_node or None,
            "cpu": job.cpus and job.cpus * job.ranks_per_node,
            "memory": job.memory,
        }.items()
        if value is not None
    }
    hosts = ["--nnodes", str(job.nodes), "--node-rank", node_rank]
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": job.image,
        "command": ["python", "-m", "arriero"],
        "args": [
            *["train", str(_RECIPE), *(override.replace("$(", "$$(") for override in job.overrides)],
            *["--nproc", str(job.ranks_per_node), *hosts],
            *["--master-addr", master_addr, "--master-port", master_port],
        ],
        "workingDir": str(job.folder),
        "env": [
            {"name": name, "value": value} for name, value in sorted({"PYTHONUNBUFFERED": "1", **job.variables}.items())
        ],
        "ports": [{"name": _PORT_NAME, "containerPort": _PORT}],
        "volumeMounts": [
            {"name": "recipe", "mountPath": str(_RECIPE.parent)},
            # NCCL and the ranks' own queues take more than a container's usual 64 MiB.
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": _label(claim), "mountPath": path} for claim, path in job.volumes.items()),
        ],
    }
    if resources:
        container["resources"] = {"limits": resources}
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "arriero"}},
        "spec": {
            "terminationGracePeriodSeconds": job.save_s,
            "containers": [container],
            "volumes": [
                {"name": "recipe", "configMap": {"name": job.name}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                *({"name": _label(claim), "persistentVolumeClaim": {"claimName": claim}} for claim in job.volumes),
            ],
        },
    }


def _label(claim: str) -> str:
    """A claim may have dots in its name, a volume not."""
    return claim.replace(".", "-")


def _config_map(job: KubernetesJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": {_RECIPE.name: job.recipe},
    }


def _metadata(job: KubernetesJob) -> dict[str, Any]:
    return {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they stand, no anchors, and quotes around what any version of YAML takes for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else "'" if text[:1] in tuple("0123456789+-.") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(documents: Sequence[dict[str, Any]]) -> str:
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True)
    return text
