"""`launch.json`: written, read again, and refused when it is damaged."""

from smolcluster.runs.launched import Launched, LaunchedProcess

SERVER = LaunchedProcess(
    node="mini1",
    role="server",
    rank=None,
    ssh="me@mini1",
    run_dir="~/runs/edp-1",
    session="edp-1-server",
    argv=("python", "server.py", "it's ünï😀\n"),
    device="mps",
)
WORKER = LaunchedProcess(
    node="pi5", role="worker", rank=0, ssh=None, run_dir="/runs/edp-1", session="edp-1-worker1"
)
LAUNCHED = Launched(
    run_id="edp-1",
    algorithm="edp",
    port=6000,
    overrides=("num_epochs=5",),
    processes=(SERVER, WORKER),
)


def test_the_server_comes_first() -> None:
    assert LAUNCHED.server == SERVER
    assert LAUNCHED.workers == (WORKER,)
    assert [each.title for each in LAUNCHED.processes] == ["server mini1", "worker 1 (pi5)"]
    assert [each.stem for each in LAUNCHED.processes] == ["server-mini1", "worker-rank0-pi5"]


def test_a_run_is_local_if_all_of_it_is_here() -> None:
    assert not LAUNCHED.is_local
    here = SERVER.model_copy(update={"ssh": None})
    assert LAUNCHED.model_copy(update={"processes": (here, WORKER)}).is_local


def test_arguments_are_added_to_a_copy() -> None:
    assert WORKER.with_arguments("--a", "b").argv == ("--a", "b")
    assert WORKER.argv == ()
