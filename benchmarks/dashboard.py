"""How long the dashboard takes to open a long run.

Makes a run of a million steps (or `--steps N`) as the server writes them, with reports of three workers and
evaluations, opens it with a server of its own, and times from the request until the first byte of
`/api/runs/…/series`, the first time and again. `cat` of `metrics.jsonl` is the limit that reading all of it
would meet, and `series.json` spares.

    python benchmarks/dashboard.py [--steps 1000000] [--json FILE]
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import uvicorn

from smolcluster.launch.watch.page import Writer
from smolcluster.observability.dashboard.app import Views, make_app
from smolcluster.observability.dashboard.serve import bound
from smolcluster.runs.events import Evaluated, EventLog
from smolcluster.runs.files import json_line, utc_timestamp
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.series import SeriesFile
from smolcluster.utils.units import format_bytes

LIMIT_S = 2.0
STEPS_PER_S = 10
REPORT_EVERY = 100
EVALUATE_EVERY = 5000
NODES = ("mini2", "pi5", "macbook")


def make_run(root: Path, num_steps: int) -> RunPaths:
    """A run of so many steps; each step a tenth of a second after the one before."""
    paths = create_run(root, "edp-20261101-000000-long")
    begun = time.time() - num_steps / STEPS_PER_S
    with paths.metrics.open("wb", buffering=1 << 20) as file:
        for step in range(1, num_steps + 1):
            file.write(step_line(step, num_steps, begun + step / STEPS_PER_S))
            if step % REPORT_EVERY == 0:
                for rank in range(len(NODES)):
                    file.write(report_line(step, rank, begun + step / STEPS_PER_S))
    events = EventLog(paths.events, "a2ae6ec7775544bd", warn=sys.exit)
    for step in range(EVALUATE_EVERY, num_steps + 1, EVALUATE_EVERY):
        events.write(Evaluated(epoch=0, step=step, val_loss=2.0 / math.log(step)))
    events.close()
    SeriesFile(paths, warn=sys.exit).close()
    return paths


def head(kind: str, step: int, rank: int, moment: float) -> dict[str, object]:
    """What each record begins with."""
    return {
        "ts": utc_timestamp(moment),
        "kind": kind,
        "incarnation": "a2ae6ec7775544bd",
        "step": step,
        "epoch": 0,
        "rank": rank,
        "node": NODES[rank],
    }


def step_line(step: int, num_steps: int, moment: float) -> bytes:
    """A step's record, with the values that EDP reports."""
    values = {
        "loss": 2.3 / math.sqrt(step) + 0.1 * math.sin(step),
        "lr": 0.1 * (1 - step / num_steps),
        "samples_applied": step * 32,
        "total_samples": num_steps * 32,
        "total_steps": num_steps,
        "samples_per_s": 320.123456789 + math.cos(step),
        "mb_per_s": 20.123456789,
        "grad_norm": 1.0123456789 + 0.1 * math.cos(step),
        "start": step * 32 % 60000,
        "stop": step * 32 % 60000 + 32,
        "staleness": step % 3,
    }
    return json_line(head("step", step, step % len(NODES), moment) | values)


def report_line(step: int, rank: int, moment: float) -> bytes:
    """What a worker reports of itself."""
    shares = {f"share/{phase}": 0.12 for phase in ("data", "forward", "backward", "send", "wait")}
    values = {"steps_per_s": 3.3, "samples_per_s": 106.0, "step_s": 0.3, "cpu": 2.1 + rank}
    values |= {"memory_bytes": 4e8 + step, "sent_bytes_per_s": 1e6, "rtt_s": 0.001, "queue": 0.0}
    return json_line(head("worker", step, rank, moment) | values | shares)


def timed(url: str) -> tuple[float, int]:
    command = ["curl", "-sS", "-o", "/dev/null"]
    command += ["-w", "%{time_starttransfer} %{size_download} %{http_code}", url]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    seconds, nbytes, code = told.split()
    if code != "200":
        raise SystemExit(f"{url} was answered with {code}")
    return float(seconds), int(nbytes)


def cold_read_s(path: Path) -> float:
    """Seconds in which the whole file is read."""
    start = time.perf_counter()
    subprocess.run(["cat", str(path)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def serve_and_time(paths: RunPaths) -> dict[str, float]:
    """Serve the run's folder, and time the first and the second opening."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with bound("127.0.0.1", 0) as listener:
        app = make_app(Views(paths.root.parent), Writer().write)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/api/runs/{paths.run_id}/series"
            used_s = time.process_time()
            first_s, nbytes = timed(url)
            used_s = time.process_time() - used_s
            again_s, _ = timed(url)
        finally:
            server.should_exit = True
            thread.join(10)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "first_s": first_s,
        "first_cpu_s": used_s,
        "again_s": again_s,
        "answer_bytes": nbytes,
        "grown_kib": grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_run(Path(folder), arguments.steps)
        size = paths.metrics.stat().st_size
        found = serve_and_time(paths) | {
            "steps": arguments.steps,
            "metrics_bytes": size,
            "cat_s": cold_read_s(paths.metrics),
        }
    print(f"metrics.jsonl of {arguments.steps:,} steps    {format_bytes(size):>10}")
    print(f"`cat` of it                      {found['cat_s']:8.2f} s")
    print(f"first byte of the curves         {found['first_s']:8.2f} s   (limit {LIMIT_S:g} s)")
    print(f"processor time of it             {found['first_cpu_s']:8.2f} s")
    print(f"the same again                   {found['again_s']:8.2f} s")
    print(f"answer                           {format_bytes(found['answer_bytes']):>10}")
    print(f"memory grown by at most          {format_bytes(1024 * found['grown_kib']):>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(found["first_s"] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
