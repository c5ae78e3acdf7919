"""What is thought of the project on a machine: code, environment, PyTorch."""

import json
from typing import Any

import pytest

from doctoring import MAC, TREE, answer, code, context
from smolcluster.launch.doctor.checks_project import (
    environment_script,
    judge_environment,
    judge_folder,
    judge_torch,
    torch_script,
)
from smolcluster.launch.sync import NOT_WRITABLE

H200 = "gpu GPU 0: NVIDIA H200 (UUID: GPU-1f2e)\n"
CPU_BUILD = {
    "version": "2.11.0+cpu",
    "cuda": None,
    "hip": None,
    "num_gpus": 0,
    "mps": False,
    "machine": "x86_64",
}
CUDA_BUILD = {**CPU_BUILD, "version": "2.11.0+cu128", "cuda": "12.8"}
MAC_BUILD = {**CPU_BUILD, "version": "2.11.0", "mps": True, "machine": "arm64"}


def torch(build: dict[str, Any], before: str = "", **changed: Any) -> Any:
    return answer(f"{before}torch {json.dumps({**build, **changed})}\n")


def test_a_missing_project_is_brought_by_launch() -> None:
    found = judge_folder(answer("state\0absent\0"), context())
    assert (found.state, found.what) == ("warn", "~/smolcluster is not there yet")
    assert found.fix == "`smolcluster launch` brings it"


def test_a_half_synced_project() -> None:
    found = judge_folder(answer(code(sending="yes")), context())
    assert (found.state, found.what) == ("fail", "~/smolcluster is half-sent")
    assert found.fix == "launch again without --no-sync"


def test_another_version() -> None:
    before = TREE | {"src/a.py": "file 0"}
    found = judge_folder(answer(code(before, before)), context())
    assert (found.state, found.what) == ("warn", "~/smolcluster is of another version")
    assert "without --no-sync" in found.fix
    assert judge_folder(answer(code()), context()).state == "ok"


@pytest.mark.parametrize("sent", [TREE, {}], ids=["sent before", "never sent"])
def test_edited_code(sent: dict[str, str]) -> None:
    """The launch refuses it, and so the doctor does not advise one."""
    edited, owner = TREE | {"src/a.py": "file 9"}, "a git clone with uncommitted changes"
    found = judge_folder(answer(code(edited, sent, owner=owner)), context())
    assert found.state == "fail"
    assert f"~/smolcluster, {owner}, has 1 file" in found.what
    assert found.what.endswith(": src/a.py")
    assert "--overwrite" in found.fix


def test_a_folder_that_cannot_be_written() -> None:
    said = "touch: cannot touch '/x/.smolcluster-812': Read-only file system"
    found = judge_folder(answer("", NOT_WRITABLE, said), context())
    assert found.state == "fail"
    assert found.what == "~/smolcluster cannot be written (Read-only file system)"
    assert "nodes.pi5.project_dir" in found.fix


def test_a_folder_of_something_else() -> None:
    found = judge_folder(answer("state\0foreign\0"), context())
    assert found.state == "fail"
    assert found.fix == "set nodes.pi5.project_dir to another folder"


def test_no_environment_yet() -> None:
    found = judge_environment(answer(""), context())
    assert (found.state, found.fix) == ("warn", "`smolcluster launch` makes it")


def test_an_environment_whose_python_is_gone() -> None:
    said = "mark e1\npython sh: 6: /home/pi/smolcluster/.venv/bin/python: not found\n"
    found = judge_environment(answer(said), context())
    assert found.state == "fail"
    assert "not found" in found.what
    assert "rm -rf ~/smolcluster/.venv" in found.fix


def test_a_half_made_environment_and_an_old_one() -> None:
    half = judge_environment(answer("mark \npython runs\n"), context())
    old = judge_environment(answer("mark e0\npython runs\n"), context())
    assert [half.state, old.state] == ["warn", "warn"]
    assert "without --no-sync" in half.fix
    assert "without --no-sync" in old.fix
    assert judge_environment(answer("mark e1\npython runs\n"), context()).state == "ok"


def test_torch_that_cannot_be_imported() -> None:
    said = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'"
    found = judge_torch(answer("", 1, said), context())
    assert found.state == "fail"
    assert "No module named 'torch'" in found.what
    assert found.fix == "there: `rm -rf ~/smolcluster/.venv`, then launch again"


def test_a_build_for_the_cpu_where_there_is_a_gpu() -> None:
    found = judge_torch(torch(CPU_BUILD, H200), context())
    assert found.state == "fail"
    assert found.what == "PyTorch 2.11.0+cpu is a build for the CPU, but there is an NVIDIA H200"
    assert found.fix.startswith("set nodes.pi5.torch to auto; there: `rm -rf")


def test_a_cpu_that_was_asked_for_is_fine() -> None:
    assert judge_torch(torch(CPU_BUILD, H200), context(torch="cpu")).state == "ok"
    assert judge_torch(torch(CPU_BUILD, H200), context(device="cpu")).state == "ok"


def test_a_driver_too_old_for_the_build() -> None:
    found = judge_torch(torch(CUDA_BUILD, H200), context())
    assert found.state == "fail"
    assert "(CUDA 12.8) cannot use the NVIDIA H200" in found.what
    assert "cu126" in found.fix


def test_a_build_with_cuda_is_fine_without_a_gpu() -> None:
    assert judge_torch(torch(CUDA_BUILD), context()).what == "2.11.0+cu128 cpu"
    assert judge_torch(torch(CUDA_BUILD, H200, num_gpus=1), context()).what == "2.11.0+cu128 cuda"


def test_an_x86_build_under_rosetta() -> None:
    found = judge_torch(torch(MAC_BUILD, machine="x86_64"), context(facts=MAC))
    assert found.state == "fail"
    assert "under Rosetta" in found.what
    assert "install uv anew" in found.fix
    assert judge_torch(torch(MAC_BUILD), context(facts=MAC)).what == "2.11.0 mps"


def test_a_device_that_is_not_there() -> None:
    found = judge_torch(torch(CPU_BUILD), context(device="cuda"))
    assert found.state == "fail"
    assert "nodes.pi5.device is cuda" in found.what
    assert found.fix == "set nodes.pi5.device to null (the best there is) or cpu"


def test_a_gpu_too_many() -> None:
    found = judge_torch(torch(CUDA_BUILD, H200, num_gpus=1), context(device="cuda:1"))
    assert "sees 1 x cuda, cpu" in found.what
    assert judge_torch(torch(CUDA_BUILD, H200, num_gpus=2), context(device="cuda:1")).state == "ok"


def test_pytorch_gets_the_environment_of_the_nodes_processes() -> None:
    node = context(env={"LD_LIBRARY_PATH": "/opt/my cuda"})
    for script in (torch_script(node), environment_script(node)):
        assert "export LD_LIBRARY_PATH='/opt/my cuda'" in script


def test_without_an_environment_there_is_nothing_to_look_at() -> None:
    assert judge_torch(answer("absent\n"), context()).state == "skipped"
