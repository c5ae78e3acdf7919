"""Generators go on after a block as if it had drawn nothing, whatever other threads do with them."""

import gc
import random
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

import smolcluster
from processes import Processes
from smolcluster.utils.isolated_rng import forked_rng, isolated_rng

SOURCE = Path(smolcluster.__file__).parent
SEEDING_BESIDE = """
import gc, threading, time, torch
from smolcluster.utils.isolated_rng import forked_rng

def seed():
    while True:
        torch.default_generator.manual_seed(1)

threading.Thread(target=seed, daemon=True).start()
gc.callbacks.append(lambda *_: time.sleep(0.0001))  # lets the other thread run, as a freed tensor does
gc.set_threshold(1)
for _ in range(5):
    with forked_rng():
        pass
"""


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311 - no secret


def seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_what_a_block_draws_has_no_effect_on_what_follows() -> None:
    seeded()
    expected = drawn()
    seeded()
    with isolated_rng(seed=2):
        first = drawn()
    assert drawn() == expected
    with isolated_rng(seed=2):
        assert drawn() == first
    torch.manual_seed(1)
    with forked_rng():
        torch.rand(3)
    assert float(torch.rand(())) == expected[2]


def test_a_thread_that_seeds_while_garbage_is_collected_hangs_nobody(tmp_path: Path) -> None:
    program = tmp_path / "seeding.py"
    program.write_text(SEEDING_BESIDE)
    with Processes(tmp_path) as processes:
        assert processes.start(sys.executable, str(program)).wait() == 0


def test_garbage_waits_while_generators_are_forked_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, meanwhile = torch.random.fork_rng, list[bool]()

    def noted(devices: list[torch.device]) -> AbstractContextManager[None]:
        meanwhile.append(gc.isenabled())
        return fork(devices)

    monkeypatch.setattr(torch.random, "fork_rng", noted)
    with forked_rng():
        assert gc.isenabled()
    gc.disable()
    try:
        with forked_rng():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert meanwhile == [False, False]


def test_generators_are_forked_in_one_place() -> None:
    called = re.compile(r"fork_rng\(|get_rng_state\(")
    files = {file.name for file in SOURCE.rglob("*.py") if called.search(file.read_text("utf-8"))}
    assert files == {"isolated_rng.py"}
