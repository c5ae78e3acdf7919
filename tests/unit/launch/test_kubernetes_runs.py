"""A run on Kubernetes is launched, stopped and goes on by the commands of every run."""

from pathlib import Path

import pytest

from fake_kubectl import FakeCluster
from smolcluster.cli import main
from smolcluster.runs.paths import RunPaths, find_run
from tiers import at_night

OVERRIDES = (
    *("kubernetes.image=me/smolcluster", "kubernetes.nodes=2", "kubernetes.claim=runs"),
    *("kubernetes.secrets.MESH_SECRET=mesh/secret", "encryption=off"),
)
OBJECTS = {"Job", "Service", "ConfigMap"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    made = FakeCluster(tmp_path / "objects")
    made.install(tmp_path)
    return made


@pytest.fixture
def run(cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunPaths:
    """One that has been launched, and left, to which nobody can attach."""
    words = ("launch", "mesh", "--on", "kubernetes", "--detach", "--override", *OVERRIDES)
    assert main(list(words)) == 0
    assert "goes on: status, logs and stop" in capsys.readouterr().out
    assert cluster.names() == OBJECTS
    return find_run(tmp_path / "runs")


def arguments(cluster: FakeCluster) -> list[str]:
    """Of each pod."""
    [container] = cluster.only("Job")["spec"]["template"]["spec"]["containers"]
    found: list[str] = container["args"]
    return found


def test_a_run_that_pods_have_cannot_be_resumed(run: RunPaths) -> None:
    assert main(["resume", run.run_id, "--detach"]) != 0


def test_a_run_that_is_stopped_leaves_no_object_and_goes_on(
    run: RunPaths, cluster: FakeCluster
) -> None:
    """Stopping waits for the pods, in which rank 0 saves its last checkpoint."""
    assert main(["stop", run.run_id]) == 0
    assert cluster.names() == set()
    assert main(["resume", run.run_id, "--detach"]) == 0
    assert cluster.names() == OBJECTS
    assert run.run_id in arguments(cluster)


@pytest.mark.parametrize("condition", ["Failed", *at_night("Complete")])
@pytest.mark.parametrize("overrides", [(), ("num_epochs=5",)])
def test_a_run_goes_on_whose_job_is_over(
    run: RunPaths, cluster: FakeCluster, condition: str, overrides: tuple[str, ...]
) -> None:
    cluster.end_job(condition)
    told = ("--override", *overrides) if overrides else ()
    assert main(["resume", run.run_id, "--detach", *told]) == 0
    assert "status" not in cluster.only("Job")
    assert set(overrides) <= set(arguments(cluster))
    assert main(["resume", run.run_id, "--detach"]) != 0  # it runs again
