"""Some steps of all ranks as `torch.profiler` sees them, in one file for chrome://tracing or Perfetto.

Each rank writes its trace into its run's folder, and sends it to rank 0, which merges them: the process of an
event is its rank then. Clocks of several machines are taken as they are.
"""

import gzip
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.configs.schema import ProfileConfig
from smolcluster.runs.files import write_whole
from smolcluster.runs.paths import RunPaths

MERGED = "trace.json"
MOST_ALLOCATIONS = 100_000
"""That a snapshot of a GPU's memory tells of."""
Trace = Mapping[str, Any]
"""A Chrome trace: its `traceEvents`, whose `ts` are microseconds after `baseTimeNanoseconds`."""


class StepProfiler:
    """Records this rank's steps; all ranks must take them alike."""

    def __init__(
        self, config: ProfileConfig, groups: Groups, folder: Path, log: logging.Logger
    ) -> None:
        """`folder`: the run's."""
        self._config, self._groups, self._log = config, groups, log
        self._folder = RunPaths(folder).profile
        self._num_steps = 0
        self._has_memory = groups.device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._has_memory:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profile = profile(
            activities=activities,
            schedule=schedule(
                wait=config.wait, warmup=config.warmup, active=config.active, repeat=1
            ),
            record_shapes=True,
        )
        self._profile.start()

    def stepped(self) -> None:
        """A step was taken; the last one that is recorded ends with an exchange among all ranks."""
        self._num_steps += 1
        if self._num_steps < self._config.num_steps:
            self._profile.step()
        elif self._num_steps == self._config.num_steps:
            self._profile.stop()
            self._write()

    def close(self) -> None:
        """The run is over; if that was too early, rank 0 says so."""
        if self._num_steps >= self._config.num_steps:
            return
        self._num_steps = self._config.num_steps
        self._profile.stop()
        if self._groups.rank == 0:
            self._log.warning(
                "there is no profile: the run was over before step %d of this process; lower profile.wait or "
                "profile.active",
                self._config.num_steps,
            )

    def _write(self) -> None:
        self._groups.note("writing the profile")
        self._folder.mkdir(exist_ok=True, parents=True)
        own = self._folder / f"rank-{self._groups.rank}.json"
        self._profile.export_chrome_trace(str(own))
        if self._has_memory:
            from torch.cuda._memory_viz import trace_plot  # noqa: PLC0415 - for GPUs alone

            page = trace_plot(torch.cuda.memory._snapshot())  # type: ignore[no-untyped-call]
            own.with_suffix(".memory.html").write_text(page, encoding="utf-8")
            torch.cuda.memory._record_memory_history(enabled=None)
        hosts = self._groups.all_told(self._groups.watch.node)
        traces = [json.loads(gzip.decompress(each)) for each in self._gathered(own.read_bytes())]
        if self._groups.rank == 0:
            file = self._folder / MERGED
            write_whole(file, json.dumps(merged(traces, hosts)).encode())
            self._log.info(
                "the profile of %d steps of %d ranks is %s: open it at https://ui.perfetto.dev",
                self._config.active,
                len(traces),
                file,
            )

    def _gathered(self, content: bytes) -> Iterator[bytes]:
        """On rank 0 what each rank has, compressed; on others nothing."""
        packed = gzip.compress(content, compresslevel=1)
        device, rank = self._groups.device, self._groups.rank
        sizes = self._groups.all_told(len(packed))
        if rank != 0:
            dist.send(torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device), dst=0)
            return
        yield packed
        for source, size in list(enumerate(sizes))[1:]:
            self._groups.note(f"waiting for the profile of rank {source}", waits=True)
            received = torch.empty(size, dtype=torch.uint8, device=device)
            dist.recv(received, src=source)
            yield received.cpu().numpy().tobytes()


def merged(traces: Sequence[Trace], hosts: Sequence[str]) -> dict[str, Any]:
    """One Chrome trace of the traces of all ranks, in order of ranks."""
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    first = min(bases, default=0)
    events: list[Trace] = []
    for rank, (trace, host) in enumerate(zip(traces, hosts, strict=True)):
        named = {"ph": "M", "pid": rank, "tid": 0}
        events.append({**named, "name": "process_name", "args": {"name": f"rank {rank} on {host}"}})
        events.append({**named, "name": "process_sort_index", "args": {"sort_index": rank}})
        events += _of_rank(trace["traceEvents"], rank, (bases[rank] - first) / 1000)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": first, "traceEvents": events}


def _of_rank(events: Sequence[Mapping[str, Any]], rank: int, later_us: float) -> Iterator[Trace]:
    for event in events:
        if event.get("ph") == "M" and str(event.get("name")).startswith("process_"):
            continue
        changed = {**event, "pid": rank}
        if "ts" in event:
            changed["ts"] = event["ts"] + later_us
        if "id" in event:  # joins the ends of an arrow, and is unique in a process alone
            changed["id"] = f"{rank}.{event['id']}"
        yield changed
