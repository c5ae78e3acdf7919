import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smolcluster.configs.schema import GradientClipping, TrainConfig
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.server.store import Store
from smolcluster.training.optimizer import STEP_COUNT
from smolcluster.training.recipe import OptimizerSpec, Training
from smolcluster.training.replica import Replica
from smolcluster.training.torch_optimizer import torch_class

RATE, DECAY = 0.01, 0.1
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "dampening": 0.5}),
    ("adam", {}),
    ("adamw", {}),
    ("adamw", {"betas": (0.8, 0.95), "eps": 1e-6}),
    ("SGD", {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adadelta", {"rho": 0.8}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adam", {"amsgrad": True, "betas": [0.8, 0.9]}),
    ("Adafactor", {}),
]
CLASSES = {"sgd": "SGD", "adamw": "AdamW", "adam": "Adam", "muon": "Muon"}
OURS: list[tuple[str, dict[str, Any]]] = [*CASES, ("muon", {})]
"""And one that takes its steps as two classes of PyTorch do."""


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(dtype)


def replica_of(
    kind: Any,
    arguments: Mapping[str, Any] = {},
    groups: Any = None,
    decay: float = DECAY,
    dtype: torch.dtype = torch.float32,
) -> Replica:
    spec = OptimizerSpec(kind, arguments, groups, RATE)
    return Replica(model(dtype), spec, weight_decay=decay)


def train(replica: Replica, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        replica.grads.copy_(torch.randn(replica.num_params, generator=generator))
        replica.clip(GradientClipping(max_norm=0.5))
        replica.step(RATE * (1 + step % 3))


def plain(
    replica: Replica, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> Tensor:
    """The same steps by PyTorch alone; the weights then, laid out as the replica's."""
    shares = [group["lr"] / RATE for group in optimizer.param_groups]
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        flat = torch.randn(replica.num_params, generator=generator).to(replica.params.dtype)
        for name, place in replica.layers:
            named[name].grad = flat[place].view(named[name].shape).clone()
        nn.utils.clip_grad_norm_(list(named.values()), 0.5)
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = share * RATE * (1 + step % 3)
        optimizer.step()
    return torch.cat([named[name].detach().flatten() for name, _ in replica.layers])


def decay_of(kind: str) -> float:
    return DECAY if "weight_decay" in inspect.signature(torch_class(kind)).parameters else 0.0


@pytest.mark.parametrize(
    ("kind", "arguments", "dtype"),
    [
        *((*case, torch.float32) for case in (*CASES, ("sgd", {}))),
        *((name, {}, torch.float64) for name in ("sgd", "adam", "adamw")),
    ],
)
def test_any_optimizer_of_pytorch_takes_its_own_steps(
    kind: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    decay = decay_of(CLASSES.get(kind, kind))
    replica = replica_of(kind, arguments, decay=decay, dtype=dtype)
    train(replica, range(12))
    named = dict(model(dtype).named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in named.values() if weight.ndim > 1]},
        {"params": [weight for weight in named.values() if weight.ndim <= 1]},
    ]
    if decay:
        groups = [
            group | {"weight_decay": own} for group, own in zip(groups, (decay, 0.0), strict=True)
        ]
    make: Any = torch_class(CLASSES.get(kind, kind))
    optimizer = make(groups, lr=RATE, **arguments)
    expected = plain(replica, optimizer, named)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-10, 1e-12)
    torch.testing.assert_close(replica.params, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("kind", "arguments"), OURS)
def test_a_restored_state_continues_bit_for_bit(kind: str, arguments: dict[str, Any]) -> None:
    decay = decay_of(CLASSES.get(kind, kind))
    whole, resumed = (replica_of(kind, arguments, decay=decay) for _ in range(2))
    train(whole, range(7))
    train(resumed, range(3))  # what it did before leaves nothing behind
    resumed.params.copy_(whole.params)
    resumed.optimizer.resume(whole.optimizer.state)
    for replica in (whole, resumed):
        train(replica, range(7, 14))
    assert torch.equal(whole.params, resumed.params)
    assert whole.optimizer.state[STEP_COUNT] == 14
    for name, tensor in whole.optimizer.state.items():
        assert torch.equal(tensor, resumed.optimizer.state[name]), name


@pytest.mark.parametrize(("kind", "arguments"), OURS)
def test_a_step_leaves_a_gradient_as_it_is_that_others_may_need(
    kind: str, arguments: dict[str, Any]
) -> None:
    """SyncPS may still be sending it: SGD with nesterov adds to it, and Rprop sets it, with foreach."""
    if kind not in CLASSES and "foreach" in inspect.signature(torch_class(kind)).parameters:
        arguments = {**arguments, "foreach": True}
    if kind == "SGD":
        arguments = {**arguments, "nesterov": True}
    replica = replica_of(kind, arguments, decay=decay_of(CLASSES.get(kind, kind)))
    stores = Store.of(replica)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(replica.num_params, generator=generator)
        before = gradient.clone()
        stores.take(gradient)
        stores.step(1.0, RATE)
        assert torch.equal(gradient, before)
        replica.grads.copy_(gradient)
        replica.step(RATE)
        assert torch.equal(replica.grads, before)


@pytest.mark.parametrize("kind", ["Adagrad", "NAdam", "Adafactor"])
def test_a_reset_begins_anew(kind: str) -> None:
    fresh, used = replica_of(kind), replica_of(kind)
    train(used, range(5))
    used.optimizer.reset()
    used.params.copy_(fresh.params)
    for replica in (fresh, used):
        train(replica, range(5))
    assert torch.equal(fresh.params, used.params)


def test_muon_trains_a_model_of_matrices() -> None:
    matrices = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False))
    replica = Replica(matrices, OptimizerSpec("Muon", learning_rate=RATE))
    before = replica.params.clone()
    train(replica, range(3))
    assert not torch.equal(before, replica.params)
    with pytest.raises(
        ConfigError,
        match=r"Muon cannot train this model: Muon only supports 2D.*set optimizer to muon",
    ):
        replica_of("Muon")


class Lion(torch.optim.Optimizer):
    """Chen et al., 2302.06675, with a count of steps that is no tensor."""

    def __init__(
        self, groups: Any, lr: float = 1e-4, weight_decay: float = 0.0, beta: float = 0.9
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["average"], state["num_steps"] = torch.zeros_like(weight), 0
                state["num_steps"] += 1
                state["average"] = state["average"].lerp(weight.grad, 1 - group["beta"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.grad.sign_()  # it may do with its gradient what it likes
                rate = group["lr"] / state["num_steps"]
                weight.add_(state["average"].sign() * 0.5 + 0.5 * weight.grad, alpha=-rate)


def test_a_user_s_own_optimizer_trains_by_its_own_groups() -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        norm = list(module.get_submodule("1").parameters())
        others = [*module.get_submodule("0").parameters(), *module.get_submodule("3").parameters()]
        return [{"params": others, "weight_decay": 0.3}, {"params": norm, "lr": 10 * RATE}]

    replica = replica_of(Lion, {"beta": 0.8}, groups)
    gradient = torch.randn(replica.num_params)
    kept = gradient.clone()
    replica.optimizer.step_with(gradient, RATE)
    assert torch.equal(gradient, kept), "a gradient that is on its way to others is not changed"
    replica = replica_of(Lion, {"beta": 0.8}, groups)
    train(replica, range(12))
    twin = model()
    own = [dict(group) for group in groups(twin)]
    own[1]["weight_decay"] = DECAY
    with torch.no_grad():
        optimizer = Lion(own, lr=RATE, beta=0.8)
        expected = plain(replica, optimizer, dict(twin.named_parameters()))
    torch.testing.assert_close(replica.params, expected)
    assert replica.optimizer.state["average"].shape == replica.params.shape
    assert replica.optimizer.state["scalars"].tolist() == [12.0] * len(replica.layers)


def test_groups_may_be_named_by_patterns() -> None:
    groups = [
        {"names": ["*.bias", "1.*"], "weight_decay": 0.0},
        {"names": "[03].weight", "lr": 0.5 * RATE},
    ]
    replica = replica_of("adamw", {}, groups)
    train(replica, range(12))
    named = dict(model().named_parameters())
    big = [named[name] for name in ("0.weight", "3.weight")]
    small = [weight for weight in named.values() if not any(weight is each for each in big)]
    own = [
        {"params": small, "weight_decay": 0.0},
        {"params": big, "weight_decay": DECAY, "lr": 0.5 * RATE},
    ]
    expected = plain(replica, torch.optim.AdamW(own, lr=RATE), named)
    torch.testing.assert_close(replica.params, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([{"names": "*.weight"}], "parameter 0.bias is in none of the groups"),
        ([{"names": "*"}, {"names": "*.bias"}], "parameter 0.bias is in groups 1 and 2"),
        (lambda module: [{"params": module.nothing}], "training.groups"),
        (lambda _: [{"params": [nn.Parameter(torch.ones(2))]}], "no parameter of the model"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: Any, told: str) -> None:
    with pytest.raises((ConfigError, UserCodeError), match=told):
        replica_of("adamw", {}, groups)


@pytest.mark.parametrize(
    ("kind", "arguments", "told"),
    [
        ("sgd", {"momentun": 0.9}, "momentun, which sgd does not take.*did you mean momentum"),
        ("sgd", {"nesterov": True}, "nesterov is true, which needs momentum"),
        ("RMSprop", {"alfa": 0.9}, "alfa, which RMSprop does not take.*did you mean alpha"),
        ("NAdam", {"lr": 0.9}, "set learning_rate itself"),
        ("NAdam", {"betas": 3.0}, "optimizer NAdam cannot train this model"),
        (torch.optim.LBFGS, {}, "optimizer LBFGS cannot train this model"),
        ("LBFSG", {}, "did you mean LBFGS"),
        ("Rprop", {}, "weight_decay is 0.1, which the optimizer does not know"),
    ],
)
def test_what_an_optimizer_cannot_do_is_one_line(
    kind: Any, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        replica_of(kind, arguments, decay=0.0 if kind is torch.optim.LBFGS else DECAY)
    assert "\n" not in str(error.value)


def test_an_error_in_a_user_s_optimizer_names_its_line() -> None:
    def broken(groups: Any, lr: float) -> torch.optim.Optimizer:
        raise RuntimeError("no such thing")

    with pytest.raises(UserCodeError, match=r"training\.optimizer.*no such thing"):
        replica_of(broken)


class Hoarder(torch.optim.SGD):
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["all"] = ["a list"]


def test_state_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError, match="state 'all' is of type list"):
        replica_of(Hoarder)


class Counting(torch.optim.Optimizer):
    """Averages in its groups, as schedule-free optimizers count there; `keep` keeps more."""

    def __init__(self, params: Any, lr: float, keep: str = "") -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0, "total": 0.5})
        self.keep, self.num_calls = keep, 0

    @torch.no_grad()
    def step(self, _closure: None = None) -> None:  # type: ignore[override]
        self.num_calls += self.keep == "attribute"
        if self.keep == "global":
            self.state["all"] = {"num_steps": 1}  # type: ignore[index]
        for group in self.param_groups:
            group["num_steps"] += 1
            group["total"] += group["lr"] / 3
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["total"] / group["num_steps"])
                if self.keep == "late":
                    self.state[each]["slow"] = each.clone() if group["num_steps"] > 1 else None


def test_what_a_user_s_optimizer_counts_in_its_groups_is_part_of_its_state() -> None:
    groups = [{"names": "0.*"}, {"names": ["1.*", "3.*"], "lr": RATE / 2}]
    whole, resumed = (replica_of(Counting, groups=groups, decay=0.0) for _ in range(2))
    train(whole, range(5))
    resumed.params.copy_(whole.params)
    resumed.optimizer.resume({key: each.clone() for key, each in whole.optimizer.state.items()})
    for replica in (whole, resumed):
        train(replica, range(5, 9))
    assert torch.equal(whole.params, resumed.params)
    assert {9.0} < set(whole.optimizer.state["scalars"].tolist())


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("attribute", "num_calls"),
        ("global", "all"),
        ("late", "'slow' of a parameter after its first"),
    ],
)
def test_what_a_user_s_optimizer_keeps_where_nobody_saves_it_is_refused(
    keep: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=f"Counting .*{told}"):
        replica_of(Counting, {"keep": keep}, decay=0.0)


def test_a_configuration_can_name_exactly_what_pytorch_has() -> None:
    schema = TrainConfig.model_json_schema()["properties"]["optimizer"]
    named = {name for name in schema["enum"] if name not in CLASSES and name != "auto"}
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and name != "Optimizer"
    }
    assert named == kinds - {"LBFGS", "SparseAdam"}
    spec = Training(optimizer=torch.optim.RMSprop).optimizer_for(
        TrainConfig.model_validate(
            {"dataset": {"name": "digits"}, "optimizer": "torch.optim.NAdam"}
        )
    )
    assert spec.kind is torch.optim.RMSprop
