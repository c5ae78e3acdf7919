"""A store of DiLoCo: a slice of the weights θ with the outer optimizer, on a machine other than the server.

It takes the steps that the server says, along what workers have changed: see `server/store_host.py`, and
`outer_links.py` for the slice. Which machines have one: `servers` in the cluster file.
By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("diloco", "store"))

from collections.abc import Mapping
from itertools import accumulate, pairwise

from torch import Tensor

from smolcluster.algorithms.DiLoCo.exchange import ChangeReceiver, Layout
from smolcluster.algorithms.DiLoCo.fragments import Fragment, cut
from smolcluster.algorithms.DiLoCo.outer import DelayedNesterov, OuterOptimizer
from smolcluster.algorithms.DiLoCo.outer_links import RESIDUAL, OuterSlice
from smolcluster.codec.registry import get_codec
from smolcluster.errors import ConfigError, ProtocolError
from smolcluster.server.store import store_of
from smolcluster.server.store_host import SliceHost
from smolcluster.wire.messages import WEIGHTS, OuterRule, Slice


class Held(SliceHost):
    """A store's slice of θ."""

    _slice: OuterSlice

    def _new_slice(self, values: Mapping[str, Tensor]) -> OuterSlice:
        """See `SliceHost`.

        Raises:
            ProtocolError: the contents do not fit the rule, or the rule not the weights.
        """
        given = self._given
        rule, codec = given.rule, get_codec(given.codec)
        if not isinstance(rule, OuterRule):
            raise ProtocolError("it gave a slice without an outer optimizer's rule")
        bucket_bytes = given.bucket_length * codec.dtype.itemsize
        whole = Layout(_fragments(given, rule), bucket_bytes, codec.dtype)
        outer = _outer_of(rule, values)
        outer_names = {*outer.vectors, RESIDUAL}
        others = {name: each for name, each in values.items() if name not in outer_names}
        if (
            WEIGHTS not in values
            or not outer.vectors.keys() <= values.keys()
            or (rule.inner is None and len(others) > 1)
        ):
            raise ProtocolError("it gave a slice of other contents than an outer optimizer has")
        own = self._buckets[given.first : given.stop]
        held = OuterSlice(
            values[WEIGHTS],
            whole.part(self._span),
            outer,
            rule.codec_down,
            buckets=self._buckets,
            span=self._span,
            incarnation=given.incarnation,
            inner=None if rule.inner is None else store_of(rule.inner, own, others),
            residual=values.get(RESIDUAL),
            is_async=rule.is_async,
        )
        if bool(held.residuals) != (RESIDUAL in values):
            raise ProtocolError("what its codec owes is not of the codec that its rule names")
        held.resume(rule.versions)
        return held

    def _receiver_for(self, session_id: int) -> ChangeReceiver:
        return ChangeReceiver(session_id, self._given.codec, self._slice.layout)


def _fragments(given: Slice, rule: OuterRule) -> list[Fragment]:
    """Those of the whole model.

    Raises:
        ProtocolError: its tensors are not those of the slice.
    """
    stops = list(accumulate(rule.layers, initial=0))
    if stops[-1] != given.num_params:
        raise ProtocolError(f"its tensors have {stops[-1]} weights, the model {given.num_params}")
    layers = [("", slice(*ends)) for ends in pairwise(stops)]
    try:
        return cut(layers, len(rule.versions))
    except ConfigError as error:
        raise ProtocolError(str(error)) from error


def _outer_of(rule: OuterRule, contents: Mapping[str, Tensor]) -> OuterOptimizer:
    """The outer optimizer; the contents become its state. When momentum moves, the coordinator says."""
    optimizer: OuterOptimizer
    if rule.is_async:
        optimizer = DelayedNesterov(0, rule.learning_rate, rule.momentum, momentum_delay=1)
    else:
        optimizer = OuterOptimizer(0, rule.learning_rate, rule.momentum)
    for name in optimizer.vectors:
        if name in contents:
            optimizer.state[name] = contents[name]
    return optimizer
