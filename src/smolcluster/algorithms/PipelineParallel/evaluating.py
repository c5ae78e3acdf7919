"""What is held out, evaluated by all stages together; a part at a time where the server sends it."""

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from smolcluster.algorithms.context import ServerContext
from smolcluster.data.loading import every_index
from smolcluster.data.permutation import Range
from smolcluster.server.assignment import ServedBatch
from smolcluster.training.evaluate import LOSS, Evaluation, Totals, evaluation_of
from smolcluster.training.workload import OfLoss
from smolcluster.wire.messages import StageEvaluated


class Evaluating:
    """The evaluation that goes on, or the next one: which samples come, and what came of those before."""

    def __init__(self, context: ServerContext, *, batch_size: int, num_batches: int) -> None:
        """`num_batches` of the workload's batch size, or of `batch_size`, are sent at once."""
        workload = context.training.workload
        self.batch_size = workload.eval_batch_size or batch_size
        self._samples, self._metrics = workload.validation, workload.metrics
        self._num_at_once = num_batches * self.batch_size
        self._feed = context.open_held_out_feed(self.batch_size)
        self._log, self._missing = context.log, set[str]()
        self._num_done = 0
        self._totals: dict[str, tuple[float, float]] = {}

    @property
    def num_samples(self) -> int:
        return 0 if self._samples is None else self._samples.num_samples

    @property
    def is_under_way(self) -> bool:
        """Whether some of the samples have been evaluated, and some not."""
        return self._num_done > 0

    @property
    def part(self) -> Range | None:
        """The places of the samples that are sent next; None: the stages have all, or nobody has any."""
        if self._feed is None:
            return None
        stop = min(self._num_done + self._num_at_once, self.num_samples)
        return Range(0, self._num_done, stop)

    @cached_property
    def _order(self) -> Tensor:
        assert self._samples is not None  # noqa: S101 - there is a feed only where there are some
        return every_index(self._samples)

    def deliver(self, part: Range, deliver: Callable[[ServedBatch | None], None]) -> None:
        """Call `deliver` with the batches of a part, in the deciding thread, when they are there."""
        assert self._feed is not None  # noqa: S101 - `part` has told
        self._feed.deliver(part, self._order[part.start : part.stop], deliver)

    def take(self, answers: Sequence[StageEvaluated]) -> Evaluation | None:
        """What came of the evaluation, once no part is left.

        Raises:
            NonFiniteLoss, UserCodeError: as `evaluation_of`.
        """
        for each in answers:
            for name, (total, count) in each.totals.items():
                before = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = before[0] + total, before[1] + count
        if self._feed is not None and (part := self.part) is not None:
            self._feed.applied(part)
            self._num_done = part.stop
            if part.stop < self.num_samples:
                return None
        totals = self._totals
        self.restart()
        return self._evaluation(totals) if LOSS in totals else None

    def _evaluation(self, totals: Totals) -> Evaluation:
        measured = {name for name, of in self._metrics.items() if not isinstance(of, OfLoss)}
        for name in sorted(measured - totals.keys() - self._missing):
            self._missing.add(name)
            self._log.warning(
                "metric %s is missing: the worker with the last layers computes it, and was not given it, "
                "such as by NetworkWorker(metrics=...), or it is NaN or infinite",
                name,
            )
        return evaluation_of(totals, self._metrics)

    def restart(self) -> None:
        """Begin with the first sample."""
        self._num_done, self._totals = 0, {}

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
