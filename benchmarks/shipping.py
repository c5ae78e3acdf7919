"""The built-in push of logs: 10,000 lines to a receiver that is down for a while in between.

The receiver is that of the tests (`tests/loki.py`), which follows Loki's documented push API. Lines are
written at an even pace by two logs; the receiver stops listening after a third of them.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import report
from loki import Receiver
from smolcluster.observability.shipping.loki import LokiClient
from smolcluster.observability.shipping.shipper import Shipper
from smolcluster.observability.shipping.spool import Spool
from smolcluster.runs.files import LineWriter, utc_timestamp

STEMS = ("server-mini1", "worker-rank0-mini2")
CATCH_UP_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description="10,000 log lines, the receiver down in between.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--down", type=float, default=30.0, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.lines, options.down)
    rows = [("", ""), *((name.replace("_", " "), str(value)) for name, value in results.items())]
    report("pushing logs", rows, results, as_json=options.json)
    raise SystemExit(int(bool(results["lost"] or not results["in_order"])))


def measure(folder: Path, num_lines: int, down_s: float) -> dict[str, object]:
    """Ship so many lines while the receiver is down for `down_s` seconds; what came of it."""
    receiver, asked, warnings = Receiver(), threading.Event(), list[str]()
    loki = LokiClient(receiver.url)
    shipper = Shipper(Spool(folder), loki.push, warnings.append)
    shipping = threading.Thread(target=shipper.run, args=(asked, CATCH_UP_S))
    shipping.start()
    writing = threading.Thread(target=write, args=(folder, num_lines, down_s))
    start = time.monotonic()
    writing.start()
    receiver.wait_for(lambda: len(receiver.received.texts()) >= num_lines // 3, CATCH_UP_S)
    receiver.down()
    time.sleep(down_s)
    before, up_again = len(receiver.received.texts()), time.monotonic()
    receiver.up()
    writing.join()
    receiver.wait_for(lambda: len(receiver.received.texts()) >= num_lines, CATCH_UP_S)
    end = time.monotonic()
    asked.set()
    shipping.join()
    loki.close()
    receiver.down()
    came = [receiver.received.messages(host=stem, level="INFO") for stem in STEMS]
    sent = [
        [str(n) for n in range(num_lines) if n % len(STEMS) == log] for log in range(len(STEMS))
    ]
    return {
        "lines": num_lines,
        "down_s": down_s,
        "lost": num_lines - sum(len(set(lines)) for lines in came),
        "in_order": came == sent and receiver.received.is_in_order,
        "sent_twice": receiver.received.num_repeated,
        "pushed_before_it_was_up_again": before,
        "seconds_from_then_to_the_last_line": round(end - up_again, 1),
        "seconds": round(end - start, 1),
        "warnings": len(warnings),
    }


def write(folder: Path, num_lines: int, over_s: float) -> None:
    """Write lines to the logs by turns, all of them within `over_s` seconds."""
    logs = [LineWriter(folder / f"{stem}.log", warn=sys.exit) for stem in STEMS]
    start = time.monotonic()
    for n in range(num_lines):
        time.sleep(max(0.0, start + over_s * n / num_lines - time.monotonic()))
        ts = utc_timestamp(time.time())
        log = logs[n % len(logs)]
        log.append({"ts": ts, "level": "INFO", "message": str(n)})
        log.flush()
    for log in logs:
        log.close()


if __name__ == "__main__":
    main()
