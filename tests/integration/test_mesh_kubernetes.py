"""A mesh as pods of Kubernetes: what they run trains."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from harness import free_port
from smolcluster.configs.spec import get_algorithm
from smolcluster.launch.flow import LaunchOptions, Scheduled
from smolcluster.launch.plan import Request
from smolcluster.launch.requests import resolved

pytestmark = pytest.mark.nightly

Json = dict[str, Any]


def test_the_pods_commands_train_in_their_very_environment(tmp_path: Path) -> None:
    """As processes of this machine: its paths stand for the pods' mounts, its loopback for rank 0's name."""
    overrides = (
        *("kubernetes.image=a", "kubernetes.nodes=2", "mesh.pp=1", "mesh.tp=2"),
        *("kubernetes.secrets.MESH_SECRET=mesh/secret", "encryption=off"),
        *("microbatches=1", "batch_size=128", "num_epochs=1", f"port={free_port()}"),
    )
    request = Request(get_algorithm("mesh"), None, "digits", overrides)
    site = Scheduled(resolved(request, local=False), LaunchOptions(on="kubernetes"))
    site.plan("mesh-1")
    made = list(YAML(typ="safe").load_all(site.text))
    (tmp_path / "config").mkdir()
    for name, content in made[0]["data"].items():
        (tmp_path / "config" / name).write_text(content)
    pods = [
        start(made[-1]["spec"]["template"]["spec"]["containers"][0], index, tmp_path)
        for index in range(2)
    ]
    try:
        for each in pods:
            output, _ = each.communicate(timeout=240)
            assert each.returncode == 0, output
    finally:
        for each in pods:
            each.kill()
            each.wait()
    assert (tmp_path / "runs" / "mesh-1" / "summary.json").is_file()


def place(source: Json) -> str:
    """Where Kubernetes finds a value: a field of the pod, or a Secret's key."""
    if "fieldRef" in source:
        return str(source["fieldRef"]["fieldPath"])
    return f"{source['secretKeyRef']['name']}/{source['secretKeyRef']['key']}"


def start(container: Json, index: int, folder: Path) -> "subprocess.Popen[str]":
    """A container of the pod of that index, whose variables Kubernetes fills in."""
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    known = {field: str(index), "mesh/secret": "a secret of this test, long enough"}
    env = {
        each["name"]: each.get("value") or known[place(each["valueFrom"])]
        for each in container["env"]
    }

    def local(text: str) -> str:
        text = re.sub(r"(?<!\$)\$\((\w+)\)", lambda found: env[found[1]], text)
        text = re.sub(r"^mesh-1-0\.mesh-1$", "127.0.0.2", text)
        return text.replace("/config/", f"{folder}/config/").replace('"/runs"', f'"{folder}/runs"')

    program = str(Path(sys.executable).with_name(container["command"][0]))
    return subprocess.Popen(
        [program, *map(local, container["args"])],
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "WANDB_MODE": "disabled", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
