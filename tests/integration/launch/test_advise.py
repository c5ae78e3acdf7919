"""`smolcluster advise` on real hosts with links of known speed."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from launching import LAUNCH_TIMEOUT_S, STORIES_TIMEOUT_S, Launching

FAST_MBIT, SLOW_MBIT = 80.0, 20.0
SHAPES = {"mini1": FAST_MBIT, "mini2": FAST_MBIT, "pi5": SLOW_MBIT}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(STORIES_TIMEOUT_S)]


@pytest.fixture
def shaped(launching: Launching) -> Iterator[Launching]:
    for name, mbit in SHAPES.items():
        launching.lab[name].shape(mbit)
    yield launching
    for name in SHAPES:
        launching.lab[name].unshape()


def advise(launching: Launching, *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the document, and what was said meanwhile."""
    command = launching.command("advise", "--train-config", "digits", "--json", *words)
    done = launching.run(command, timeout_s=2 * LAUNCH_TIMEOUT_S)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_links_are_as_fast_as_they_are_shaped(shaped: Launching) -> None:
    shaped.make_ready()
    code, document, _ = advise(shaped, "--config", "cluster.yaml", "--no-sync")
    assert code == (0 if document["distribute"] else 4)
    links = document["links"]
    for node in ("mini2", "pi5"):
        link, expected = links[node], SHAPES[node] / 8
        assert link["up_mb_s"] == pytest.approx(expected, rel=0.3)
        assert link["down_mb_s"] == pytest.approx(expected, rel=0.3)
    together = sum(links[node]["crowd_up_mb_s"] for node in links)
    assert together < 1.3 * FAST_MBIT / 8, "the server's link carries no more"
    assert set(document["machines"]) == {"mini1", "mini2", "pi5"}
    assert {each["algorithm"] for each in document["options"]} >= {"edp", "syncps"}
    shaped.wait_until_clean()


def test_without_the_servers_machine_nothing_can_be_said(launching: Launching) -> None:
    launching.make_ready()
    launching.write_config("headless.yaml", {"mini1": {"ssh": "mini1.nowhere"}})
    command = launching.command("advise", "--config", "headless.yaml", "--no-sync")
    done = launching.run(command)
    assert done.returncode == 1, shlex.join(command)
    assert done.stderr.splitlines()[-1].startswith("error: nothing can be said without mini1")
