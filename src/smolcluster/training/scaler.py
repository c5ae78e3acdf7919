"""Loss scaling for float16 (Micikevicius et al., 1710.03740), as `torch.amp.GradScaler` does it.

The loss is multiplied by the scale before backward, and the gradient divided by it, so that small gradients
are not lost in float16. Where a gradient overflows, the step is skipped, its samples have been seen all the
same, and the scale falls. The scale is the run's: its owner keeps it, and workers are told it with samples.
"""

import torch

INITIAL_SCALE = 65536.0
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
MOST_SCALE = 2.0**96
"""A message may hold no more than 1e30, nor a loss in float32 become infinite by its scale."""
LEAST_SCALE = 2.0**-10
"""With it or less, a gradient that is not finite is no matter of the scale."""


class LossScaler:
    """The scale, and what it follows from; all of it in `state`, (3,) float64, for checkpoints."""

    def __init__(self) -> None:
        self.state = torch.tensor([INITIAL_SCALE, 0.0, 0.0], dtype=torch.float64)

    @property
    def scale(self) -> float:
        return min(MOST_SCALE, self.state[0].item())

    @property
    def num_overflows(self) -> int:
        """Steps that were skipped."""
        return int(self.state[2].item())

    def stepped(self) -> None:
        """A step was taken: after so many in a row the scale grows."""
        self.state[1] += 1
        if self.state[1] == GROWTH_INTERVAL:
            self.state[0] = GROWTH * self.scale
            self.state[1] = 0

    def overflowed(self, scale: float) -> None:
        """A step was skipped, because a gradient overflowed with this scale, which may be an old one.

        A worker says so: whatever it says, the scale is not less than halved.
        """
        lower = min(self.scale, BACKOFF * max(scale, self.scale))
        self.state[0] = max(LEAST_SCALE, lower)
        self.state[1] = 0
        self.state[2] += 1


class ScaleFollower:
    """A worker's part: its samples were handed out before the owner heard of its last overflow."""

    def __init__(self) -> None:
        self._overflowed_at: float | None = None
        """The loss scale of its last overflow, until the owner gives a lower one."""

    def note(self, overflow: float | None) -> None:
        """A gradient has overflowed with this scale; None: it has not."""
        if overflow is not None:
            self._overflowed_at = overflow

    def after(self, scale: float) -> float:
        """The scale for samples that were handed out with `scale`."""
        if self._overflowed_at is not None and scale < self._overflowed_at:
            self._overflowed_at = None
        return scale if self._overflowed_at is None else BACKOFF * self._overflowed_at
