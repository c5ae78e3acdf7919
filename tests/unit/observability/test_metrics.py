import pytest

from smolcluster.observability.metrics import MetricRecord, Metrics
from smolcluster.runs.series import RESERVED


class Recorder:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def log(self, record: MetricRecord) -> None:
        self.calls.append(record)

    def close(self) -> None:
        self.calls.append("close")


def test_every_sink_gets_every_record() -> None:
    sinks = [Recorder(), Recorder()]
    metrics = Metrics(sinks)
    record = MetricRecord("step", 1, 0, {"loss": 0.5})
    metrics.log(record)
    metrics.close()
    assert [sink.calls for sink in sinks] == [[record, "close"]] * 2


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_value_cannot_take_the_name_of_the_records_own_field(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be named '{name}'"):
        MetricRecord("step", 1, 0, {name: 1.0})
