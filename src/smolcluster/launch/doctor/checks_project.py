"""What `smolcluster doctor` looks at of the project on a machine: its code, its environment, PyTorch."""

import json
import shlex
from importlib.metadata import packages_distributions
from typing import Any

from smolcluster.launch.doctor.findings import (
    Check,
    Finding,
    NodeChecks,
    fail,
    fields,
    not_here,
    ok,
    skipped,
    warn,
)
from smolcluster.launch.host import Done, shell_path
from smolcluster.launch.node_facts import ABSENT
from smolcluster.launch.project import compare_script
from smolcluster.utils.units import format_count
from smolcluster.utils.words import as_command

LOOK_S = 30.0
IMPORT_TORCH_S = 60.0
"""A Pi reads PyTorch from its card."""

LOOK_AT_TORCH = """
import json, platform, torch
mps = getattr(torch.backends, "mps", None)
print("torch " + json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": getattr(torch.version, "hip", None),
    "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "mps": bool(mps and mps.is_available()),
    "machine": platform.machine(),
}))
"""


LOOK_FOR_PACKAGES = """
import importlib.util, json, sys
wanted = json.loads(sys.argv[1])
print("missing " + json.dumps([each for each in wanted if importlib.util.find_spec(each) is None]))
"""


def judge_code(answer: Done, node: NodeChecks) -> Finding:
    """The code there: this version, another one of its owner's, or none."""
    folder, found = node.machine.project_dir, answer.stdout.strip()
    if found == "absent":
        if node.machine.is_own:
            return fail(f"{folder} is no clone of this project", _bring_it(node))
        return ok("launch brings it")
    if not (num_other := int(found)):
        return ok("this version")
    what = f"{folder} differs from this checkout in {format_count(num_other, 'file')}"
    if node.machine.is_own:
        return warn(what, f"a launch uses it as it is; {_bring_it(node)}")
    return fail(what, f"there: `rm -rf {folder}`, then launch again")


def _bring_it(node: NodeChecks) -> str:
    return f"leave nodes.{node.name}.project_dir out, and a launch brings this version"


def exports(node: NodeChecks) -> str:
    """The variables of the node's processes, for a shell's standard input: on a command line all see them."""
    env = node.settings.env
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _in_environment(node: NodeChecks, script: str, probe: str) -> bytes:
    """For `sh -s`: a script whose last command, a Python there, reads this probe."""
    return f"{exports(node)}{script} <<'END OF THE PROBE'\n{probe}\nEND OF THE PROBE\n".encode()


def judge_environment(answer: Done, node: NodeChecks) -> Finding:
    is_own = node.machine.is_own
    if not node.facts.has("folder"):
        return skipped("needs the code")
    if answer.code == ABSENT and is_own:
        fix = f"there: `cd {node.machine.project_dir} && uv sync`"
        return fail("there is no environment", fix)
    if answer.code == ABSENT:
        return warn("there is no environment yet", f"{as_command('launch')} makes it")
    said = answer.stdout.strip()
    if said != "runs":
        why = said or "it is not there"
        return fail(f"the environment's Python does not run ({why})", _anew(node))
    return ok("whole")


def needs_interpreter(node: NodeChecks) -> str | None:
    return None if node.facts.has("interpreter") else "no environment"


def torch_script(node: NodeChecks) -> bytes:
    script = f"""nvidia-smi -L </dev/null 2>/dev/null | sed -n '1s/^/gpu /p'
exec {shell_path(node.machine.interpreter)} -"""
    return _in_environment(node, script, LOOK_AT_TORCH)


def judge_torch(answer: Done, node: NodeChecks) -> Finding:
    """PyTorch: that it is there, of the right build, and sees the device that is asked for."""
    told = fields(answer.stdout)
    if "torch" not in told:
        return fail(f"PyTorch cannot be imported ({answer.stderr_tail})", _anew(node))
    torch = json.loads(told["torch"])
    return _wrong_build(torch, told.get("gpu", ""), node) or _with_device(torch, node)


def _wrong_build(torch: dict[str, Any], gpu: str, node: NodeChecks) -> Finding | None:
    """Why this build of PyTorch is the wrong one there; None: it is right."""
    version, settings = torch["version"], node.settings
    if node.facts.is_apple_silicon and torch["machine"] != "arm64":
        return fail(
            f"PyTorch {version} is built for {torch['machine']} and runs under Rosetta",
            f"install uv anew in a terminal without Rosetta; {_anew(node)}",
        )
    wants_cpu = settings.device == "cpu" or settings.torch == "cpu"
    if not gpu or wants_cpu or torch["num_gpus"]:
        return None
    name = gpu.partition(": ")[2].partition(" (")[0] or gpu
    if torch["cuda"] is None and torch["hip"] is None:
        return fail(
            f"PyTorch {version} is a build for the CPU, but there is an {name}",
            f"set nodes.{node.name}.torch to auto; {_anew(node)}",
        )
    return fail(
        f"PyTorch {version} (CUDA {torch['cuda']}) cannot use the {name}",
        f"install a newer NVIDIA driver there; or set nodes.{node.name}.torch to a build that it knows, "
        "such as cu126, and launch again",
    )


def _with_device(torch: dict[str, Any], node: NodeChecks) -> Finding:
    kinds = ["cuda"] if torch["num_gpus"] else ["mps"] if torch["mps"] else []
    devices = [*kinds, "cpu"]
    wanted = node.settings.device or devices[0]
    kind, _, index = wanted.partition(":")
    if kind not in devices or (kind == "cuda" and int(index or 0) >= torch["num_gpus"]):
        count = torch["num_gpus"]
        seen = ", ".join(f"{count} x cuda" if device == "cuda" else device for device in devices)
        return fail(
            f"nodes.{node.name}.device is {wanted}, but PyTorch {torch['version']} sees {seen}",
            f"set nodes.{node.name}.device to null (the best there is) or {devices[0]}",
        )
    return ok(f"{torch['version']} {wanted}")


def _anew(node: NodeChecks) -> str:
    if node.machine.is_here:
        return f"`rm -rf {node.machine.project_dir}/.venv && uv sync`"
    if node.machine.is_own:
        return f"there: `cd {node.machine.project_dir} && rm -rf .venv && uv sync`"
    return f'there: `rm -rf "$(cd {node.machine.project_dir}/.venv && pwd -P)"`, then launch again'


def packages_script(node: NodeChecks) -> bytes:
    python, wanted = shell_path(node.machine.interpreter), shlex.quote(json.dumps(node.packages))
    return _in_environment(node, f"exec {python} - {wanted}", LOOK_FOR_PACKAGES)


def judge_packages(answer: Done, node: NodeChecks) -> Finding:
    """Whether the environment has what a workload imports.

    Which package a module comes from is what this machine's own environment says.
    """
    missing = json.loads(fields(answer.stdout)["missing"])
    if not missing:
        return ok("its imports are there")
    known = packages_distributions()
    names = {each: known[each][0] for each in missing if len(set(known.get(each, ()))) == 1}
    unknown = [each for each in missing if each not in names]
    remedies = []
    if names:
        packages = " ".join(shlex.quote(name) for name in sorted(set(names.values())))
        remedies.append(
            node.there(f"uv pip install --python {node.machine.interpreter} {packages}")
        )
    if unknown:
        remedies.append(f"install what provides {', '.join(unknown)} on {node.name}")
    return fail(
        f"the workload imports {', '.join(missing)}, which the environment has not",
        "; ".join(remedies),
    )


PROJECT_CHECKS = (
    Check(
        "code",
        lambda node: compare_script(node.machine.project_dir),
        judge_code,
        LOOK_S,
        not_here,
        stdin=lambda node: node.sums,
    ),
    Check("environment", None, judge_environment, why_not=not_here),
    Check(
        "torch",
        lambda _: "exec sh -s",
        judge_torch,
        IMPORT_TORCH_S,
        needs_interpreter,
        stdin=torch_script,
    ),
    Check(
        "workload",
        lambda _: "exec sh -s",
        judge_packages,
        LOOK_S,
        needs_interpreter,
        stdin=packages_script,
    ),
)
