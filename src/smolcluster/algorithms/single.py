"""Training in one process, with all that a run of a cluster leaves behind: the baseline, and `train.py`.

batch -> forward, backward -> clip -> optimizer step -> evaluate and save now and then -> next batch
"""

from contextlib import closing

from smolcluster.algorithms.context import ServerContext
from smolcluster.runs.summary import Summary
from smolcluster.server.saver import CheckpointSource
from smolcluster.training.loop import training_steps
from smolcluster.utils.device import describe


def train(context: ServerContext) -> Summary:
    """Train until the run is over.

    Raises:
        NonFiniteLoss: naming step and layer.
        Interrupted: a signal asked this process to stop.
    """
    training, config = context.training, context.run.train
    report = context.new_report()
    source = CheckpointSource(training.replica, dict, dict)
    context.resume(source, report)
    saver = context.new_saver(source, report)
    context.log.info(
        "training %s on %s: %d samples an epoch, %d epochs, on %s",
        type(training.replica.model).__name__,
        training.workload.name,
        training.num_samples,
        config.num_epochs,
        describe(training.replica.device),
    )
    steps = training_steps(
        training,
        config,
        samples_applied=report.counts.samples_applied,
        step=report.counts.version,
        before_step=saver.wait_for_copy,
        layer_norms=report.layer_norms,
    )
    with closing(training), report.until_its_end(), saver:
        while not report.counts.is_over:
            context.check_stop()
            step = next(steps)
            report.step_taken(step)
            is_evaluated = step.version % config.eval_steps == 0 and not report.counts.is_over
            saver.after_step(is_evaluated=is_evaluated)  # first: an evaluation may fail
            if is_evaluated:
                saver.wait_for_copy()  # the evaluation is of the same buffers
                report.evaluate()
            saver.tick()
            report.tick()
        return saver.summary()
