"""Who may join and whether there are enough, decided without a socket or a clock."""

import pytest

from smolcluster.configs.schema import ClusterConfig
from smolcluster.wire.membership import (
    Admitted,
    Member,
    Refused,
    admit,
    assign,
    free_worker_id,
    quorum,
)


def cluster(**changes: object) -> ClusterConfig:
    values: dict[str, object] = {
        "host_ip": {"mini1": "10.0.0.1", "pi5": "10.0.0.1", "win": "10.0.0.1"},
        "num_workers": 2,
        "workers": ["pi5", "win"],
        "server": "mini1",
    }
    return ClusterConfig.model_validate(values | changes)


def local_cluster() -> ClusterConfig:
    return cluster(
        host_ip={"mini1": "127.0.0.1", "worker1": "127.0.0.1", "worker2": "127.0.0.1"},
        workers=["worker1", "worker2"],
        local_names={"pi5": "worker1", "win": "worker2"},
        elastic=False,
    )


PI5 = Member(session_id=7, worker_id=1, node="pi5", instance="aaaa")


@pytest.mark.parametrize(
    ("members", "worker_id", "node", "instance", "decision"),
    [
        ([PI5], 2, "win", "bbbb", Admitted()),
        ([], 2, "pi5", "bbbb", Admitted()),  # ids need not be the place in the list
        ([PI5], 1, "pi5", "aaaa", Admitted(fences=7)),  # the same process comes back
        ([PI5], 3, "toaster", "bbbb", Admitted()),  # the cluster is elastic
        ([], 3, "pi5", "bbbb", Admitted()),
    ],
)
def test_who_is_admitted(
    members: list[Member], worker_id: int, node: str, instance: str, decision: Admitted
) -> None:
    assert admit(members, worker_id, node, instance, cluster()) == decision


@pytest.mark.parametrize(
    ("members", "worker_id", "node", "code", "named"),
    [
        ([PI5], 1, "win", "busy", ("worker id 1", "pi5")),
        ([], 1, "toaster", "node", ("toaster", "pi5")),
        ([], 3, "pi5", "worker-id", ("num_workers = 2",)),
    ],
)
def test_who_is_refused_and_only_a_live_duplicate_may_ask_again(
    members: list[Member], worker_id: int, node: str, code: str, named: tuple[str, ...]
) -> None:
    refused = admit(members, worker_id, node, "bbbb", cluster(elastic=code == "busy"))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s is not None) == (code, code == "busy")
    assert all(word in refused.sentence for word in named)


@pytest.mark.parametrize(
    ("node", "taken", "present", "number"),
    [
        ("win", {}, [], 2),  # its place in the list
        ("win", {1: "pi5", 2: "win"}, [1], 2),  # the number that it had
        ("win", {2: "toaster"}, [2], 3),  # its place is somebody else's
        ("toaster", {}, [], 3),  # the list's numbers are kept for those that it names
        ("toaster", {3: "kettle"}, [3], 4),
        ("toaster", {2**31: "kettle"}, [2**31], 3),  # one that took the last leaves the others
        ("toaster", {3: "kettle"}, [], 4),  # which may come back
        ("toaster", {3: "kettle", 4: "toaster"}, [1], 4),
        ("pi5", {1: "pi5"}, [1], 3),  # two workers on one machine, under another number
    ],
)
def test_a_free_number_is_ones_own_or_nobodys(
    node: str, taken: dict[int, str], present: list[int], number: int
) -> None:
    assert free_worker_id(node, taken, present, cluster()) == number


def test_a_name_belongs_to_the_living_worker_that_has_it() -> None:
    refused = assign([PI5], "pi5", {}, cluster())
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s is not None) == ("busy", True)
    assert assign([], "pi5", {1: "pi5"}, cluster()) == Admitted(worker_id=1)


def test_a_fixed_cluster_has_no_number_for_a_stranger() -> None:
    refused = assign([PI5], "toaster", {}, cluster(elastic=False))
    assert isinstance(refused, Refused)
    assert refused.code == "node"


def test_a_stage_of_a_worker_is_given_no_number_of_its_own() -> None:
    stages = {"pi5": {"stages": {"host_ip": {"pi5": "127.0.0.1", "mini1": "10.0.0.7"}}}}
    config = cluster(nodes=stages)
    refused = assign([], "mini1", {}, config)
    assert isinstance(refused, Refused)
    assert "mini1 is a stage of a worker" in refused.sentence
    assert assign([], "pi5", {}, config) == Admitted(worker_id=1)


@pytest.mark.parametrize(
    ("num_ready", "started", "waited_s", "verdict"),
    [
        (0, False, 0.0, "wait"),
        (1, False, 0.0, "wait"),
        (2, False, 0.0, "go"),
        (1, False, 60.0, "give up"),
        (1, True, 0.0, "go"),
        (0, True, 29.0, "wait"),
        (0, True, 30.0, "give up"),
    ],
)
def test_quorum(num_ready: int, started: bool, waited_s: float, verdict: str) -> None:
    config = cluster(min_workers=2, start_timeout_s=60.0, empty_cluster_timeout_s=30.0)
    decision = quorum(num_ready, config, started=started, waited_s=waited_s)
    assert decision.verdict == verdict
    if verdict == "give up":
        assert "_timeout_s" in decision.reason


def test_stages_are_called_so() -> None:
    config = cluster(min_workers=2)
    decision = quorum(1, config, started=False, waited_s=1e9, role="stage")
    assert "only 1 of 2 needed stages came" in decision.reason
    assert "start stages, then their worker again" in decision.reason
    assert quorum(2, config, started=False, waited_s=0.0, role="stage").reason.startswith("2 of")


@pytest.mark.parametrize("node", ["win", "worker2"])
def test_a_worker_of_one_machine_is_known_by_its_name_in_the_cluster_file_too(node: str) -> None:
    here = local_cluster()
    assert admit([PI5], 2, node, "bbbb", here) == Admitted()
    assert assign([PI5], node, {1: "pi5"}, here) == Admitted(worker_id=2)
    assert assign([PI5], node, {1: "pi5", 2: "worker2"}, here) == Admitted(worker_id=2)
    refusal = assign([PI5], "worker1", {1: "pi5"}, here)
    assert isinstance(refusal, Refused)
    assert refusal.code == "busy"
