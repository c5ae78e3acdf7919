"""`smolcluster doctor` on many machines against one: both take as long as the slowest machine.

Every command on a machine takes a second; the machines answer from memory, so that nothing else is
measured. The limit is twice the time of one machine.
"""

import argparse
import time

from common import report, seconds
from doctoring import cluster, healthy_nodes
from smolcluster.launch.doctor.examine import examine

TARGET = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of doctor on many machines and on one.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nodes", type=int, default=16, help="machines of the large cluster")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds that each command takes")
    arguments = parser.parse_args()
    one_s = doctor_s(1, arguments.delay)
    many_s = doctor_s(arguments.nodes, arguments.delay)
    results = {
        "nodes": arguments.nodes,
        "one_s": round(one_s, 2),
        "many_s": round(many_s, 2),
        "ratio": round(many_s / one_s, 3),
    }
    rows = [
        ("machines", "s", "ratio", "target"),
        ("1", f"{one_s:.2f}", "1", ""),
        (str(arguments.nodes), f"{many_s:.2f}", f"{many_s / one_s:.3f}", f"<= {TARGET:g}"),
    ]
    report(f"doctor, {arguments.delay:g} s a command", rows, results, as_json=arguments.json)


def doctor_s(num_nodes: int, delay_s: float) -> float:
    """Seconds that looking at a cluster takes whose server works too."""
    nodes = [f"node{number}" for number in range(num_nodes)]
    stated = cluster(
        host_ip=dict.fromkeys(nodes, "10.10.0.1"),
        workers=nodes,
        num_workers=num_nodes,
        server=nodes[0],
    )
    asked = healthy_nodes(stated, before=lambda *_: time.sleep(delay_s))
    return seconds(lambda: examine(asked))


if __name__ == "__main__":
    main()
