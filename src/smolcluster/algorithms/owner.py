"""A process that owns a run: claims it, opens its records, trains, and leaves what a run leaves behind.

That is the server of a cluster, or the one process of `train`.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from smolcluster.algorithms.claim import Claimed, claim_run
from smolcluster.algorithms.context import ServerContext, check_resumable
from smolcluster.algorithms.observed import metrics_served
from smolcluster.configs.begun import remember_workload
from smolcluster.configs.resolve import load_resolved
from smolcluster.configs.schema import AlgorithmName, ClusterConfig, RunConfig, Settings
from smolcluster.configs.spec import spec_of
from smolcluster.data.marks import SAME_DATA, SAME_ORDER, first_difference
from smolcluster.errors import CheckpointError, SmolclusterError
from smolcluster.observability.curves import draw_curves
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.report.page import write_report
from smolcluster.observability.terminal import SteadyConsole, shown_text
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.runs.asked import ASKED
from smolcluster.runs.events import RunStarted
from smolcluster.runs.files import write_whole
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import StatusFile
from smolcluster.runs.summary import Summary, sample_shown, table, write_summary
from smolcluster.server.records import open_records, open_run
from smolcluster.server.report import never_begun
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.checkpoint import CheckpointStore
from smolcluster.training.first_loss import first_losses
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES
from smolcluster.training.workload import Workload
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.utils.device import pick_device, use_threads
from smolcluster.utils.folders import user_state
from smolcluster.utils.stopping import StopRequest
from smolcluster.utils.words import as_command, show
from smolcluster.wire.security import Secret

LOCAL_BUCKET_BYTES = 4 << 20
"""Took a third less CPU a step than 1 MiB: `benchmarks/results/exchange.md`."""


@dataclass(frozen=True)
class Owner:
    """A process that owns a run: what it runs, and on which machine."""

    algorithm: AlgorithmName
    role: str
    node: str
    settings: Settings
    secret: Secret | None = None
    workload: Workload | None = None
    """What is trained; None: what the settings name."""
    replica_device: torch.device | None = None
    """Where the whole model lies; None: on the machine's device."""
    worker_command: str | None = None
    """Starts a worker, for a person who has to; None: workers are started by others."""

    def run_config(self, run_id: str) -> RunConfig:
        """What travels to the workers."""
        run = self.settings.run_config(run_id, self.algorithm)
        if self.workload is None:
            return run
        return run.model_copy(update={"workload": self.workload.name})


def own_run(
    owner: Owner,
    log: NodeLog,
    body: Callable[[ServerContext], Summary],
    *,
    run_id: str | None,
    resume: str | None,
    progress: Console | None,
    output: Console | None,
) -> Summary:
    """Claim a run, open its records, train with `body`, and leave what a run leaves behind.

    `run_id` None: a new one; `resume`: as `--resume`. Progress, and what came of the run, are shown on
    `progress` and `output`; None: nowhere.

    Raises:
        CheckpointError: it cannot go on; or its last step is not saved, so that it has no summary and goes on
            with `resume`.
    """
    settings, algorithm = owner.settings, owner.algorithm
    with (
        claim_run(settings, algorithm, run_id, resume, log.logger) as claimed,
        _told_if_it_cannot_begin(owner, claimed, log),
    ):
        paths = claimed.paths
        training = _build(owner, log.logger, begins=claimed.checkpoint is None)
        settings = settings.with_batch_size(training.workload.batch_size)
        owner = replace(owner, settings=settings)
        run = owner.run_config(paths.run_id)
        _check_resumable(claimed, settings, run, training, log.logger)
        train = run.train.with_epochs_of(training.num_samples)
        run = run.model_copy(update={"train": train})
        stop = StopRequest()
        with stop.collecting():
            with (
                report_of_failure(paths, log.logger),
                _begun(owner, paths, run, log),
                open_records(
                    paths, run, role=owner.role, node=owner.node, log=log, progress=progress
                ) as records,
                metrics_served(
                    settings,
                    Process(node=owner.node, role=owner.role),
                    training.replica.meter,
                    log.logger,
                    run_id=lambda: run.run_id,
                    status=lambda: None if records.status is None else records.status.newest,
                ),
            ):
                _remember_workload(paths, training.workload, log.logger)
                context = ServerContext(
                    settings=settings,
                    run=run,
                    training=training,
                    node=owner.node,
                    secret=owner.secret,
                    incarnation=records.incarnation,
                    records=records,
                    log=log.logger,
                    store=claimed.store,
                    checkpoint=claimed.checkpoint,
                    check_stop=stop.check,
                    worker_command=owner.worker_command,
                )
                summary = body(context)
            # A signal that comes from here on has nothing to stop any more; a second one ends this, too.
            is_saved = _is_saved(claimed.store, summary)
            _conclude(paths, summary, log, output, is_saved=is_saved)
            write_artifacts(paths, training, log.logger)
            if output and paths.sample.is_file():
                log.print(output, shown_text(output, sample_shown(paths)))
        if not is_saved:
            raise CheckpointError(
                f"step {summary.steps}, the last one of run {paths.run_id}, is not saved, see the log; "
                f"{as_command('resume', paths.run_id)} goes on from its newest checkpoint"
            )
    return summary


def _is_saved(store: CheckpointStore, summary: Summary) -> bool:
    """Whether the checkpoint to go on from is that of the run's last step."""
    with suppress(CheckpointError):
        return (store.newest_step() or 0) == summary.steps
    return False


@contextmanager
def _told_if_it_cannot_begin(owner: Owner, claimed: Claimed, log: NodeLog) -> Iterator[None]:
    """Let a new run that ends before it begins leave its log, its configuration, and the reason."""
    paths = claimed.paths
    try:
        yield
    except BaseException as error:
        if claimed.checkpoint is None and not paths.status.is_file():
            run = owner.run_config(paths.run_id)
            if not paths.config.is_file():
                open_run(owner.settings, run, role=owner.role, node=owner.node, log=log)
            status = never_begun(run, error, paths.root)
            StatusFile(paths.status, warn=log.logger.warning).write(status)
        raise


@contextmanager
def _begun(owner: Owner, paths: RunPaths, run: RunConfig, log: NodeLog) -> Iterator[None]:
    """Lay out the run's folder; put back what was there if the checkpoint turns out to be of another run."""
    kept = {path: path.read_bytes() for path in (paths.config, paths.summary) if path.is_file()}
    open_run(owner.settings, run, role=owner.role, node=owner.node, log=log)
    paths.summary.unlink(missing_ok=True)
    shutil.rmtree(paths.root / ASKED, ignore_errors=True)  # it is of an earlier start
    try:
        yield
    except CheckpointError:
        for path, content in kept.items():
            path.write_bytes(content)
        raise


def _remember_workload(paths: RunPaths, workload: Workload, log: logging.Logger) -> None:
    """Note outside the run's folder what is trained, so that whoever goes on with it need not name it."""
    train = load_resolved(paths.config).train if workload.source is not None else None
    if train is None or train.workload is None:
        return
    try:
        remember_workload(paths.root, train, workload.files)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): who goes on with this run has to name its --workload",
            user_state(),
            error.strerror or error,
        )


def _check_resumable(
    claimed: Claimed,
    settings: Settings,
    run: RunConfig,
    training: TrainingContext,
    log: logging.Logger,
) -> None:
    """See to it that a run goes on with what it began with, and say which settings are not what they were.

    Raises:
        CheckpointError: it began with something else; the message names the settings that differ.
    """
    if claimed.checkpoint is None:
        return
    changes = []
    try:
        changes = list(_changes(load_resolved(claimed.paths.config), settings, run))
    except SmolclusterError as error:
        log.warning("the settings that the run had are not known: %s", error)
    told = "; ".join(changes)
    try:
        check_resumable(claimed.checkpoint.state, run, training)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; since then changed {told}" if changes else str(error)
        ) from error
    started, source = read_snapshot(claimed.paths).started, training.workload.source
    if started is not None and started.source != source:
        log.warning(
            "the workload's code is not what it was: SHA-256 %s, now %s",
            *((each or "none")[:12] for each in (started.source, source)),
        )
    if started is not None and (other := _other_data(started, training)):
        log.warning("the run goes on with other training data than it had: %s", other)
    if changes:  # flags are easily forgotten
        log.warning("the run goes on with other settings than it had: %s", told)


def _other_data(started: RunStarted, training: TrainingContext) -> str | None:
    """What of the training data is not as it was when the run began; None: nothing that is known."""
    workload = training.workload
    marks = [tuple(mark) for mark in started.samples]
    if (place := first_difference(workload.sample_marks, marks)) is not None:
        return f"sample {workload.marked_samples[place]} is another one; {SAME_DATA}"
    order = workload.order_mark(training.seed)
    if started.order is not None and order not in (None, started.order):
        return f"the sampler gives another order under the same seed; {SAME_ORDER}"
    return None


def _changes(before: Settings, now: Settings, run: RunConfig) -> Iterator[str]:
    """The settings that differ, as `key: old -> new`."""
    old = dict(_leaves(before.run_config(run.run_id, run.algorithm).model_dump(mode="json")))
    new = dict(_leaves(run.model_dump(mode="json")))
    root = "dataset.root"
    old[root], new[root] = (str(each.node.dataset.root or "") or None for each in (before, now))
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"


def _shown(value: object) -> str:
    """A value as in a file; of a path the end tells more than the beginning, so text is not cut short."""
    return value if isinstance(value, str) else show(value)


def _leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The single values below a section, by their keys as a user writes them."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, "" if name == "train" else f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _conclude(
    paths: RunPaths, summary: Summary, log: NodeLog, output: Console | None, *, is_saved: bool
) -> None:
    """Show what came of the run, and write it down where its end `is_saved`: it has ended then."""
    try:
        if is_saved:
            write_summary(paths.summary, summary)
    except SmolclusterError:
        output = output or SteadyConsole(stderr=True)  # then at least a person shall see it
        raise
    finally:
        if output:
            log.print(output, table(summary))


def bucket_bytes_for(cluster: ClusterConfig) -> int:
    """How large buckets are: small enough that a link is busy in both directions at the same time.

    Where all processes are on this machine there is no link to fill, and each message costs its processor;
    but stores have whole buckets each, of which there shall be enough.
    """
    addresses = cluster.bind or tuple(cluster.host_ip.values())
    is_large = len(cluster.store_nodes) == 1 and all(map(is_loopback_name, addresses))
    return LOCAL_BUCKET_BYTES if is_large else DEFAULT_BUCKET_BYTES


def _build(owner: Owner, log: logging.Logger, *, begins: bool) -> TrainingContext:
    """Build what is trained; `begins`: with the weights that the model's configuration names."""
    settings = owner.settings
    is_alone = owner.algorithm == "single"
    use_threads(settings.node.threads if is_alone else settings.num_threads())
    device = pick_device(settings.node.device)
    training = build(
        settings.train if begins else settings.train.without_weights(),
        settings.cluster.seed,
        settings.node.dataset,
        owner.replica_device or device,
        bucket_bytes=bucket_bytes_for(settings.cluster),
        microbatch=settings.node.microbatch,
        workload=owner.workload,
        log=log,
        is_outline=not spec_of(owner.algorithm).has_whole_model,
    )
    if num_workers := training.workload.num_idle_processes:
        log.info(
            "num_workers=%d of the validation DataLoader starts nothing: its samples are loaded as they are "
            "evaluated",
            num_workers,
        )
    if owner.role == "server":
        first = first_losses(training.workload, training.replica)
        training = replace(training, first_losses=first)
    return replace(training, eval_device=device)


def write_artifacts(paths: RunPaths, training: TrainingContext, log: logging.Logger) -> None:
    """Draw the curves, write a sample and the report; what cannot be had is a warning: the run is over."""
    with _or_a_warning(log):
        draw_curves(paths)
    sample_text, replica = training.workload.sample_text, training.replica
    if sample_text is not None and replica.device.type != "meta":
        with _or_a_warning(log), replica.evaluating() as model:
            write_whole(paths.sample, sample_text(model, training.seed) + "\n")
    with _or_a_warning(log):
        write_report(paths)


@contextmanager
def report_of_failure(paths: RunPaths, log: logging.Logger) -> Iterator[None]:
    """Write the run's report if the block is ended by an error, or because it was asked to.

    A run that does not go on, because the checkpoint is of another one, stays as it is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        with _or_a_warning(log):
            write_report(paths, error)
        raise


@contextmanager
def _or_a_warning(log: logging.Logger) -> Iterator[None]:
    try:
        yield
    except SmolclusterError as error:
        log.warning("%s", error)
    except Exception as error:  # the run has ended, whatever becomes of this
        log.warning(
            "the run's report, picture or sample could not be made: %r", error, exc_info=error
        )
