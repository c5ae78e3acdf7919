"""`servers: auto`: from what links carry to the hosts of a launch, without any machine."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smolcluster.configs.spec import get_algorithm
from smolcluster.launch.advise import run
from smolcluster.launch.advise.run import with_stores_chosen
from smolcluster.launch.links import Way
from smolcluster.launch.requests import Resolved, request_of, resolved

CLUSTER = """
host_ip: {mini1: 10.0.0.1, pi5: 10.0.0.1, win: 10.0.0.1, mac: 10.0.0.1}
server: mini1
workers: [pi5, win, mac]
num_workers: 3
servers: auto
nodes: {pi5: {ssh: me@pi5}, win: {ssh: me@win}, mac: {ssh: me@mac}, mini1: {ssh: local}}
"""

Chosen = Callable[..., tuple[Resolved, list[str]]]


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """What is launched when each worker's link carries so many MB/s, the server's 10, and what was said."""

    def choose(
        rates: Mapping[str, float], algorithm: str = "syncps", *overrides: str, **more: Any
    ) -> tuple[Resolved, list[str]]:
        (tmp_path / "cluster.yaml").write_text(CLUSTER)
        request = request_of(
            local=False,
            num_workers=None,
            config=str(tmp_path / "cluster.yaml"),
            train_config="stdlib",
            overrides=overrides,
        )
        request = replace(request, algorithm=get_algorithm(algorithm), **more)
        share = 10 / len(rates)
        ways = {
            node: Way("10.0.0.1", "eth0", 1e-3, rate, rate, "fast", share, share)
            for node, rate in rates.items()
        }
        monkeypatch.setattr(run, "measure_all_ways", lambda *_: ways)
        said: list[str] = []
        return with_stores_chosen(resolved(request, local=False), said.append), said

    return choose


@pytest.mark.parametrize("algorithm", ["syncps", "diloco"])
def test_fast_links_host_and_a_slow_one_does_not(chosen: Chosen, algorithm: str) -> None:
    asked, said = chosen({"pi5": 0.1, "win": 10, "mac": 10}, algorithm)
    cluster = asked.settings.cluster
    assert cluster.servers != "auto"
    assert set(cluster.store_nodes) == {"mini1", "win", "mac"}
    assert cluster.store_nodes[0] == "mini1"
    assert cluster.store_shares is not None
    assert sum(cluster.store_shares) == pytest.approx(1, abs=0.05)
    asked.checked()
    assert len(said) == 1
    assert "win" in said[0]


@pytest.mark.parametrize(
    ("rates", "algorithm"),
    [
        ({"pi5": 0.1, "win": 0.1, "mac": 0.1}, "syncps"),
        ({"pi5": 0.1, "win": 0.1, "mac": 0.1}, "diloco"),
    ],
)
def test_where_other_hosts_do_not_help_the_server_has_all(
    chosen: Chosen, rates: Mapping[str, float], algorithm: str
) -> None:
    asked, said = chosen(rates, algorithm)
    assert not asked.request.overrides
    assert said == [
        "stores: all on mini1; other hosts would make it no faster on these links, or cannot hold parts of "
        "what is trained so"
    ]


@pytest.mark.parametrize("optimizer", ["auto", "muon"])
def test_hosts_that_a_run_would_refuse_are_not_chosen(chosen: Chosen, optimizer: str) -> None:
    rates = {"pi5": 0.1, "win": 10, "mac": 10}
    assert len(chosen(rates, "edp")[0].settings.cluster.store_nodes) > 1
    asked, _ = chosen(rates, "edp", f"optimizer={optimizer}")
    assert asked.settings.cluster.store_nodes == ("mini1",)
    asked, _ = chosen(rates, "syncps", f"optimizer={optimizer}")
    assert len(asked.settings.cluster.store_nodes) > 1
    assert asked.settings.train.optimizer == "muon"


def test_loops_of_ones_own_have_one_server(chosen: Chosen) -> None:
    asked, said = chosen({"pi5": 10, "win": 10, "mac": 10}, script="train.py")
    assert not asked.request.overrides
    assert not said
