import io

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.console import ProgressView
from smolcluster.observability.terminal import SteadyConsole


def shown(view_of: SteadyConsole) -> list[str]:
    assert isinstance(view_of.file, io.StringIO)
    return view_of.file.getvalue().splitlines()


def test_a_plain_line_says_how_much_is_done_of_how_much() -> None:
    console = SteadyConsole(file=io.StringIO(), width=200)
    values = {"samples_applied": 320.0, "total_samples": 1280.0, "total_steps": 4096.0}
    view = ProgressView(console, num_epochs=3)
    view.log(MetricRecord("step", 1024, 0, values))
    view.close()
    assert shown(console) == ["25% · epoch 1/3 · step 1,024/4,096"]


def test_what_is_stopped_shows_no_progress_any_more() -> None:
    console = SteadyConsole(file=io.StringIO(), width=200)
    view = ProgressView(console, interval_s=0.0)
    view.log(MetricRecord("step", 1, 0, {}))
    view.tick()
    view.close(show_last=False)
    view.log(MetricRecord("step", 2, 0, {}))
    view.tick()
    view.print("stopping")
    view.close()
    assert shown(console) == ["epoch 1 · step 1", "stopping"]
