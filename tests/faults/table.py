"""The fault matrix as a table: what each fault leads to, and how soon it is noticed."""

from collections.abc import Sequence
from dataclasses import dataclass

from faults.cases import ALGORITHMS, Case, Ending, Played
from faults.proxy import POINTS, Fault

SIGNS = {
    Ending.TURNED_AWAY: "away",
    Ending.LOST: "lost",
    Ending.ENDED: "ended",
    Ending.OVER: "over",
}
TITLE = (
    "# Points of the protocol, times faults, times algorithms: how each case ended, and seconds until "
    "it was noticed\n\n"
    "`away`: the server turned the connection away; `lost`: it lost the worker; `over`: the run was over; "
    "`ended`: the ranks of a mesh ended, and were started again; –: nobody was lost. "
    "Every run went on and ended as one without a fault. Made by\n"
    '`FAULTS_TABLE=FILE .venv/bin/pytest -n 1 -m "" tests/faults/test_network_faults.py`.\n\n'
)
NO_FAULT_SEEN = "–"
NOT_PLAYED = ""


@dataclass(frozen=True)
class Entry:
    """What came of one case; times in seconds from the strike, None where there is none."""

    case: Case
    noticed_after_s: float | None
    back_after_s: float | None

    @classmethod
    def of(cls, case: Case, played: Played) -> "Entry":
        """The entry of a case that went as it must."""
        if case.ending is Ending.UNNOTICED:
            return cls(case, None, None)
        return cls(case, played.noticed_after_s(case.ending), played.back_after_s)

    def __str__(self) -> str:
        if self.noticed_after_s is None:
            return NO_FAULT_SEEN
        return f"{SIGNS[self.case.ending]} {self.noticed_after_s:.2f}"


def markdown(entries: Sequence[Entry]) -> str:
    """A row a point, a column a fault: the ending and the seconds until it was noticed."""
    cells = {str(entry.case): entry for entry in entries}
    head = ["algorithm", "point", *Fault, "noticed at the latest", "back at the latest"]
    rows = [head, ["---"] * len(head)]
    for algorithm in ALGORITHMS:
        for point in POINTS[algorithm]:
            row = [cells.get(str(Case(algorithm, point, fault))) for fault in Fault]
            played = [entry for entry in row if entry is not None]
            if played:
                noticed = _longest([entry.noticed_after_s for entry in played])
                back = _longest([entry.back_after_s for entry in played])
                texts = [NOT_PLAYED if entry is None else str(entry) for entry in row]
                rows.append([algorithm, point, *texts, noticed, back])
    return TITLE + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _longest(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{max(known):.2f} s" if known else NO_FAULT_SEEN
