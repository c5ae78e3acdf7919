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
import http.cookiejar
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, NoReturn

from common import report
from smolcluster.configs.spec import get_algorithm
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import RunStatus, read_status

ALGORITHMS = ("edp", "syncps")
CASES = ("flood", "hung", "nan", "disk", "streams")
NODES = ("pi5", "win", "macbook")
AIM = 0.9
ROLES = ("honest", "hung", "nan")
JOIN_S = 180.0
"""For so long the honest workers may try to join."""
SETTLE_S = 4.0
NUM_STREAMS = 1000
MAX_OPEN = 400
"""Connections of the flood that are open at a time: the oldest one is given up."""
ATTACKER = "127.0.0.66"
DISK_BYTES = 64 << 20


# --- the processes


def be_worker(role: str, algorithm: str, per_sample_s: float) -> int:
    """A worker's process, whose computing is replaced."""
    from smolcluster.algorithms.entry import main as process  # noqa: PLC0415
    from smolcluster.ps.assignment import Assigned  # noqa: PLC0415

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


class DelayProxy:
    """Passes bytes on to a port of this machine, each `one_way_s` seconds after it came."""

    def __init__(self, port: int, one_way_s: float) -> None:
        self._target, self._one_way_s = port, one_way_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for source, sink in ((client, server), (server, client)):
                    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(4096)
                    Thread(target=self._read, args=(source, waiting), daemon=True).start()
                    Thread(target=self._write, args=(sink, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: "queue.Queue[tuple[float, bytes]]") -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._one_way_s, data))

    def _write(self, sink: socket.socket, waiting: "queue.Queue[tuple[float, bytes]]") -> None:
        with suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    break
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class Cluster:
    """One run's processes, in a folder of their own."""

    def __init__(self, folder: Path, algorithm: str, options: argparse.Namespace) -> None:
        self.algorithm, self.options, self.folder = algorithm, options, folder
        self.runs = folder / "runs"
        self.runs.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SMOL")}
        self.environ = kept | {
            "XDG_CONFIG_HOME": str(folder),
            "SMOLCLUSTER_RUNS_DIR": str(self.runs),
            "PYTHONUNBUFFERED": "1",
        }
        self.port = free_port()
        self.proxy = DelayProxy(self.port, options.latency / 2000)
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *argv: str, **environ: str) -> Path:
        """Start a process; returns where its output goes."""
        output = self.folder / f"{name}.txt"
        with output.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, *argv],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.environ | environ,
            )
        self.children.append(child)
        return output

    def serve(self) -> None:
        """Start the server and wait until it listens."""
        output = self.start(
            "server",
            *(str(get_algorithm(self.algorithm).server), "--local", "--workers", "2"),
            *("--override", f"port={self.port}", "num_epochs=1000000", "threads=1"),
        )
        wait_for(lambda: "listening" in output.read_text(), "the server listens")

    def work(self, role: str, worker_id: int) -> None:
        """Start a worker."""
        per_sample_s = str(self.options.per_sample / 1000)
        self.start(
            f"worker-{worker_id}",
            *(__file__, "--be", role, self.algorithm, per_sample_s),
            *(str(worker_id), NODES[worker_id - 1], "--local"),
            *("--override", f"port={self.proxy.port}", "threads=1"),
        )

    def attack(self, kind: str, target: str, rate: float, request: str = "") -> Path:
        """Start an attacker."""
        arguments = (__file__, "--be", kind, target, str(rate))
        return self.start("attacker", *arguments, ATTACK_REQUEST=request)

    @property
    def status(self) -> RunStatus:
        """How the run stands."""
        return read_status(find_run(self.runs).status)

    def honest(self) -> tuple[float, int]:
        """When the server wrote, seconds since 1970, and the samples of the honest workers by then."""
        status = self.status
        done = sum(each.samples for each in status.workers if each.rank < 2)
        return status.updated_at.timestamp(), done

    def end(self) -> None:
        """Kill all that is left."""
        self.proxy.close()
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str, seconds: float = JOIN_S) -> None:
    """Wait until it holds.

    Raises:
        TimeoutError: it did not.
    """
    end = time.monotonic() + seconds
    while True:
        with suppress(Exception):
            if condition():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)


# --- the attacks


@contextmanager
def folder_for(case: str) -> Iterator[Path]:
    """A folder of its own; for a full disk a small file system."""
    with TemporaryDirectory(prefix="attacks-") as name:
        if case != "disk":
            yield Path(name)
            return
        options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", name]
        subprocess.run(["mount", *options], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def dashboard_request(cluster: Cluster) -> tuple[str, str]:
    """Start the dashboard; its address and what asks for a live stream."""
    output = cluster.start("page", "-m", "smolcluster.cli", "dashboard", "--port", str(free_port()))
    wait_for(lambda: "Ctrl-C" in output.read_text(), "the dashboard listens")
    [address] = re.findall(r"http://\S+", output.read_text())
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(address, timeout=30).close()
    target = address.partition("//")[2].partition("/")[0]
    cookies = "; ".join(f"{each.name}={each.value}" for each in jar)
    run = cluster.status.run_id
    head = f"GET /api/runs/{run}/stream HTTP/1.1\r\nHost: {target}\r\nCookie: {cookies}\r\n\r\n"
    return target, head


def fill(folder: Path) -> Path:
    """Leave no room on the file system of `folder`; returns what takes it."""
    file = folder / "ballast"
    with suppress(OSError), file.open("wb", buffering=0) as sink:
        while True:
            sink.write(b"\0" * 65536)
    with suppress(OSError), file.open("ab", buffering=0) as sink:
        while True:
            sink.write(b"\0" * 512)
    return file


def measure(algorithm: str, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of the honest workers, and what the attacker did."""
    with folder_for(case) as folder, ExitStack() as until_then:
        cluster = Cluster(folder, algorithm, options)
        until_then.callback(cluster.end)
        cluster.serve()
        attacker = None
        if case == "flood":
            attacker = cluster.attack("flood", f"127.0.0.1:{cluster.port}", options.flood)
        for worker_id in (1, 2):
            cluster.work("honest", worker_id)
        try:
            wait_for(
                lambda: sum(each.samples > 0 for each in cluster.status.workers) == 2, "all train"
            )
        except TimeoutError as error:
            return {"samples_per_s": 0.0, "note": str(error), **_told(attacker)}
        time.sleep(SETTLE_S)
        before, note = cluster.honest(), ""
        if case in ROLES:
            cluster.work(case, 3)
        if case == "streams":
            target, request = dashboard_request(cluster)
            attacker = cluster.attack("streams", target, NUM_STREAMS, request)
        if case == "disk":
            time.sleep(options.seconds / 4)
            ballast = fill(folder)
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


def _told(attacker: Path | None) -> dict[str, float]:
    """How many connections a second the attacker opened."""
    if attacker is None:
        return {}
    last = json.loads(attacker.read_text().splitlines()[-1])
    return {"attacks": last["opened"], "attacks_per_s": last["opened"] / last["seconds"]}


def main() -> int:
    """Measure, and print a table or JSON."""
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
        print(
            f"{algorithm}: {undisturbed:.1f} samples/s {found['note']}", file=sys.stderr, flush=True
        )
        rows.append((algorithm, "undisturbed", f"{undisturbed:.1f}", "", "", "", ""))
        for case in options.case or CASES:
            found = measure(algorithm, case, options)
            ratio = found["samples_per_s"] / undisturbed if undisturbed else 0.0
            print(f"{algorithm}, {case}: {ratio:.0%} {found['note']}", file=sys.stderr, flush=True)
            results.append({"algorithm": algorithm, "case": case, "ratio": ratio, **found})
            rate = f"{found['attacks_per_s']:.0f}/s" if "attacks_per_s" in found else ""
            cells = (f"{found['samples_per_s']:.1f}", f"{ratio:.0%}", f">= {AIM:.0%}", rate)
            rows.append((algorithm, case, *cells, found["note"]))
    title = f"Honest work under attack, {options.seconds:g} s a case"
    report(title, rows, {"seconds": options.seconds, "cases": results}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
