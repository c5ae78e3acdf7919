"""The launcher on three real hosts of one machine: how long launch, status and stop take.

The hosts are those of the launcher's tests (`tests/lab.py`): namespaces with an sshd each, so it takes root
on Linux. They have nothing at first: the first launch sends the code and makes environments, from this
machine's cache of packages. All processes share this machine's cores, on which three import PyTorch at once;
so the start is given beside one `import torch` alone.
"""

import argparse
import json
import time

from common import report
from lab import Host, Lab, obstacle

START_TARGET_S, STOP_TARGET_S, STATUS_TARGET_S = 15.0, 5.0, 1.0
CLUSTER = """
host_ip: {{mini1: "{server}", mini2: "{server}", pi5: "{server}"}}
server: mini1
workers: [mini2, pi5]
num_workers: 2
checkpoint_steps: 1000000
nodes: {{mini1: {{torch: pypi}}, mini2: {{torch: pypi}}, pi5: {{torch: pypi}}}}
"""
LAUNCH = "launch edp --config ~/cluster.yaml --train-config digits --detach --override num_epochs=100000 {}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of launch, status and stop on three hosts.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if reason := obstacle():
        raise SystemExit(reason)
    with Lab() as lab:
        first_s = first_launch(lab)
        times = [one_round(lab) for _ in range(options.rounds)]
    middle = {name: sorted(each[name] for each in times)[len(times) // 2] for name in times[0]}
    middle["first_s"] = first_s
    rows = [
        ("", "s (median)", "target"),
        ("first launch, which brings code and environments", f"{middle['first_s']:.1f}", ""),
        ("import torch alone", f"{middle['import_s']:.1f}", ""),
        (
            "launch, until all have joined, beyond one import",
            f"{middle['launch_s'] - middle['import_s']:.1f}",
            f"<= {START_TARGET_S:g}",
        ),
        ("status, with open connections", f"{middle['status_s']:.2f}", f"<= {STATUS_TARGET_S:g}"),
        (
            "stop, from the last checkpoint to the end of everything",
            f"{middle['stop_s']:.1f}",
            f"<= {STOP_TARGET_S:g}",
        ),
    ]
    report("three hosts", rows, middle, as_json=options.json)


def first_launch(lab: Lab) -> float:
    """Seconds of a launch onto hosts that have nothing yet."""
    lab.controller.checkout()
    lab.controller.prepare()
    lab.controller.write("cluster.yaml", CLUSTER.format(server=lab["mini1"].address))
    first_s = command(lab.controller, LAUNCH.format(""))
    command(lab.controller, "stop")
    return first_s


def one_round(lab: Lab) -> dict[str, float]:
    import_s = timed(
        lab["mini2"],
        "cd ~/.cache/smolcluster/projects/latest && .venv/bin/python -c 'import torch'",
    )
    launch_s = command(lab.controller, LAUNCH.format(""))
    time.sleep(3)
    command(lab.controller, "status")
    status_s = command(lab.controller, "status")
    command(lab.controller, "stop")
    ended = time.time()
    saved = (
        lab["mini1"].path("smolcluster/runs/latest/checkpoints/latest/state.json").stat().st_mtime
    )
    return {
        "import_s": import_s,
        "launch_s": launch_s,
        "status_s": status_s,
        "stop_s": ended - saved,
    }


def command(controller: Host, arguments: str) -> float:
    """Seconds that a command of smolcluster takes."""
    return timed(
        controller, f"cd smolcluster && WANDB_MODE=disabled .venv/bin/smolcluster {arguments}"
    )


def timed(host: Host, script: str) -> float:
    began = time.perf_counter()
    done = host.run(script, timeout_s=300)
    if done.returncode:
        raise SystemExit(json.dumps([script, done.stdout[-2000:], done.stderr[-2000:]]))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
