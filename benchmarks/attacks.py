"""What is left of honest work while somebody attacks.

Two honest workers, paced by sleeping so that two cores suffice, each behind a proxy that delays every byte by
`--latency` milliseconds there and back, train with EDP and with SyncPS: undisturbed, and under

* flood: a client at an address of its own opens `--flood` connections a second and says nothing; it begins
  before the honest workers come
* hung: a third worker takes samples and never computes them; its heartbeats go on
* nan: a third worker whose weights turn NaN before each batch
* disk: the file system of the run is full for the middle half of the time (a tmpfs: root, Linux)
* streams: 1,000 clients ask the dashboard for the live stream and never read

The attacker is pinned to one core. What counts is the samples a second of the honest workers beside those of
the undisturbed run; the aim is within 10%.

    python benchmarks/attacks.py [--seconds 300] [--algorithm edp] [--case flood] [--json]
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, NoReturn

import common
from common import free_port, report, say
from processes import Child, fill_disk, small_disk
from proxy import Proxy
from smolcluster.runs.status import RunStatus, read_status

ALGORITHMS = ("edp", "syncps")
CASES = ("flood", "hung", "nan", "disk", "streams")
NUM_HONEST = 2
AIM = 0.9
ROLES = ("honest", "hung", "nan")
JOIN_S = 180.0
"""For so long the honest workers may try to join."""
SETTLE_S = 4.0
NUM_STREAMS = 1000
MAX_OPEN = 400
"""Connections of the flood that are open at a time: the oldest one is given up."""
ATTACKER = "127.0.0.66"


# --- the processes


def be_worker(role: str, algorithm: str, per_sample_s: float) -> int:
    """A worker's process, whose computing is replaced."""
    from smolcluster.algorithms.entry import main as process  # noqa: PLC0415
    from smolcluster.server.assignment import Assigned  # noqa: PLC0415

    compute = Assigned.compute

    def paced(own: Assigned, bench: Any) -> Any:
        if role == "hung":
            Event().wait()
        time.sleep(per_sample_s * own.num_samples)
        if role == "nan":
            bench.replica.params.fill_(float("nan"))
        return compute(own, bench)

    setattr(Assigned, "compute", paced)  # noqa: B010
    return process(algorithm, "worker")


def be_attacker(kind: str, target: str, rate: float) -> NoReturn:
    """Attack until it is killed; writes every second how many connections it has opened by then."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    host, _, port = target.rpartition(":")
    opened: deque[socket.socket] = deque()
    begun, count, told = time.monotonic(), 0, 0.0
    headers = os.environ.get("ATTACK_REQUEST", "").encode()
    while True:
        now = time.monotonic() - begun
        if now - told >= 1.0:
            told = now
            print(json.dumps({"opened": count, "seconds": now}), flush=True)
        if (kind == "streams" and count >= NUM_STREAMS) or count > rate * now:
            time.sleep(0.002)
            continue
        with suppress(OSError):
            sock = socket.create_connection((host, int(port)), 5.0, source_address=(ATTACKER, 0))
            if kind == "streams":
                sock.sendall(headers)
            opened.append(sock)
            count += 1
        if kind == "flood" and len(opened) > MAX_OPEN:
            opened.popleft().close()


class Cluster(common.Cluster):
    """One run's processes; the honest workers are behind a proxy."""

    def __init__(self, folder: Path, algorithm: str, options: argparse.Namespace) -> None:
        super().__init__(folder, algorithm, NUM_HONEST)
        self._algorithm, self._options = algorithm, options
        self._proxy = Proxy(self.port, options.latency / 2000)

    def __exit__(self, *_: object) -> None:
        self._proxy.close()
        super().__exit__()

    def begin(self) -> None:
        """Start the server and wait until it listens."""
        self.serve("num_epochs=1000000")
        self.owner.wait_for("listening")

    def work_as(self, role: str, worker_id: int) -> None:
        role_of = (__file__, "--be", role, self._algorithm, str(self._options.per_sample / 1000))
        self.work(worker_id, program=role_of, port=self._proxy.port)

    def attack(self, kind: str, target: str, rate: float, request: str = "") -> Child:
        """Start an attacker."""
        self.environ["ATTACK_REQUEST"] = request
        arguments = (__file__, "--be", kind, target, str(rate))
        return self.start(sys.executable, *arguments, forked=False)

    @property
    def status(self) -> RunStatus:
        return read_status(self.run.status)

    def all_train(self) -> bool:
        """Whether the honest workers do."""
        return sum(each.samples > 0 for each in self.status.workers) == NUM_HONEST

    def honest(self) -> tuple[float, int]:
        """When the server wrote, seconds since 1970, and the samples of the honest workers by then."""
        status = self.status
        done = sum(each.samples for each in status.workers if each.rank < NUM_HONEST)
        return status.updated_at.timestamp(), done


# --- the attacks


@contextmanager
def folder_for(case: str) -> Iterator[Path]:
    """A folder of its own; for a full disk a small file system."""
    with TemporaryDirectory(prefix="attacks-") as name:
        folder = Path(name, "files")
        with small_disk(folder, "64m") if case == "disk" else nullcontext():
            yield folder


def dashboard_request(cluster: Cluster) -> tuple[str, str]:
    """Start the dashboard; its address and what asks for a live stream."""
    arguments = ("-m", "smolcluster.cli", "dashboard", "--port", str(free_port()))
    page = cluster.start(sys.executable, *arguments, forked=False)
    page.wait_for("Ctrl-C")
    [(target, token)] = re.findall(r"http://([^/]+)/#token=(\S+)", page.output)
    asked = f"/api/runs/{cluster.status.run_id}/stream"
    bearer = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://{target}{asked}", headers=bearer)
    urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - raises if it is refused
    lines = (f"GET {asked} HTTP/1.1", f"Host: {target}", *map(": ".join, bearer.items()), "", "")
    head = "\r\n".join(lines)
    return target, head


def measure(algorithm: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of the honest workers, and what the attacker did."""
    with folder_for(case) as folder, Cluster(folder, algorithm, options) as cluster:
        cluster.begin()
        attacker = None
        if case == "flood":
            attacker = cluster.attack("flood", f"127.0.0.1:{cluster.port}", options.flood)
        for worker_id in range(1, NUM_HONEST + 1):
            cluster.work_as("honest", worker_id)
        try:
            cluster.wait_until(cluster.all_train, limit_s=JOIN_S)
        except TimeoutError as error:
            return {"samples_per_s": 0.0, "note": str(error), **_told(attacker)}
        time.sleep(SETTLE_S)
        before, note = cluster.honest(), ""
        if case in ROLES:
            cluster.work_as(case, NUM_HONEST + 1)
        if case == "streams":
            target, request = dashboard_request(cluster)
            attacker = cluster.attack("streams", target, NUM_STREAMS, request)
        if case == "disk":
            time.sleep(options.seconds / 4)
            ballast = folder / "ballast"
            fill_disk(ballast)
            time.sleep(options.seconds / 2)
            ballast.unlink()
            time.sleep(options.seconds / 4)
        else:
            time.sleep(options.seconds)
        after = cluster.honest()
        if (status := cluster.status).is_over:
            note = f"the run is over: {status.reason}"
        elapsed_s = max(options.seconds, after[0] - before[0])
        samples_per_s = (after[1] - before[1]) / elapsed_s
        return {"samples_per_s": samples_per_s, "note": note, **_told(attacker)}


def _told(attacker: Child | None) -> dict[str, float]:
    """How many connections a second the attacker opened."""
    if attacker is None:
        return {}
    last = json.loads(attacker.output.splitlines()[-1])
    return {"attacks": last["opened"], "attacks_per_s": last["opened"] / last["seconds"]}


def main() -> int:
    if sys.argv[1:2] == ["--be"]:
        kind, what, number = sys.argv[2:5]
        del sys.argv[1:5]
        if kind in ROLES:
            return be_worker(kind, what, float(number))
        be_attacker(kind, what, float(number))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="each case; 300 for the table")
    parser.add_argument("--algorithm", choices=ALGORITHMS, action="append", help="default: both")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--latency", type=float, default=100.0, help="ms there and back")
    parser.add_argument("--per-sample", type=float, default=10.0, help="ms of sleep a sample")
    parser.add_argument("--flood", type=float, default=450.0, help="connections a second")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    rows: list[tuple[str, ...]] = [
        ("algorithm", "case", "honest samples/s", "of undisturbed", "aim", "attacker", "")
    ]
    results = []
    for algorithm in options.algorithm or ALGORITHMS:
        found = measure(algorithm, "undisturbed", options)
        undisturbed = found["samples_per_s"]
        say(f"{algorithm}: {undisturbed:.1f} samples/s {found['note']}")
        rows.append((algorithm, "undisturbed", f"{undisturbed:.1f}", "", "", "", ""))
        for case in options.case or CASES:
            found = measure(algorithm, case, options)
            ratio = found["samples_per_s"] / undisturbed if undisturbed else 0.0
            say(f"{algorithm}, {case}: {ratio:.0%} {found['note']}")
            results.append({"algorithm": algorithm, "case": case, "ratio": ratio, **found})
            rate = f"{found['attacks_per_s']:.0f}/s" if "attacks_per_s" in found else ""
            cells = (f"{found['samples_per_s']:.1f}", f"{ratio:.0%}", f">= {AIM:.0%}", rate)
            rows.append((algorithm, case, *cells, found["note"]))
    title = f"Honest work under attack, {options.seconds:g} s a case"
    report(title, rows, {"seconds": options.seconds, "cases": results}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
