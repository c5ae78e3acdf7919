"""The image that pods of a mesh run."""

import re
import shlex
import tomllib
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from smolcluster.configs.schema import KubernetesConfig
from smolcluster.launch.jobs.kubernetes import manifests
from smolcluster.launch.jobs.scheduler import Job
from smolcluster.launch.plan import PROGRAM
from smolcluster.runs.launched import LaunchedProcess

ROOT = Path(__file__).parents[2]
PROCESS = LaunchedProcess(node="kubernetes", role="ranks", run_dir="/r/mesh-1")
JOB = Job(PROCESS, PROGRAM, 4, 29500, 3)


def instructions() -> list[tuple[str, list[str]]]:
    """Each with its words."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    said = [shlex.split(line, comments=True) for line in lines]
    return [(words[0].upper(), words[1:]) for words in said if words]


def words_of(name: str) -> list[list[str]]:
    return [words for instruction, words in instructions() if instruction == name]


def test_what_is_copied_is_there_and_is_what_the_package_is_built_of() -> None:
    copied = {source for *sources, _ in words_of("COPY") for source in sources}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "src", project["readme"], *project.get("license-files", [])}
    assert needed <= copied


def test_its_python_is_one_that_the_package_takes() -> None:
    [[image]] = words_of("FROM")
    found = re.match(r"python:3\.(\d+)", image)
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert found is not None
    assert int(found[1]) >= int(least.removeprefix(">=3.").partition(",")[0])


def test_it_is_pinned_and_nothing_in_it_runs_as_root() -> None:
    [[image]] = words_of("FROM")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image)
    names = [name for name, _ in instructions()]
    [[user]] = words_of("USER")
    assert user not in ("root", "0")
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_what_pods_start_comes_with_the_package(kind: str) -> None:
    """No instruction of the image starts anything: pods name the command."""
    assert not words_of("ENTRYPOINT") and not words_of("CMD")
    config = KubernetesConfig.model_validate({"image": "a", "nodes": 1, "kind": kind})
    spec = manifests(JOB, config)[-1]["spec"]
    if kind == "trainjob":
        started = spec["trainer"]
    else:
        jobs = spec["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else spec
        [started] = jobs["template"]["spec"]["containers"]
    [command] = started["command"]
    assert command in {each.name for each in distribution("torch").entry_points}
    module = started["args"][started["args"].index("-m") + 1]
    assert find_spec(module) is not None
