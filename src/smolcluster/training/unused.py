"""Parameters that the loss does not depend on: their gradient is zero, and they are named once."""

import logging
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from smolcluster.training.replica import Replica
from smolcluster.utils.words import a_few

NUM_BATCHES = 5
"""After so many batches, of which some may leave out a branch, a parameter is called unused."""


class UnusedParameters:
    """Watches which parameters the first batches give a gradient."""

    def __init__(self, replica: Replica, log: logging.Logger | None) -> None:
        self._log = log
        self._num_left = NUM_BATCHES
        self._without = dict.fromkeys(name for name, _ in replica.layers)
        self._hooks = [self._watch(name, replica.parameters[name]) for name in self._without]

    def _watch(self, name: str, parameter: Tensor) -> RemovableHandle:
        when_used = partial(self._used, name)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(when_used)  # type: ignore[no-untyped-call]
        return handle

    def _used(self, name: str, _parameter: Tensor) -> None:
        self._without.pop(name, None)

    def batch_done(self) -> None:
        """A batch has been computed; after the last one that is watched, say what was never used."""
        if self._num_left == 0:
            return
        self._num_left -= 1
        if self._num_left > 0:
            return
        for hook in self._hooks:
            hook.remove()
        names = list(self._without)
        if names and self._log is not None:
            self._log.warning(
                "%d batches gave no gradient to %s: the loss does not depend on them, and they are trained "
                "with a gradient of zero; leave them out of the model, or set requires_grad=False",
                *(NUM_BATCHES, a_few(names)),
            )
