"""A `kubectl` whose objects are files of one folder, as the real one where a launch depends on it.

What it does as Kubernetes does: `apply` changes no pod template of a Job and revives nothing that is being
deleted; an object that is deleted with `--cascade=foreground` is there until its pods are gone.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Json = dict[str, Any]
KINDS = {"job.batch": "Job", "service": "Service", "configmap": "ConfigMap"}
LOOKS = 2
"""How often an object whose pods end is still seen."""


class FakeCluster:
    """The objects, by kind and name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, home: Path) -> None:
        """Let `kubectl` of a shell with this home be this one."""
        command = home / ".local" / "bin" / "kubectl"
        command.parent.mkdir(parents=True, exist_ok=True)
        own = shlex.join([sys.executable, __file__, str(self.folder)])
        command.write_text(f'#!/bin/sh\nexec {own} "$@"\n')
        command.chmod(0o755)
        self.folder.mkdir(exist_ok=True)

    def file(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind}.{name}.json"

    def names(self) -> set[str]:
        return {each.name.partition(".")[0] for each in self.folder.glob("*.json")}

    def read(self, file: Path) -> Json:
        found: Json = json.loads(file.read_text())
        return found

    def only(self, kind: str) -> Json:
        [file] = self.folder.glob(f"{kind}.*.json")
        return self.read(file)

    def end_job(self, condition: str) -> None:
        """Give the only Job a condition that is true."""
        [file] = self.folder.glob("Job.*.json")
        status = {"conditions": [{"type": condition, "status": "True"}]}
        file.write_text(json.dumps({**self.read(file), "status": status}))

    def apply(self, text: str) -> None:
        """Raises SystemExit where the API server would refuse an object."""
        for new in YAML(typ="safe").load_all(text):
            name, file = new["metadata"]["name"], self.file(new["kind"], new["metadata"]["name"])
            old = self.read(file) if file.exists() else new
            if new["kind"] == "Job" and old["spec"]["template"] != new["spec"]["template"]:
                sys.exit(f'The Job "{name}" is invalid: spec.template: field is immutable')
            file.write_text(json.dumps({**old, **new}))

    def show(self, kind: str, name: str) -> None:
        """As a launch asks for it: the conditions that are true."""
        file = self.file(kind, name)
        if not file.exists():
            return
        found = self.read(file)
        conditions = found.get("status", {}).get("conditions", [])
        words = ["found", *(each["type"] for each in conditions if each["status"] == "True"), ""]
        sys.stdout.write(" ".join(words))
        if "looks" in found:
            found["looks"] -= 1
            file.write_text(json.dumps(found))
            if not found["looks"]:
                file.unlink()

    def delete(self, kind: str, name: str, *, waits: bool, with_pods: bool) -> None:
        file = self.file(kind, name)
        if not file.exists():
            return
        if waits or not with_pods or kind != "Job":
            file.unlink()
        else:
            file.write_text(json.dumps({**self.read(file), "looks": LOOKS}))


def main(folder: Path, argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("kubectl")
    for name in ("--namespace", "--request-timeout", "--timeout", "--wait", "--cascade"):
        parser.add_argument(name)
    parser.add_argument("--grace-period")
    parser.add_argument("-f")
    parser.add_argument("-o")
    for name in ("--force", "--ignore-not-found"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("verb", choices=("apply", "get", "delete"))
    parser.add_argument("objects", nargs="*")
    told = parser.parse_intermixed_args(argv)
    cluster = FakeCluster(folder)
    if told.verb == "apply":
        cluster.apply(sys.stdin.read())
    for each in told.objects:
        word, _, name = each.partition("/")
        kind = KINDS[word]
        if not told.ignore_not_found and not cluster.file(kind, name).exists():
            sys.exit(f'Error from server (NotFound): {word} "{name}" not found')
        if told.verb == "get":
            cluster.show(kind, name)
        else:
            with_pods = told.cascade == "foreground"
            cluster.delete(kind, name, waits=told.wait != "false", with_pods=with_pods)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
