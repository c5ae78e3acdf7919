"""A model whose parameters and gradients lie in one flat tensor each, with its optimizer.

Every `param.data` and `param.grad` is a view into the flat tensors, so that a gradient can be cut
into buckets, sent, reduced and applied without looking at layers. The optimizer works on the flat
parameter: one or two fused calls a step, with the same result as over separate parameters, because
only elementwise rules are offered. Matrices come first: weight decay is theirs alone. Tied weights
occur once; frozen parameters are left out and stay as they are.
"""

import copy
import hashlib
import math
from bisect import bisect_right

import torch
from torch import Tensor, nn

from smolcluster.configs.schema import GradientClipping, Precision
from smolcluster.errors import ConfigError, NonFiniteLoss
from smolcluster.training.optimizer import FlatOptimizer, bucket_norms, clip_factor
from smolcluster.utils.meter import Meter

DEFAULT_BUCKET_BYTES = 1 << 20

DIVERGENCE_REMEDY = "lower learning_rate, or clip gradients harder (gradient_clipping)"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Replica:
    """One machine's copy of the model, with flat buffers and an optimizer.

    Attributes:
        model: the model, on `device`.
        device: where it computes.
        params: trainable weights, flat (num_params,), on `device`; writing to it changes the model.
        grads: gradient of the mean loss, flat (num_params,), on `device`.
        optimizer: the update rule, with its state.
        layers: name and place in the flat tensors of each parameter, in order.
        bucket_bytes: largest size of a bucket.
        buckets: the flat tensors cut into slices of at most `bucket_bytes`, in order.
        fingerprint: SHA-256 over name, shape and type of every parameter and buffer, and the activations.
        precision: what forward and backward compute in.
        meter: where it counts the time of forward, backward, and what changes the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str,
        *,
        weight_decay: float = 0.0,
        device: torch.device | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        precision: Precision = "fp32",
        meter: Meter | None = None,
    ) -> None:
        """Move `model` to `device` and its parameters into flat tensors.

        Args:
            model: it belongs to the replica from now on.
            optimizer: adam, adamw or sgd.
            weight_decay: see `FlatOptimizer`.
            device: None means the CPU.
            bucket_bytes: largest size of a bucket, in bytes of the parameters' type.
            precision: bf16 computes under autocast; weights and gradient keep their type.
            meter: the process's; None: one of its own.

        Raises:
            ConfigError: the model cannot be trained so: batch norm, mixed types, nothing to train.
        """
        self.device = device or torch.device("cpu")
        self.bucket_bytes = bucket_bytes
        self.model = model.to(self.device).train()
        trainable = _trainable(self.model)
        self.fingerprint = _fingerprint(self.model)
        self.layers = _layout(trainable)
        self._starts = [place.start for _, place in self.layers]
        dtype = trainable[0][1].dtype
        self.params = torch.empty(self.layers[-1][1].stop, dtype=dtype, device=self.device)
        self.grads = torch.zeros_like(self.params)
        self._move_into_flat(trainable)
        self.buckets = _cut(self.num_params, max(1, bucket_bytes // dtype.itemsize))
        matrices = sum(param.numel() for _, param in trainable if _decays(param))
        self.optimizer = FlatOptimizer(optimizer, self.params, self.grads, weight_decay, matrices)
        self.precision = precision
        self.meter = meter or Meter()
        self._staging: Tensor | None = None

    @property
    def num_params(self) -> int:
        """Number of trainable weights."""
        return self.params.numel()

    def _move_into_flat(self, trainable: list[tuple[str, nn.Parameter]]) -> None:
        for (_, place), (_, parameter) in zip(self.layers, trainable, strict=True):
            self.params[place] = parameter.data.reshape(-1)
            parameter.data = self.params[place].view(parameter.shape)
            parameter.grad = self.grads[place].view(parameter.shape)

    def clip(self, clipping: GradientClipping) -> float:
        """Clip `grads` if that is enabled; return their L2 norm before."""
        with self.meter("apply"):
            norm = self.grad_norm()
            factor = clip_factor(norm, clipping)
            if factor < 1.0:
                self.grads.mul_(factor)
        return norm

    def grad_norm(self) -> float:
        """Return the L2 norm of `grads`, from those of its buckets."""
        return math.hypot(*bucket_norms(self.grads, self.buckets))

    def step(self, learning_rate: float) -> None:
        """Apply `grads` to the weights with the optimizer."""
        with self.meter("apply"):
            self.optimizer.step(learning_rate)

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
        if not 0 <= index < self.num_params:
            raise IndexError(f"element {index} is outside 0 to {self.num_params - 1}")
        return self.layers[bisect_right(self._starts, index) - 1][0]

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """Return a copy of the weights on the CPU, flat (num_params,), in `out` if given."""
        if out is None:
            return self.params.to("cpu", copy=True)
        return out.copy_(self.params)

    def check_weights(self, when: str) -> None:
        """Look for weights that are NaN or infinite: one pass.

        Raises:
            NonFiniteLoss: there are; the message says `when` and names the layer.
        """
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

    def copy_model(self) -> nn.Module:
        """Return an independent copy of the model with the weights of now, in evaluation mode."""
        return copy.deepcopy(self.model).eval()

    def lend(self, flat: Tensor, model: nn.Module) -> None:
        """Let a copy of the model have `flat` (num_params,), laid out as `params`, as its weights."""
        for name, place in self.layers:
            parameter = model.get_parameter(name)
            parameter.data = flat[place].view(parameter.shape)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS):
            raise ConfigError(
                f"model: layer {name or 'model'} is {type(module).__name__}, whose statistics "
                "would differ between machines; use LayerNorm or GroupNorm"
            )
    found = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not found:
        raise ConfigError("model: no parameter is trainable; set requires_grad on at least one")
    first_name, first = found[0]
    for name, param in found:
        if param.dtype != first.dtype:
            raise ConfigError(
                f"model: parameter {name} is {param.dtype}, but {first_name} is {first.dtype}; "
                "give all parameters one type"
            )
    return sorted(found, key=lambda entry: not _decays(entry[1]))


def _decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay is meant for it: matrices, and not biases or the scales of norms."""
    return parameter.ndim > 1


def _layout(trainable: list[tuple[str, nn.Parameter]]) -> list[tuple[str, slice]]:
    layers = []
    start = 0
    for name, parameter in trainable:
        layers.append((name, slice(start, start + parameter.numel())))
        start += parameter.numel()
    return layers


def _cut(numel: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, numel)) for start in range(0, numel, most)]


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state = "trained" if parameter.requires_grad else "frozen"
        digest.update(f"{name}|{tuple(parameter.shape)}|{parameter.dtype}|{state}\n".encode())
    for name, buffer in model.named_buffers():
        digest.update(f"{name}|{tuple(buffer.shape)}|{buffer.dtype}|buffer\n".encode())
    for name, module in model.named_modules():
        is_activation = type(module).__module__ == nn.ReLU.__module__
        if is_activation and not isinstance(module, nn.ReLU):  # of old checkpoints the only one
            digest.update(f"{name}|{type(module).__name__}\n".encode())
    return digest.hexdigest()


def first_non_finite(tensor: Tensor) -> float | None:
    """The first value of `tensor` that is NaN or infinite, if there is one."""
    bad = tensor[~torch.isfinite(tensor)]
    return bad.flatten()[0].item() if bad.numel() else None
