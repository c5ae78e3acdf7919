"""Shows progress as a server does, until a line of standard input: `python progress_shown.py`."""

import sys
import threading

from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.console import ProgressView
from smolcluster.observability.terminal import SteadyConsole

STEP_S = 0.02
EVERY = 100
"""Steps between two lines of a log."""


def main() -> None:
    view = ProgressView(SteadyConsole(stderr=True), num_epochs=3)
    for number in range(4):  # a process logs some lines before its first step
        view.print(f"begun {number}")
    is_over = threading.Event()

    def wait_for_line() -> None:
        sys.stdin.readline()
        is_over.set()

    threading.Thread(target=wait_for_line, daemon=True).start()
    number = 0
    while not is_over.wait(STEP_S):
        number += 1
        values = {"loss": 0.5, "samples_per_s": 1000.0, "staleness": 1.5, "mb_per_s": 4.0}
        view.log(MetricRecord("step", number, 0, values | {"total_samples": 1e6}))
        view.tick()
        if number % EVERY == 0:
            view.print(f"line {number}")
    view.close()
    view.print("over")


if __name__ == "__main__":
    main()
