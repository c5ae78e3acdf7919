"""Sees to it that an attached loop leaves to `optimizer.step()` what the cluster shares.

A plain loop may replace a parameter, begin to train a frozen one, clip weights by hand, or step a second
optimizer. EDP pushes all that the loop has changed since the step before, whatever has changed it. In SyncPS
gradients alone travel, and the server's optimizer was told of this one's settings once; what else changes is
refused. Settings are compared at each step, weights as `training/state_watch.py` does: at the first ones, as
an epoch begins, and now and then.
"""

from collections.abc import Sequence

import torch
from torch import nn

from smolcluster.api.synchronous_optimizer import (
    check_none_frozen,
    check_settings,
    settings_of,
)
from smolcluster.errors import ModelChanged
from smolcluster.training.buffers import plain_name
from smolcluster.training.state_watch import Turns, changed, made_late, mark, refrozen


class LoopWatch:
    """Looks at one loop's model and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[tuple[str, nn.Parameter]],
        *,
        is_synchronous: bool,
    ) -> None:
        """Remember the model and the settings of now; `trained`: what the run trains, by name."""
        self._model, self._optimizer, self._trained = model, optimizer, trained
        self._settings = settings_of(optimizer) if is_synchronous else None
        self._num_groups = len(optimizer.param_groups)
        self._known = {plain_name(name): each for name, each in model.named_parameters()}
        self._turns, self._looks = Turns(), False
        self._marks: list[object] = []

    def begin(self, epoch: int) -> None:
        """The loop goes on, up to its next step."""
        self._looks = self._turns.come(epoch)
        looks_at_weights = self._looks and self._settings is not None
        self._marks = [mark(each) for _, each in self._trained] if looks_at_weights else []

    def end(self) -> None:
        """The loop has called `optimizer.step()`, which has changed nothing yet.

        Raises:
            ConfigError: SyncPS's server would step otherwise than this optimizer.
            ModelChanged: what the loop has done to parameters stays on this machine; one is named.
        """
        num_groups = len(self._optimizer.param_groups)
        if self._looks or num_groups != self._num_groups:
            self._num_groups = num_groups
            self._check_parameters()
        if self._settings is None:
            return
        check_settings(self._optimizer, self._settings)
        check_none_frozen(self._optimizer, self._trained)
        for (name, each), before in zip(self._trained, self._marks, strict=False):
            if mark(each) != before:
                raise ModelChanged(
                    f"model: parameter {name} changes between two calls of optimizer.step(), of which no "
                    "other machine hears: let the attached optimizer step all that is trained, and clip or "
                    "normalise weights in the forward; or use algorithm: edp, which takes such changes"
                )

    def _check_parameters(self) -> None:
        trained = dict(self._trained)
        for place, each in self._model.named_parameters():
            name = plain_name(place)
            if name not in self._known:
                raise made_late(name)
            if each is not self._known[name]:
                owner = self._model.get_submodule(place.rpartition(".")[0])
                raise changed(name, owner, "is replaced by another one")
            if each.requires_grad and name not in trained:
                raise refrozen(name, is_frozen=False)
