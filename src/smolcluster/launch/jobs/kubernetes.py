"""A group as objects of Kubernetes: an Indexed Job with a headless Service, a JobSet, or a TrainJob. Pure.

Each pod is a machine: torchrun starts its ranks. A ConfigMap brings the two configuration files; a
PersistentVolumeClaim keeps the run, so that pods which are started again go on from its newest checkpoint.
Secrets come from a Secret of the namespace and are in no object here.
"""

import io
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from ruamel.yaml import YAML

from smolcluster.configs.schema import KubernetesConfig
from smolcluster.errors import ConfigError
from smolcluster.launch.jobs.scheduler import KINDS, Job, kubectl
from smolcluster.runs.launched import LaunchedProcess
from smolcluster.utils.seed import with_hash_seed
from smolcluster.wire.security import GROUP_SECRET

Json = dict[str, Any]

QUEUE = "kueue.x-k8s.io/queue-name"
NAME = "app.kubernetes.io/name"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""What a TrainJob's pods are known by, whose runtime is a JobSet of its name."""
INDEX = "batch.kubernetes.io/job-completion-index"
RESERVED_PREFIX = "PET_"
RESERVED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
"""Variables of torchrun, or of what starts it."""
PLAIN = re.compile(r"[A-Za-z][\w./-]*")
NO_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Of YAML 1.1, without quotes."""
CONFIG, RUNS = "/config", "/runs"
FILES = ("cluster.yaml", "train.yaml")
"""Where pods find the configuration's files, and keep their run."""
NODE = "node"
"""The container, and the replicated job, as Kubeflow's runtimes for torch call it."""
MAX_NAME = 63 - len("-node-0-99999")


def manifests(job: Job, config: KubernetesConfig) -> list[Json]:
    """The objects, in the order in which they are made.

    Raises:
        ConfigError: the image is missing, a variable is reserved, the name cannot be a host's, or the ranks
            cannot be shared equally.
    """
    _check(job, config)
    kinds = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, config),
        "data": dict(job.files),
    }
    return [config_map, *kinds[config.kind](job, config)]


def pod_logs(process: LaunchedProcess) -> str:
    """The command that shows what a run's pods say."""
    kind, _, name = process.session.partition("/")
    label = JOBSET_NAME if kind == KINDS["trainjob"] else NAME
    words = ("logs", "--selector", f"{label}={name}", "--prefix", "--tail=-1")
    return shlex.join((*kubectl(process), *words))


def to_yaml(objects: Sequence[Json]) -> str:
    """The objects as one file; `kubectl` reads YAML 1.1, to which `yes` without quotes is no text."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.representer.add_representer(str, _quoted)
    yaml.dump_all(objects, text)
    return text.getvalue()


def _quoted(representer: Any, text: str) -> Any:
    style = "|" if "\n" in text else '"'
    if PLAIN.fullmatch(text) and text.lower() not in NO_TEXT:
        style = ""
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _check(job: Job, config: KubernetesConfig) -> None:
    if config.image is None:
        raise ConfigError(
            "kubernetes.image is null: name the image that has smolcluster installed; docs/mesh.md builds one"
        )
    job.ranks_per_node(config.nodes)
    if config.nodes > 1 and GROUP_SECRET not in {**config.secrets, **config.env}:
        raise ConfigError(
            f"kubernetes.nodes is {config.nodes}, and nothing tells their ranks a common secret: make one "
            "(kubectl create secret generic mesh --from-literal=secret=...), and name it in "
            f"kubernetes.secrets: {{{GROUP_SECRET}: mesh/secret}}"
        )
    if len(job.run_id) > MAX_NAME or not job.run_id.replace("-", "a").isalnum():
        raise ConfigError(
            f"run id {job.run_id!r} cannot name a host: use up to {MAX_NAME} small letters, digits and -"
        )
    for name in (*config.env, *config.secrets):
        if name.startswith(RESERVED_PREFIX) or name in RESERVED:
            raise ConfigError(
                f"kubernetes gives pods {name}, which is torchrun's own and says which ranks they have: "
                "take it out"
            )


def _metadata(job: Job, config: KubernetesConfig, *, queued: bool = False) -> Json:
    labels = {NAME: job.run_id}
    if queued and config.queue is not None:
        labels[QUEUE] = config.queue
    return {"name": job.run_id, "namespace": config.namespace, "labels": labels}


def _job(job: Job, config: KubernetesConfig) -> Iterator[Json]:
    """An Indexed Job, whose pods find each other by a headless Service."""
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, config),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {NAME: job.run_id},
            "ports": [{"name": "ranks", "port": job.port, "protocol": "TCP"}],
        },
    }
    pod = _pod(job, config, f"{job.run_id}-0.{job.run_id}")
    pod["spec"]["subdomain"] = job.run_id
    yield {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, config, queued=True),
        "spec": _indexed(config, pod, job.restarts * config.nodes),
    }


def _jobset(job: Job, config: KubernetesConfig) -> Iterator[Json]:
    pod = _pod(job, config, f"{job.run_id}-{NODE}-0-0.{job.run_id}")
    yield {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, config, queued=True),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.restarts},
            "replicatedJobs": [
                {"name": NODE, "replicas": 1, "template": {"spec": _indexed(config, pod, 0)}}
            ],
        },
    }


def _trainjob(job: Job, config: KubernetesConfig) -> Iterator[Json]:
    """A TrainJob: which pod is which, and where rank 0 is, Kubeflow tells torchrun by variables."""
    container = {"name": NODE, "volumeMounts": _mounts()}
    pod = {"volumes": _volumes(job, config), "containers": [container]}
    node = {"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "smolcluster.io/launcher",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    trainer: Json = {
        "image": config.image,
        "numNodes": config.nodes,
        "numProcPerNode": job.ranks_per_node(config.nodes),
        "command": ["torchrun"],
        "args": _arguments(job),
    }
    if env := _env(config):
        trainer["env"] = env
    if config.gpus:
        trainer["resourcesPerNode"] = _resources(config)
    yield {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, config, queued=True),
        "spec": {
            "runtimeRef": {"name": config.runtime},
            "trainer": trainer,
            "runtimePatches": [patch],
        },
    }


def _indexed(config: KubernetesConfig, pod: Json, backoff_limit: int) -> Json:
    return {
        "completionMode": "Indexed",
        "completions": config.nodes,
        "parallelism": config.nodes,
        "backoffLimit": backoff_limit,
        "template": pod,
    }


def _pod(job: Job, config: KubernetesConfig, address: str) -> Json:
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    container: Json = {
        "name": NODE,
        "image": config.image,
        "command": ["torchrun"],
        "args": [
            *("--nnodes", str(config.nodes), "--node-rank", "$(NODE_RANK)"),
            *("--nproc-per-node", str(job.ranks_per_node(config.nodes))),
            *("--master-addr", address, "--master-port", str(job.port)),
            *_arguments(job),
        ],
        "env": [{"name": "NODE_RANK", "valueFrom": index}, *_env(config)],
        "volumeMounts": _mounts(),
    }
    if config.gpus:
        container["resources"] = _resources(config)
    return {
        "metadata": {"labels": {NAME: job.run_id}},
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": _volumes(job, config),
        },
    }


def _arguments(job: Job) -> list[str]:
    return [_escaped(text) for text in job.command]


def _escaped(text: str) -> str:
    """Kubernetes puts a variable's value in the place of `$(NAME)`, and `$` in that of `$$`."""
    return text.replace("$", "$$")


def _env(config: KubernetesConfig) -> list[Json]:
    env = with_hash_seed(config.env)
    plain = [{"name": name, "value": _escaped(value)} for name, value in env.items()]
    places = {variable: place.partition("/") for variable, place in config.secrets.items()}
    secret = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for variable, (name, _, key) in places.items()
    ]
    return [*plain, *secret]


def _resources(config: KubernetesConfig) -> Json:
    return {"limits": {"nvidia.com/gpu": config.gpus}}


def _mounts() -> list[Json]:
    return [
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "runs", "mountPath": RUNS},
    ]


def _volumes(job: Job, config: KubernetesConfig) -> list[Json]:
    runs: Json = {"emptyDir": {}}
    if config.claim is not None:
        runs = {"persistentVolumeClaim": {"claimName": config.claim}}
    return [{"name": "config", "configMap": {"name": job.run_id}}, {"name": "runs", **runs}]
