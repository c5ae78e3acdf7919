"""A group as objects of Kubernetes, which takes them as they are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from smolcluster.configs.load import find_config
from smolcluster.configs.schema import KubernetesConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError
from smolcluster.launch.flow import LaunchOptions, Scheduled
from smolcluster.launch.jobs.kubernetes import manifests, to_yaml
from smolcluster.launch.jobs.scheduler import Job
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import resolved
from smolcluster.runs.launched import LaunchedProcess

Json = dict[str, Any]
KINDS = ("job", "jobset", "trainjob")
JOB = Job(
    LaunchedProcess(node="kubernetes", role="ranks", run_dir="/r/mesh-1", scheduler="kubernetes"),
    ("--override", "a=$(b)"),
    4,
    29500,
    3,
    {"cluster.yaml": "port: 1\n", "train.yaml": "dataset: {name: digits}\n"},
)


# What Kubernetes takes. Core kinds are judged by `kubernetes-validate`. Of JobSet v1alpha2 and TrainJob
# v1alpha1 (Kubeflow Trainer 2.2) the fields are written down here that a launch may use, with their types.

VERSION = "1.34"
NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
VARIABLE = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def closed(*required: str, **properties: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(item: Json) -> Json:
    return {"type": "array", "items": item}


METADATA = closed(
    "name", name=TEXT | {"pattern": NAME}, namespace=TEXT, labels=TEXTS, annotations=TEXTS
)
ENV = closed("name", name=TEXT | {"pattern": VARIABLE}, value=TEXT, valueFrom={"type": "object"})
RESOURCES = closed(limits={"type": "object"}, requests={"type": "object"})
ANY = {"type": "object"}
"""What is judged as a core kind of its own."""
JOBSET = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=closed(
        "replicatedJobs",
        network=closed(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
        failurePolicy=closed(maxRestarts=WHOLE | {"minimum": 0}),
        suspend=FLAG,
        replicatedJobs=listed(
            closed(
                "name",
                "template",
                name=TEXT | {"pattern": NAME},
                replicas=WHOLE | {"minimum": 1},
                template=closed("spec", metadata=ANY, spec=ANY),
            )
        )
        | {"minItems": 1},
    ),
)
POD_PATCH = closed(
    volumes=listed(ANY),
    containers=listed(closed("name", name=TEXT, env=listed(ENV), volumeMounts=listed(ANY))),
)
PATCHED_JOB = closed(
    "name",
    name=TEXT,
    template=closed(spec=closed(template=closed(spec=POD_PATCH))),
)
TRAINJOB = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=closed(
        "runtimeRef",
        suspend=FLAG,
        runtimeRef=closed("name", name=TEXT | {"minLength": 1}, kind=TEXT, apiGroup=TEXT),
        trainer=closed(
            image=TEXT | {"minLength": 1},
            command=listed(TEXT),
            args=listed(TEXT),
            env=listed(ENV),
            numNodes=WHOLE,
            numProcPerNode=WHOLE,
            resourcesPerNode=RESOURCES,
        ),
        runtimePatches=listed(
            closed(
                "manager",
                manager=TEXT | {"minLength": 1, "maxLength": 317, "pattern": "/"},
                time=TEXT,
                trainingRuntimeSpec=closed(
                    template=closed(spec=closed(replicatedJobs=listed(PATCHED_JOB)))
                ),
            )
        ),
    ),
)
OWN = {"JobSet": JOBSET, "TrainJob": TRAINJOB}


def judge(document: Json) -> None:
    """Refuse an object that Kubernetes would refuse, or of which it would leave something out."""
    schema = OWN.get(document.get("kind", ""))
    if schema is None:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document, schema)
    for core in core_parts(document):
        kubernetes_validate.validate(core, VERSION, strict=True)


def core_parts(document: Json) -> Iterator[Json]:
    """What of such an object is a core kind's: its jobs, and the pods of its patches."""
    if document["kind"] == "JobSet":
        for each in document["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "spec": each["template"]["spec"]}
        return
    for patch in document["spec"].get("runtimePatches", []):
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "spec": job["template"]["spec"]["template"]["spec"],
            }


def objects(kind: str, **keys: Any) -> list[Json]:
    told = {
        "image": "me/smolcluster:1",
        "nodes": 2,
        "claim": "runs",
        "queue": "team",
        "gpus": 2,
        "secrets": {"WANDB_API_KEY": "keys/wandb", "MESH_SECRET": "mesh/secret"},
        "env": {"NCCL_DEBUG": "INFO"},
        **keys,
    }
    return manifests(JOB, KubernetesConfig.model_validate({"kind": kind, **told}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys",
    [{}, {"nodes": 1, "claim": None, "queue": None, "gpus": 0, "secrets": {}, "env": {}}],
)
def test_kubernetes_takes_every_object(kind: str, keys: Json) -> None:
    made = objects(kind, **keys)
    for each in made:
        judge(each)
    assert list(YAML(typ="safe").load_all(to_yaml(made))) == made


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_none_is_refused(kind: str) -> None:
    made = objects(kind)[-1]
    pod(made)["nodes"] = 2
    with pytest.raises(
        (jsonschema.ValidationError, kubernetes_validate.ValidationError), match="nodes"
    ):
        judge(made)


def test_all_pods_are_started_again_as_often_as_restarts_says() -> None:
    assert spec(objects("job")[-1])["backoffLimit"] == 2 * JOB.restarts
    assert spec(objects("jobset")[-1])["failurePolicy"] == {"maxRestarts": JOB.restarts}


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_waits_in_kueues_queue(kind: str) -> None:
    assert objects(kind)[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/queue-name" not in objects(kind, queue=None)[-1]["metadata"]["labels"]


def spec(document: Json) -> Json:
    found: Json = document["spec"]
    return found


def pod(document: Json) -> Json:
    return next(each for each in walk(document) if "containers" in each)


def walk(value: Any) -> list[Json]:
    found = [value] if isinstance(value, dict) else []
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        found += walk(each)
    return found


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"image": None}, "kubernetes.image is null"),
        ({"nodes": 3}, "kubernetes.nodes is 3"),
        ({"env": {"PET_NNODES": "2"}}, "PET_NNODES, which is torchrun"),
        ({"secrets": {}}, "MESH_SECRET: mesh/secret"),
        (
            {"secrets": {"MASTER_ADDR": "a/b", "MESH_SECRET": "a/b"}},
            "MASTER_ADDR, which is torchrun",
        ),
    ],
)
def test_what_a_launch_cannot_say_is_refused(keys: Json, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        objects("job", **keys)


def test_no_text_is_taken_for_a_variable_or_a_truth() -> None:
    """Kubernetes expands `$(…)` and `$$`, and kubectl reads YAML 1.1."""
    job = replace(JOB, command=("a=$(b)", "c$$d"), files={"cluster.yaml": "yes"})
    config = KubernetesConfig.model_validate({"image": "a", "env": {"A": "$(B)", "C": "off"}})
    made = manifests(job, config)
    [container] = pod(made[-1])["containers"]
    assert {"a=$$(b)", "c$$$$d"} <= set(container["args"])
    assert {"name": "A", "value": "$$(B)"} in container["env"]
    old = YAML(typ="safe", pure=True)
    old.version = (1, 1)
    assert list(old.load_all(to_yaml(made))) == made


def test_what_a_launch_was_told_is_in_an_object_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("kubernetes.image=a", "nodes.node1.env.TOKEN=sesame", "batch_size=32")
    pods = ("kubernetes.env.SMOLCLUSTER_SEED=7", "kubernetes.secrets.SMOLCLUSTER_PORT=s/port")
    monkeypatch.setenv("SMOLCLUSTER_NUM_EPOCHS", "7")
    monkeypatch.setenv("SMOLCLUSTER_SEED", "8")
    monkeypatch.setenv("SMOLCLUSTER_PORT", "6000")
    monkeypatch.setenv("SMOLCLUSTER_NODES__NODE1__ENV__TOKEN", "sesame")
    monkeypatch.setenv("SMOLCLUSTER_NODES__NODE1", "{env: {KEY: sesame}}")
    monkeypatch.setenv("SMOLCLUSTER_ENV__KEY", "sesame")
    cluster = tmp_path / "c.yaml"
    shipped = find_config("mesh", "cluster").read_text()
    cluster.write_text(shipped + "nodes: {node2: {env: {KEY: sesame}}}\n")
    request = Request(get_algorithm("mesh"), str(cluster), "stdlib", (*overrides, *pods))
    site = Scheduled(resolved(request, local=False), LaunchOptions(on="kubernetes"))
    launched = site.plan("mesh-1")
    assert "sesame" not in site.text + str(launched)
    assert "batch_size=32" in site.text
    objects = list(YAML(typ="safe").load_all(site.text))
    [container] = pod(objects[-1])["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env.items() >= {"SMOLCLUSTER_NUM_EPOCHS": "7", "SMOLCLUSTER_SEED": "7"}.items()
    assert [each["name"] for each in container["env"]].count("SMOLCLUSTER_PORT") == 1
    assert launched.server.argv[-2:] == ("-f", "-")
