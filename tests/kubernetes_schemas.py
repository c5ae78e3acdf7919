"""Strict checks of objects of Kubernetes.

Core kinds are judged by `kubernetes-validate`. Of JobSet v1alpha2 and TrainJob v1alpha1 (Kubeflow Trainer
2.2) the fields are written down here that a launch may use, with their types; what is not listed is refused.
"""

from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate

Json = dict[str, Any]
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
REFUSALS = (
    jsonschema.ValidationError,
    kubernetes_validate.ValidationError,
    kubernetes_validate.SchemaNotFoundError,
)
OWN = {"JobSet": JOBSET, "TrainJob": TRAINJOB}


def judge(document: Json) -> None:
    """Refuse an object that Kubernetes would refuse, or of which it would leave something out.

    Raises:
        One of REFUSALS: it is wrong.
    """
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
