"""An attached loop's optimizer as the server of a synchronous run makes one of the same kind."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smolcluster.configs.schema import RunConfig
from smolcluster.errors import ConfigError
from smolcluster.server.offering import OptimizerName
from smolcluster.training.buffers import plain_name

_TAKEN: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
}
"""Settings that the server's optimizer has as well, the same in all groups."""
REMEDY = "use algorithm: edp, which takes any optimizer"
_NAMES: Mapping[type, OptimizerName] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}


def describe_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer as SyncPS's server makes one: its name, learning rate and weight decay.

    Of a schedule the learning rate is the one that it began with, because a warm-up may stand at 0.

    Raises:
        ConfigError: it is of another kind, has hooks or settings that the server's has not, or lacks a
            trainable parameter.
    """
    name = _NAMES.get(type(optimizer))
    if name is None:
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__}, SyncPS takes {', '.join(_NAMES.values())}; {REMEDY}"
        )
    groups = optimizer.param_groups
    if any(group.get(key) for key in ("amsgrad", "maximize") for group in groups):
        raise ConfigError(f"optimizer: SyncPS takes no amsgrad and no maximize; {REMEDY}")
    for key in _TAKEN[name]:
        if any(group[key] != groups[0][key] for group in groups):
            raise ConfigError(f"optimizer: its groups differ in {key}; {REMEDY}")
    _check_rates(groups)
    rate = float(groups[0].get("initial_lr", groups[0]["lr"]))
    if not 0 < rate < math.inf:
        raise ConfigError(f"optimizer: lr is {rate:g}, must be above 0 with SyncPS; {REMEDY}")
    decay = _decay(groups)
    if name == "adam" and decay and groups[0].get("decoupled_weight_decay"):
        raise ConfigError("optimizer: Adam with decoupled_weight_decay is AdamW; use that")
    _check_all_held(model, optimizer)
    _check_hooks(optimizer)
    return {
        "optimizer": name,
        "optimizer_args": {key: groups[0][key] for key in _TAKEN[name]},
        "learning_rate": rate,
        "weight_decay": decay,
    }


def _decay(groups: list[dict[str, Any]]) -> float:
    """The weight decay of all matrices.

    Raises:
        ConfigError: they have several, or what is no matrix decays.
    """
    decays = {
        (param.ndim > 1, float(group["weight_decay"]))
        for group in groups
        for param in group["params"]
        if param.requires_grad
    }
    if any(decay for is_matrix, decay in decays if not is_matrix):
        raise ConfigError(
            "optimizer: weight_decay is for matrices only with SyncPS; put biases and norms into a group "
            f"with weight_decay 0, or {REMEDY}"
        )
    of_matrices = sorted(decay for is_matrix, decay in decays if is_matrix)
    if len(of_matrices) > 1:
        several = ", ".join(f"{decay:g}" for decay in of_matrices)
        raise ConfigError(
            f"optimizer: its matrices have weight_decay {several}; give them one, or {REMEDY}"
        )
    return of_matrices[0] if of_matrices else 0.0


Told = Sequence[Mapping[str, Any]]
"""Of each group of an optimizer, the settings that SyncPS's server was told."""


def settings_of(optimizer: torch.optim.Optimizer) -> Told:
    keys = (*_TAKEN[_NAMES[type(optimizer)]], "weight_decay")
    return [{key: group[key] for key in keys} for group in optimizer.param_groups]


def check_settings(optimizer: torch.optim.Optimizer, told: Told) -> None:
    """See that the server's optimizer still steps as this one would.

    Raises:
        ConfigError: a schedule, or the loop, has changed more than the learning rate of all.
    """
    groups = optimizer.param_groups
    if len(groups) != len(told):
        raise ConfigError(
            f"optimizer: it has {len(groups)} groups, {len(told)} when it was attached; {REMEDY}"
        )
    _check_rates(groups)
    for before, now in zip(told, settings_of(optimizer), strict=True):
        for key, value in before.items():
            if now[key] != value:
                raise ConfigError(
                    f"optimizer: {key} is {now[key]}, {value} when it was attached, with which SyncPS's "
                    "server goes on: leave it as it is (cycle_momentum=False of OneCycleLR and CyclicLR), or "
                    f"{REMEDY}"
                )
    _check_hooks(optimizer)


def check_none_frozen(
    optimizer: torch.optim.Optimizer, trained: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """See that the server, which knows of no frozen parameter, leaves those alone that the loop has frozen.

    Raises:
        ConfigError: momentum or weight decay would move one, though its gradient is 0.
    """
    groups = optimizer.param_groups
    if not any(group.get("momentum", 1) or group["weight_decay"] for group in groups):
        return
    for name, parameter in trained:
        if not parameter.requires_grad:
            raise ConfigError(
                f"optimizer: parameter {name} has been frozen since it was attached, but with SyncPS "
                "momentum and weight decay go on to change it: leave requires_grad as it is, or train in "
                f"two runs, or {REMEDY}"
            )


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            f"optimizer: it has step hooks, which SyncPS's server does not call: leave them out, or {REMEDY}"
        )


def _check_rates(groups: list[dict[str, Any]]) -> None:
    if len({float(group["lr"]) for group in groups}) > 1:
        raise ConfigError(f"optimizer: its groups have several learning rates; {REMEDY}")


def _check_all_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a parameter that would be trained though the loop's optimizer does not have it."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in held:
            raise ConfigError(
                f"optimizer: it has not the trainable parameter {plain_name(name)}; give it to the "
                "optimizer, or call requires_grad_(False) on it; if another optimizer steps it, use "
                "algorithm: edp, which takes several"
            )


def check_rule(rule: Mapping[str, Any], run: RunConfig) -> None:
    """Refuse an optimizer that differs from the run's; its learning rate may."""
    for key in ("optimizer", "weight_decay", "optimizer_args"):
        if rule[key] != getattr(run.train, key):
            raise ConfigError(
                f"optimizer: {key} is {rule[key]}, in the run {getattr(run.train, key)}; give all processes "
                "the same"
            )
