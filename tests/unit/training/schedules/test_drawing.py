"""A step as a table and as a picture."""

import csv
import io
from xml.etree import ElementTree

from smolcluster.training.schedules.drawing import csv_of, picture_of
from smolcluster.training.schedules.instructions import generate
from smolcluster.training.schedules.simulation import Boundary, Costs, Timeline, simulate


def timeline() -> Timeline:
    return simulate(generate("zero-bubble", 2, 3), [Costs(1, 1, 1)] * 2, [Boundary(0.5, 0.25)])


def test_a_row_for_each_span() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_of(timeline()))))
    assert len(rows) == 2 * 3 * 3 + 2 * 3
    assert rows[0] == {
        "lane": "rank 0",
        "op": "F",
        "microbatch": "0",
        "stage": "0",
        "start_s": "0",
        "end_s": "1",
    }
    sent = next(row for row in rows if row["lane"] == "link 0>1")
    assert (sent["start_s"], sent["end_s"]) == ("1", "1.5")


def test_a_panel_for_each_timeline() -> None:
    both = {"measured $x": timeline(), "simulated": timeline()}
    picture = picture_of(both)
    texts = [node.text or "" for node in ElementTree.fromstring(picture).iter() if node.text]  # noqa: S314
    assert any(text.startswith("measured $x: ") for text in texts)
    assert any(text.startswith("simulated: ") for text in texts)
    assert texts.count("link 1>0") == 2
    assert picture_of(both) == picture
    assert picture_of(both, "png").startswith(b"\x89PNG")
