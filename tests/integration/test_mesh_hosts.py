"""The command that a guide to training on several nodes gives for each rank, on two hosts with four each."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from processes import Child, Processes
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import read_summary
from texts import write_text

pytestmark = pytest.mark.nightly

ADDRESSES = "192.168.1.100", "192.168.1.101"
RANKS_PER_HOST = 4
COMMAND = (
    "-m smolcluster.distributed_training --world-size 8 --rank {rank} --master-addr 192.168.1.100 "
    "--master-port 29500 --hidden-size 16 --batch-size 2 --override encryption=off"
)
TEXT = {
    "SMOLCLUSTER_DATA__NAME": "text",
    "SMOLCLUSTER_MODEL__MAX_SEQ_LEN": "16",
    "SMOLCLUSTER_MODEL__NUM_LAYERS": "1",
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable, whose only network that is."""
    names = [f"mesh-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespace can be made here")
    try:
        peer = ("peer", "name", "eth0", "netns", names[1])
        ip("link", "add", "name", "eth0", "netns", names[0], "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def test_two_hosts_with_four_ranks_each_train_by_the_command_of_each_rank(
    processes: Processes, hosts: list[str]
) -> None:
    text = write_text(processes.folder / "text.txt", 200)
    cache = {"XDG_CACHE_HOME": str(processes.folder / "cache")}
    processes.environ |= {**TEXT, **cache, "SMOLCLUSTER_DATA__ROOT": str(text)}

    def start(rank: int) -> Child:
        enter = ("ip", "netns", "exec", hosts[rank // RANKS_PER_HOST], sys.executable)
        return processes.start(*enter, *COMMAND.format(rank=rank).split(), forked=False)

    ranks = [start(rank) for rank in range(2 * RANKS_PER_HOST)]
    for child in ranks:
        assert child.wait() == 0, child.output
    summary = read_summary(find_run(processes.runs).summary)
    assert summary.samples_applied == summary.train_samples
    assert "training GPT on 8 ranks, dp 8" in ranks[0].output
