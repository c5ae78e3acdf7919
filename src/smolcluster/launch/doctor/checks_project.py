"""What `smolcluster doctor` looks at of the project on a machine: its code, its environment, PyTorch."""

import json
import shlex
from collections.abc import Iterable
from typing import Any

from smolcluster.launch.doctor.findings import (
    Answer,
    Check,
    Context,
    Finding,
    fail,
    fields,
    ok,
    skipped,
    warn,
)
from smolcluster.launch.host import shell_path
from smolcluster.launch.manifest import as_names, compare, read_folder, refusal
from smolcluster.launch.sync import ENVIRONMENT_MARKER, NOT_WRITABLE, look_script, not_writable
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


def judge_folder(answer: Answer, context: Context) -> Finding:
    if answer.code == NOT_WRITABLE:
        return fail(*not_writable(context.node, context.folder, answer))
    return judge_code(answer, context)


def judge_code(answer: Answer, context: Context) -> Finding:
    """The code there: this version, another one, somebody's own, half of one, or none."""
    folder, tree = context.folder, context.tree or {}
    found = read_folder(answer)
    difference = compare(tree, found)
    if found.state == "absent":
        return warn(f"{folder} is not there yet", f"{as_command('launch')} brings it")
    if found.state == "foreign":
        what = f"{folder} holds something else than this project"
        return fail(what, f"set nodes.{context.node}.project_dir to another folder")
    if difference.edited:
        return fail(*refusal(found, folder, difference.edited))
    if found.is_half_sent:
        return fail(f"{folder} is half-sent", "launch again without --no-sync")
    if difference.is_none:
        return ok("this version")
    return warn(f"{folder} is of another version", "launch without --no-sync brings this one")


def exports(context: Context) -> str:
    env = context.settings.env
    return "".join(f"\nexport {name}={shlex.quote(value)}" for name, value in env.items())


def environment_script(context: Context) -> str:
    return f"""{exports(context)}
cd {shell_path(context.folder)} 2>/dev/null || {{ echo "folder absent"; exit 0; }}
[ -e .venv ] || exit 0
echo "mark $(cat {ENVIRONMENT_MARKER} 2>/dev/null)"
echo "python $({shell_path(context.python)} -c 'print("runs")' 2>&1 | tail -n 1)" """


def judge_environment(answer: Answer, context: Context) -> Finding:
    told = fields(answer.stdout)
    if told.get("folder") == "absent":
        return skipped("needs the code")
    if "mark" not in told:
        return warn("there is no environment yet", f"{as_command('launch')} makes it")
    if told.get("python") != "runs":
        return fail(
            f"the environment's Python does not run ({told.get('python') or 'it is not there'})",
            _anew(context),
        )
    if not told["mark"]:
        return warn("the environment is half-made", "launch again without --no-sync")
    if told["mark"] != context.environment:
        return warn("the environment is of other requirements", "launch without --no-sync mends it")
    return ok("whole")


def torch_script(context: Context) -> str:
    python = shell_path(context.python)
    return f"""{exports(context)}
[ -e {python} ] || {{ echo "absent"; exit 0; }}
nvidia-smi -L 2>/dev/null | sed -n '1s/^/gpu /p'
exec {python} -"""


def judge_torch(answer: Answer, context: Context) -> Finding:
    """PyTorch: that it is there, of the right build, and sees the device that is asked for."""
    told = fields(answer.stdout)
    if "absent" in told:
        return skipped("no environment")
    if "torch" not in told:
        return fail(f"PyTorch cannot be imported ({answer.stderr_tail})", _anew(context))
    torch = json.loads(told["torch"])
    return _wrong_build(torch, told.get("gpu", ""), context) or _with_device(torch, context)


def _wrong_build(torch: dict[str, Any], gpu: str, context: Context) -> Finding | None:
    """Why this build of PyTorch is the wrong one there; None: it is right."""
    version, settings = torch["version"], context.settings
    if context.facts.is_apple_silicon and torch["machine"] != "arm64":
        return fail(
            f"PyTorch {version} is built for {torch['machine']} and runs under Rosetta",
            f"install uv anew in a terminal without Rosetta; {_anew(context)}",
        )
    wants_cpu = settings.device == "cpu" or settings.torch == "cpu"
    if not gpu or wants_cpu or torch["num_gpus"]:
        return None
    name = gpu.partition(": ")[2].partition(" (")[0] or gpu
    if torch["cuda"] is None and torch["hip"] is None:
        return fail(
            f"PyTorch {version} is a build for the CPU, but there is an {name}",
            f"set nodes.{context.node}.torch to auto; {_anew(context)}",
        )
    return fail(
        f"PyTorch {version} (CUDA {torch['cuda']}) cannot use the {name}",
        f"install a newer NVIDIA driver there; or set nodes.{context.node}.torch to a build that it knows, "
        "such as cu126, and launch again",
    )


def _with_device(torch: dict[str, Any], context: Context) -> Finding:
    kinds = ["cuda"] if torch["num_gpus"] else ["mps"] if torch["mps"] else []
    devices = [*kinds, "cpu"]
    wanted = context.settings.device or devices[0]
    kind, _, index = wanted.partition(":")
    if kind not in devices or (kind == "cuda" and int(index or 0) >= torch["num_gpus"]):
        count = torch["num_gpus"]
        seen = ", ".join(f"{count} x cuda" if device == "cuda" else device for device in devices)
        return fail(
            f"nodes.{context.node}.device is {wanted}, but PyTorch {torch['version']} sees {seen}",
            f"set nodes.{context.node}.device to null (the best there is) or {devices[0]}",
        )
    return ok(f"{torch['version']} {wanted}")


def _anew(context: Context) -> str:
    if context.is_here:
        return f"`rm -rf {context.folder}/.venv && uv sync`"
    return f"there: `rm -rf {context.folder}/.venv`, then launch again"


def _not_brought(context: Context) -> str | None:
    return "not needed here" if context.is_here else None


def _no_checkout(context: Context) -> str | None:
    return _not_brought(context) or (None if context.tree else "no checkout")


PROJECT_CHECKS: Iterable[Check] = (
    Check(
        "code",
        lambda context: look_script(context.folder),
        judge_folder,
        LOOK_S,
        _no_checkout,
        lambda context: as_names(context.tree or {}),
    ),
    Check("environment", environment_script, judge_environment, why_not=_no_checkout),
    Check(
        "torch", torch_script, judge_torch, IMPORT_TORCH_S, stdin=lambda _: LOOK_AT_TORCH.encode()
    ),
)
