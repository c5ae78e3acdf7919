"""A process that owns a run: claims it, opens its records, trains, and leaves what a run leaves behind.

That is the server of a cluster, or the one process of `train`.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from smolcluster.algorithms.claim import claim_run
from smolcluster.algorithms.context import ServerContext, check_resumable
from smolcluster.algorithms.keepsakes import leave_keepsakes
from smolcluster.algorithms.records import open_records, open_run
from smolcluster.configs.resolve import Settings, load_resolved
from smolcluster.configs.schema import AlgorithmName, GPTConfig, RunConfig
from smolcluster.errors import CheckpointError, SmolclusterError
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.terminal import SteadyConsole, shown_text, steady
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import Summary, sample_shown, table, write_summary
from smolcluster.training.build import Workbench, build
from smolcluster.transport.security import Secret
from smolcluster.utils.device import pick_device, use_threads
from smolcluster.utils.stopping import StopRequest


@dataclass(frozen=True)
class Owner:
    """A process that owns a run: what it runs, and on which machine."""

    algorithm: AlgorithmName
    role: str
    node: str
    settings: Settings
    secret: Secret | None = None


def own_run(
    owner: Owner,
    log: NodeLog,
    body: Callable[[ServerContext], Summary],
    *,
    run_id: str | None,
    resume: str | None,
    progress: Console | None,
    output: Console | None,
) -> None:
    """Claim a run, open its records, train, and leave what a run leaves behind.

    Args:
        owner: this process.
        log: its log.
        body: trains, and says what came of it.
        run_id: name of the run; None: a new one.
        resume: as `--resume`.
        progress: where progress is shown; None: nowhere.
        output: where it is shown what came of the run; None: nowhere.
    """
    settings, algorithm = owner.settings, owner.algorithm
    with claim_run(settings, algorithm, run_id, resume, log.logger) as claimed:
        paths, run = claimed.paths, settings.run_config(claimed.paths.run_id, algorithm)
        bench = _build(settings, log.logger, begins=claimed.checkpoint is None)
        if claimed.checkpoint is not None:
            check_resumable(claimed.checkpoint.state, run, bench)
            _tell_changes(paths, run, log.logger)
        stop = StopRequest()
        with (
            _begun(owner, paths, run, log),
            open_records(
                paths, run, role=owner.role, node=owner.node, log=log, progress=progress
            ) as records,
        ):
            context = ServerContext(
                settings=settings,
                run=run,
                bench=bench,
                node=owner.node,
                secret=owner.secret,
                metrics=records.metrics,
                events=records.events,
                log=log.logger,
                incarnation=records.incarnation,
                store=claimed.store,
                checkpoint=claimed.checkpoint,
                check_stop=stop.check,
            )
            with stop.collecting():
                summary = body(context)
        _conclude(paths, summary, output)
        leave_keepsakes(paths, bench, settings.train.dataset.at(settings.node.dataset), log.logger)
        if output and paths.sample.is_file():
            with steady(output):
                output.print(shown_text(output, sample_shown(paths)))


@contextmanager
def _begun(owner: Owner, paths: RunPaths, run: RunConfig, log: NodeLog) -> Iterator[None]:
    """Lay out the run's folder; put back what was there if the checkpoint turns out to be of another run."""
    kept = {path: path.read_bytes() for path in (paths.config, paths.summary) if path.is_file()}
    open_run(owner.settings, run, role=owner.role, node=owner.node, log=log)
    paths.summary.unlink(missing_ok=True)
    try:
        yield
    except CheckpointError:
        for path, content in kept.items():
            path.write_bytes(content)
        raise


def _tell_changes(paths: RunPaths, run: RunConfig, log: logging.Logger) -> None:
    """Say which settings of a resumed run are not what they were: flags are easily forgotten."""
    try:
        before = load_resolved(paths.config).run_config(run.run_id, run.algorithm)
    except SmolclusterError as error:
        log.warning("the settings that the run had are not known: %s", error)
        return
    old, new = before.model_dump(), run.model_dump()
    old |= {f"train.{key}": value for key, value in old.pop("train").items()}
    new |= {f"train.{key}": value for key, value in new.pop("train").items()}
    changes = [f"{key} is {new[key]}, was {old[key]}" for key in new if new[key] != old[key]]
    if changes:
        log.warning("the run goes on with other settings than it had: %s", "; ".join(changes))


def _conclude(paths: RunPaths, summary: Summary, output: Console | None) -> None:
    try:
        write_summary(paths.summary, summary)
    except SmolclusterError:
        output = output or SteadyConsole(stderr=True)  # then at least a person shall see it
        raise
    finally:
        if output:
            with steady(output):
                output.print(table(summary))


def _build(settings: Settings, log: logging.Logger, *, begins: bool) -> Workbench:
    """Build what is trained; `begins`: with the weights that the model's configuration names."""
    use_threads(settings.node.threads)
    device = pick_device(settings.node.device)
    train = settings.train
    if isinstance(train.model, GPTConfig) and not begins:
        model = train.model.model_copy(update={"pretrained": None})
        train = train.model_copy(update={"model": model})
    return build(
        train,
        settings.cluster.seed,
        settings.node.dataset,
        device,
        microbatch=settings.node.microbatch,
        log=log,
    )
