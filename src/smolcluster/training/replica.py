"""A model whose parameters and gradients lie in one flat tensor each, with its optimizer.

Every `param.data` and `param.grad` is a view into the flat tensors, so that a gradient can be cut
into buckets, sent, reduced and applied without looking at layers. The optimizer works on the flat
parameter: one or two fused calls a step, with the same result as over separate parameters where the rule
is elementwise. Matrices come first: weight decay is theirs alone. Tied weights
occur once; frozen parameters are left out and stay as they are.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from smolcluster.configs.schema import GradientClipping, Precision
from smolcluster.data.dataset import Batch
from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.training.batches import Doubles, placed
from smolcluster.training.buffers import ModelBuffers, plain_name
from smolcluster.training.copying import check_apart, second
from smolcluster.training.fingerprint import base_of, content, described_base, fingerprint
from smolcluster.training.labels import LabelsSeen
from smolcluster.training.modes import begin_training, modes_of, move, restore_modes
from smolcluster.training.optimizer import bucket_norms, clip_factor
from smolcluster.training.recipe import OptimizerSpec
from smolcluster.training.scaler import LEAST_SCALE, LossScaler
from smolcluster.training.state_watch import StateWatch, Trained
from smolcluster.training.torch_optimizer import Flat, new_optimizer
from smolcluster.utils.meter import Meter
from smolcluster.utils.user_code import user_code

DEFAULT_BUCKET_BYTES = 1 << 20

LOSS_SCALE = "loss_scale"
AVERAGE = "ema."
"""Begins the names of the average's parameters in a checkpoint."""
MOST_FROZEN = 4
"""Frozen parameters that may follow the weights are at most so many times as large as these."""
TRAINED_TYPES = (torch.float32, torch.float64)
DIVERGENCE_REMEDY = (
    "lower learning_rate, clip gradients harder (gradient_clipping), or look for NaN in the data"
)


class Replica:
    """One machine's copy of the model, with flat buffers and an optimizer.

    Attributes:
        params: trainable weights, flat (num_params,), on `device`; writing to it changes the model.
        grads: gradient of the mean loss, flat (num_params,), on `device`.
        layers: name and place in the flat tensors of each parameter, in order.
        buffers: what of the model changes as it computes.
        buckets: the flat tensors cut into slices of at most `bucket_bytes`, in order.
        parameters: all by name, also those that are not trained; tied ones once, by their first name.
        fingerprint: see `fingerprint.py`.
        base: what the model's adapters were put on, for people and for comparison; None without any.
        resting: names of the model's parts that stay in evaluation mode, see `modes.py`.
        reordered: names of trained parameters in `channels_last`, which the flat memory does not keep.
        average: of the weights (Polyak), flat (num_params,); None: there is none, or none yet.
        meter: where it counts the time of forward, backward, and what changes the weights.
        watch: sees to it that computing changes no weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str | OptimizerSpec,
        *,
        weight_decay: float = 0.0,
        device: torch.device | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        precision: Precision = "fp32",
        is_scaled_elsewhere: bool = False,
        ema_decay: float | None = None,
        meter: Meter | None = None,
        is_stage: bool = False,
        keeps_modes: bool = False,
    ) -> None:
        """Move `model` to `device` and its parameters into flat tensors.

        Args:
            model: it belongs to the replica from now on.
            optimizer, weight_decay: see `new_optimizer`.
            device: None means the CPU.
            bucket_bytes: largest size of a bucket, in bytes of the parameters' type.
            precision: bf16 and fp16 compute under autocast; weights and gradient keep their type.
            is_scaled_elsewhere: who computes scales the loss, and says when a gradient has overflowed.
            ema_decay: how much of the average each step keeps; None: there is no average.
            meter: the process's; None: one of its own.
            is_stage: whether others train the rest of the model, so that there may be nothing to train here.
            keeps_modes: whether somebody else puts the model into training and evaluation mode.

        Raises:
            ConfigError: the model cannot be trained so: mixed types, sparse gradients, nothing to train.
        """
        self.device = device or torch.device("cpu")
        self.bucket_bytes = bucket_bytes
        self.model = model
        check_apart(model)
        move(model, self.device)
        self.resting = [] if keeps_modes else begin_training(model)
        trainable = trained_parameters(self.model)
        if not (trainable or is_stage):
            raise ConfigError("model: no parameter is trainable; set requires_grad on at least one")
        self.fingerprint = fingerprint(self.model)
        self.base = described_base(self.model)
        self.parameters = {plain_name(name): each for name, each in model.named_parameters()}
        bounds = [0, *accumulate(each.numel() for _, each in trainable)]
        names = [name for name, _ in trainable]
        self.layers = list(zip(names, map(slice, bounds, bounds[1:]), strict=True))
        self.reordered = [name for name, each in trainable if is_channels_last(each)]
        self.buffers = ModelBuffers(self.model, _followers(self))
        self._starts = bounds[:-1]
        dtype = trainable[0][1].dtype if trainable else torch.float32
        self.params = torch.empty(bounds[-1], dtype=dtype, device=self.device)
        self.grads = torch.zeros_like(self.params)
        for (_, place), (_, parameter) in zip(self.layers, trainable, strict=True):
            self.params[place] = parameter.data.reshape(-1)
        self._trained = [
            Trained(
                name,
                self.parameters[name],
                self.params[place].view(parameter.shape),
                self.grads[place].view(parameter.shape),
            )
            for (name, place), (_, parameter) in zip(self.layers, trainable, strict=True)
        ]
        self._into_flat()
        self.labels = LabelsSeen(self.model)
        self.doubles = Doubles()
        self.watch = StateWatch(
            self.model, self.parameters, self._trained, self.grads, self.buffers
        )
        self.buckets = cut(self.num_params, max(1, bucket_bytes // dtype.itemsize))
        spec = OptimizerSpec(optimizer) if isinstance(optimizer, str) else optimizer
        flat = Flat(trainable, [place for _, place in self.layers], self.params, self.grads)
        self.optimizer = new_optimizer(spec, self.model, flat, weight_decay)
        self.precision = precision
        self.scaler = LossScaler() if precision == "fp16" or is_scaled_elsewhere else None
        self.loss_scale = 1.0
        """What the loss of the next batch is multiplied by; its gradient is divided by it."""
        self.ema_decay = ema_decay
        self.average: Tensor | None = None
        self.meter = meter or Meter()
        self._staging: Tensor | None = None

    @property
    def num_params(self) -> int:
        return self.params.numel()

    def _into_flat(self) -> None:
        """Let the model's parameters and their gradients be the flat tensors."""
        for each in self._trained:
            each.parameter.data, each.parameter.grad = each.data, each.gradient

    def placed(self, batch: Batch) -> Batch:
        """A batch as the model takes it; see `batches.placed`."""
        lowers = self.doubles.are_lowered
        return placed(batch, self.device, self.params.dtype, lowers_doubles=lowers)

    def clip(self, clipping: GradientClipping) -> float:
        """Clip `grads` if that is enabled; return their L2 norm before."""
        with self.meter("apply"):
            norm = self.grad_norm()
            factor = clip_factor(norm, clipping)
            if factor < 1.0:
                self.grads.mul_(factor)
            if clipping.bound is not None:
                self.grads.clamp_(-clipping.bound, clipping.bound)
        return norm

    def grad_norm(self) -> float:
        """Return the L2 norm of `grads`, from those of its buckets."""
        if not self.buckets:
            return 0.0
        return math.hypot(*bucket_norms(self.grads, self.buckets))

    def step(self, learning_rate: float) -> None:
        with self.meter("apply"):
            self.optimizer.step(learning_rate)

    def note_step(self, *, overflow: float | None) -> None:
        """A step was taken (None), or skipped because a gradient overflowed with this loss scale."""
        if self.scaler is None:
            return
        if overflow is None:
            self.scaler.stepped()
        else:
            self.scaler.overflowed(overflow)

    def update_average(self, num_steps: float = 1) -> None:
        """The weights have been changed by steps: let the average follow. The first ones begin it.

        A fractional `num_steps`: some of the batches that together make a step.
        """
        if self.ema_decay is None:
            return
        with self.meter("apply"):
            if self.average is None:
                self.average = self.params.clone()
            else:
                self.average.lerp_(self.params, 1 - self.ema_decay**num_steps)

    @property
    def run_scale(self) -> float:
        """The run's loss scale of now, as far as this process knows; 1 where losses are not scaled."""
        if self.scaler is None or self.precision != "fp16":
            return 1.0
        return self.scaler.scale

    @property
    def may_overflow(self) -> bool:
        """Whether a gradient that is not finite may come from the loss scale alone."""
        return self.scaler is not None and self.loss_scale > LEAST_SCALE

    @property
    def evaluated(self) -> Tensor:
        """The weights that are evaluated: the average if there is one."""
        return self.params if self.average is None else self.average

    def kept(self) -> dict[str, Tensor]:
        """What else a checkpoint holds of the run, by name; views, to be filled as well."""
        kept = {} if self.scaler is None else {LOSS_SCALE: self.scaler.state}
        if self.ema_decay is None:
            return kept
        if self.average is None:
            self.average = self.params.clone()
        return kept | {f"{AVERAGE}{name}": self.average[place] for name, place in self.layers}

    def layer_norms(self, gradient: Tensor | None = None) -> dict[str, float]:
        """Return the L2 norm of each parameter's part of a gradient (num_params,), by name.

        None means `grads`.
        """
        flat = self.grads if gradient is None else gradient
        norms = [torch.linalg.vector_norm(flat[place]) for _, place in self.layers]
        names = (name for name, _ in self.layers)
        return dict(zip(names, torch.stack(norms).tolist(), strict=True))

    def parameter_at(self, index: int) -> str:
        """Return the name of the parameter that the flat tensors' element `index` belongs to."""
        return self.layers[bisect_right(self._starts, index) - 1][0]

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """Return a copy of the weights on the CPU, flat (num_params,), in `out` if given."""
        if out is None:
            return self.params.to("cpu", copy=True)
        return out.copy_(self.params)

    def digest(self) -> str:
        """XXH3-128 of the weights and of buffers that have changed."""
        tensors = self.params, *self.buffers.values().values()
        return xxh3_128_hexdigest(" ".join(map(content, tensors)))

    def check_weights(self, when: str) -> None:
        """Look for weights that are NaN or infinite: one pass.

        Raises:
            NonFiniteLoss: there are; the message says `when` and names the layer.
        """
        if not self.num_params:
            return
        low, high = self.params.aminmax()
        if not (math.isfinite(low) and math.isfinite(high)):
            for name, place in self.layers:
                if (value := first_non_finite(self.params[place])) is not None:
                    raise NonFiniteLoss(
                        f"weights hold {value} at layer {name} {when}; {DIVERGENCE_REMEDY}"
                    )

    def load(self, *weights: Tensor) -> None:
        """Replace the weights by flat ones, whole or in pieces; the optimizer's state stays as it is."""
        start = 0
        with self.meter("apply"):
            for piece in weights:
                self.params[start : start + piece.numel()].copy_(piece)
                start += piece.numel()

    def host_gradient(self) -> Tensor:
        """Return `grads` on the CPU, flat (num_params,).

        It is `grads` itself there, and elsewhere a buffer that the next call writes over.
        """
        if self.device.type == "cpu":
            return self.grads
        if self._staging is None:
            pin = self.device.type == "cuda"
            self._staging = torch.empty(self.num_params, dtype=self.grads.dtype, pin_memory=pin)
        return self._staging.copy_(self.grads)

    def copy_model(self, make: Callable[[], nn.Module] | None = None) -> nn.Module:
        """Return another model in evaluation mode, with the weights of now, or their average.

        `make` makes one where the model refuses to be copied.

        Raises:
            UserCodeError: it does, and there is no `make`.
        """
        model = second(self.model, make)
        with user_code("model"):
            model.eval()
        self.lend(self.evaluated.clone(), model)
        return model

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Lend the model itself a copy of the weights of now, or of their average, to be evaluated.

        After the block the model is as before: its weights, gradients, modes, what of it is trained, and its
        buffers' values.
        """
        modes = modes_of(self.model)
        trained = {each: each.requires_grad for each in self.parameters.values()}
        with self.buffers.kept():
            try:
                self.lend(self.evaluated.clone(), self.model)
                yield self.model
            finally:
                try:
                    with user_code("model"):
                        self.model.train()  # it may undo then what it has done to its weights
                finally:
                    self._into_flat()
                    for each, is_trained in trained.items():
                        each.requires_grad_(is_trained)
                    self.watch.forget_frozen()
                    restore_modes(modes)

    def saved_parameters(self) -> dict[str, Tensor]:
        """What a checkpoint holds by name: all parameters, but not those that adapters were put on.

        Of trained ones it is the flat memory, whatever the model has been lent meanwhile.
        """
        base = base_of(self.model)
        found = {name: each.detach() for name, each in self.parameters.items() if name not in base}
        flat = {name: self.params[place].view(found[name].shape) for name, place in self.layers}
        return found | flat

    def lend(self, flat: Tensor, model: nn.Module) -> None:
        """Let `model`, this one or a copy, have `flat` (num_params,), laid out as `params`, as its weights.

        It has no gradients then.

        Raises:
            ConfigError: a copy has not all of its parameters.
        """
        parameters = {plain_name(name): each for name, each in model.named_parameters()}
        for name, place in self.layers:
            parameter = parameters.get(name)
            if parameter is None:
                raise ConfigError(
                    f"model: parameter {name} is gone in evaluation mode: eval() must leave parameters where "
                    "they are, and may keep what it makes of them elsewhere"
                )
            parameter.data = flat[place].view(parameter.shape)
            parameter.grad = None


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by name, in the order in which they lie in the flat weights.

    Raises:
        ConfigError: one is of a type or layout that is not trained, or of another type than the first.
    """
    found = [
        (plain_name(name), param) for name, param in model.named_parameters() if param.requires_grad
    ]
    _check_dense(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            "model: it is a torch.jit.ScriptModule, whose layers cannot be watched: give the module itself, "
            "or torch.compile(model)"
        )
    for name, param in found:
        check_type(name, param)
        first_name, first = found[0]
        if param.dtype != first.dtype:
            raise ConfigError(
                f"model: parameter {name} is {param.dtype}, but {first_name} is {first.dtype}; "
                "give all parameters one type, such as by model.float()"
            )
    return sorted(found, key=lambda entry: entry[1].ndim <= 1)  # first those that decay


def _followers(replica: Replica) -> list[str]:
    """The frozen parameters that may follow the weights, such as a teacher's: not a base, however large."""
    base, trained = base_of(replica.model), {name for name, _ in replica.layers}
    names = [name for name in replica.parameters if name not in base and name not in trained]
    num_trained = sum(replica.parameters[name].numel() for name in trained)
    numel = sum(replica.parameters[name].numel() for name in names)
    return names if numel <= MOST_FROZEN * num_trained else []


def check_type(name: str, parameter: Tensor) -> None:
    """See that a parameter is of a type that is trained, the same in one process and on every cluster.

    Raises:
        ConfigError: it is not; the message says what to write.
    """
    if parameter.layout is not torch.strided:
        raise ConfigError(
            f"model: parameter {name} has the layout {parameter.layout}, must be dense: what is trained is "
            "summed and sent as one flat tensor"
        )
    if parameter.dtype in TRAINED_TYPES:
        return
    remedy = "make it of real numbers (torch.view_as_real)"
    if parameter.dtype in (torch.bfloat16, torch.float16):
        remedy = (
            "write model.float() (of a folder of weights: dtype=float32), and precision: bf16 or fp16 to "
            "compute in fewer bits"
        )
    raise ConfigError(
        f"model: parameter {name} is {parameter.dtype}, must be float32 or float64, in which weights are "
        f"kept: {remedy}"
    )


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the values of images' or volumes' weights lie in that order, and in that order alone."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return (
        tensor.ndim in formats
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=formats[tensor.ndim])
    )


def _check_dense(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"model: layer {plain_name(name) or 'model'} has sparse=True, must be False: gradients are "
                "summed and sent as one dense tensor"
            )


def cut(numel: int, most: int) -> list[slice]:
    """The buckets of a flat tensor: slices of at most so many elements, in order."""
    return [slice(start, min(start + most, numel)) for start in range(0, numel, most)]


def first_non_finite(tensor: Tensor) -> float | None:
    """The first value of `tensor` that is NaN or infinite, if there is one."""
    bad = tensor[~torch.isfinite(tensor)]
    return bad[0].item() if bad.numel() else None
