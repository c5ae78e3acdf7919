"""Connections that fail at every point of the protocol, in every way: the run ends as if they had not.

A choice of the matrix is `slow`; the rest is `nightly`.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from faults import meshes
from faults.cases import ALGORITHMS, ALL_CASES, Algorithm, Case, Reference, check, play
from faults.proxy import POINTS, Fault
from faults.table import TITLE, Entry
from processes import Processes

ALWAYS = {
    Case("edp", "before_hello", Fault.CORRUPT),
    Case("edp", "proof", Fault.DUPLICATE),
    Case("edp", "payload", Fault.STALL),
    Case("edp", "state_transfer", Fault.RESET),
    Case("syncps", "challenge", Fault.RESET),
    Case("syncps", "welcome", Fault.TRUNCATE),
    Case("syncps", "header", Fault.THROTTLE),
    Case("syncps", "state_transfer", Fault.HALF_OPEN),
    Case("syncps", "broadcast", Fault.STALL),
    Case("syncps", "end", Fault.DELAY),
    Case("diloco", "payload", Fault.CORRUPT),
    Case("diloco", "push_to_ack", Fault.TRUNCATE),
    Case("diloco", "before_commit", Fault.DUPLICATE),
}


def cases(*algorithms: Algorithm) -> list[Any]:
    """Their part of the matrix, marked."""
    return [
        pytest.param(case, id=str(case), marks=[] if case in ALWAYS else [pytest.mark.nightly])
        for case in ALL_CASES
        if case.algorithm in algorithms
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("edp", "syncps", "diloco", "pipeline"))
def test_a_fault_makes_no_difference(
    case: Case,
    tmp_path: Path,
    reference: Reference,
    entries: list[Entry],
) -> None:
    played = play(case.algorithm, tmp_path, case)
    check(case, played, reference(case.algorithm))
    entries.append(Entry.of(case, played))


@pytest.mark.parametrize("case", cases("mesh"))
def test_a_mesh_goes_on_from_its_last_checkpoint(
    case: Case, processes: Processes, mesh_reference: meshes.PlayedMesh, entries: list[Entry]
) -> None:
    played = meshes.play(processes, case)
    meshes.check(case, played, mesh_reference)
    entries.append(Entry(case, played.noticed_after_s, None))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case.algorithm == "diloco"], ids=str
)
def test_a_fault_makes_no_difference_to_asynchronous_workers(
    case: Case, tmp_path: Path, reference: Reference
) -> None:
    check(case, play("diloco", tmp_path, case, mode="async"), reference("diloco", "async"))


def test_the_choice_has_every_point_and_every_fault() -> None:
    assert set(ALL_CASES) >= ALWAYS
    of_servers = {case.point for case in ALL_CASES if case.algorithm != "mesh"}
    assert {case.point for case in ALWAYS} == of_servers
    assert {case.fault for case in ALWAYS} == set(Fault)


def test_the_table_of_results_has_every_algorithm_and_point() -> None:
    table = (Path(__file__).parents[2] / "benchmarks" / "results" / "faults.md").read_text("utf-8")
    assert table.startswith(TITLE)
    rows = re.findall(r"^\| (\w+) \| (\w+) \|", table.removeprefix(TITLE), re.MULTILINE)
    assert rows[1:] == [(each, point) for each in ALGORITHMS for point in POINTS[each]]
