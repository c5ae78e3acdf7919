"""What `attach` finds out of an optimizer for SyncPS, and what two attached processes compare."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from smolcluster.api import attach as attaching
from smolcluster.api import callbacks
from smolcluster.api.attach import attach
from smolcluster.api.attached_optimizer import LoopOptimizer
from smolcluster.api.attached_process import own_name
from smolcluster.api.loop_watch import LoopWatch
from smolcluster.api.synchronous_optimizer import (
    check_settings,
    describe_optimizer,
    settings_of,
)
from smolcluster.configs.overrides import ATTACH_VARIABLE, NAME_VARIABLE
from smolcluster.errors import ConfigError, ModelChanged, ProtocolError
from smolcluster.server.offering import Layer, Plan
from smolcluster.training.buffers import NUM_FIRST


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize("spread", ["ranks.dp=2", "stages.host_ip.win=127.0.0.1"])
def test_a_loop_of_one_s_own_is_one_process(spread: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    key = spread.partition(".")[0]
    with pytest.raises(
        ConfigError, match=rf"nodes\.pi5\.{key} is .* is one process: set it to null"
    ):
        attach(model, optimizer, "edp", name="pi5", overrides=(spread,))


def test_a_trainable_parameter_that_the_optimizer_lacks_is_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"0\.weight.*requires_grad_\(False\)"):
        describe_optimizer(model, optimizer)
    model[0].requires_grad_(False)
    assert describe_optimizer(model, optimizer)["optimizer"] == "sgd"


@pytest.mark.parametrize("decays", [(0.1, 0.0), (0.0, 0.1), (0.1, 0.2)])
def test_matrices_have_one_weight_decay(decays: tuple[float, float]) -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    groups: list[dict[str, Any]] = [
        {"params": layer.parameters(), "weight_decay": decay}
        for layer, decay in zip(model, decays, strict=True)
    ]
    with pytest.raises(ConfigError, match="matrices have weight_decay"):
        describe_optimizer(model, torch.optim.AdamW(groups))


def test_adam_with_decoupled_weight_decay_is_not_taken_for_adam() -> None:
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    with pytest.raises(ConfigError, match="AdamW"):
        describe_optimizer(model, optimizer)


def test_the_learning_rate_is_that_of_the_schedule_s_peak_while_it_warms_up() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert describe_optimizer(model, optimizer)["learning_rate"] == 0.1
    with pytest.raises(ConfigError, match="lr is 0"):
        describe_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0))


def nesterov(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def cycles(optimizer: torch.optim.Optimizer) -> None:
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (cycles, r"momentum is 0\.95, 0\.9 when it was attached.*cycle_momentum=False"),
        (
            lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
            "weight_decay is 0.5",
        ),
        (lambda optimizer: optimizer.param_groups[0].update(lr=0.5), None),
        (lambda optimizer: optimizer.add_param_group({"params": [], "lr": 0.5}), "2 groups"),
        (lambda optimizer: optimizer.register_step_post_hook(print), "step hooks"),
    ],
)
def test_syncps_refuses_settings_that_change_after_the_server_was_told(
    change: Callable[[torch.optim.Optimizer], object], sentence: str | None
) -> None:
    optimizer = nesterov(net())
    told = settings_of(optimizer)
    check_settings(optimizer, told)
    change(optimizer)
    if sentence is None:
        check_settings(optimizer, told)
        return
    with pytest.raises(ConfigError, match=rf"{sentence}.*use algorithm: edp"):
        check_settings(optimizer, told)


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def replace(model: nn.Module) -> None:
    model.get_submodule("1").weight = nn.Parameter(torch.ones(2, 4))


def test_a_group_for_what_was_frozen_is_refused_for_what_it_thaws() -> None:
    """That a group is new is true as well, but no algorithm takes what was frozen."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = nesterov(model[1])
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    watch = LoopWatch(model, optimizer, trained, is_synchronous=True)
    for _ in range(NUM_FIRST + 1):  # from now on it hardly ever looks
        watch.begin(0)
        watch.end()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ModelChanged, match=r"parameter 0\.weight is frozen when training begins"):
        watch.end()


@pytest.mark.parametrize(
    ("change", "sentence", "is_refused_by"),
    [
        (clip, r"parameter 0\.weight changes between two calls", (True,)),
        (replace, r"parameter 1\.weight \(Linear\) is replaced", (True, False)),
        (lambda model: model[0].requires_grad_(True), r"parameter 0\.\w+ is frozen", (True, False)),
        (lambda model: model[1].requires_grad_(False), r"1\.weight has been frozen", (True,)),
    ],
)
def test_what_a_loop_does_to_parameters_and_nobody_hears_of_is_refused(
    change: Callable[[nn.Module], object], sentence: str, is_refused_by: tuple[bool, ...]
) -> None:
    for is_synchronous in (True, False):
        model = net()
        if "is frozen" in sentence:
            model[0].requires_grad_(False)
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        watch = LoopWatch(model, nesterov(model), trained, is_synchronous=is_synchronous)
        watch.begin(0)
        change(model)
        if is_synchronous in is_refused_by:
            with pytest.raises((ModelChanged, ConfigError), match=sentence):
                watch.end()
        else:
            watch.end()


def test_what_is_frozen_stays_so_with_an_optimizer_that_leaves_it() -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = LoopWatch(model, plain, list(model.named_parameters()), is_synchronous=True)
    watch.begin(0)
    model[1].requires_grad_(False)
    watch.end()


def test_complex_parameters_are_refused_with_what_to_write() -> None:
    model = nn.ParameterDict({"filter": nn.Parameter(torch.zeros(3, dtype=torch.cfloat))})
    with pytest.raises(ConfigError, match=r"filter is torch\.complex64.*view_as_real"):
        Plan.of(model, 9, is_counted=False)


def test_frozen_weights_are_compared() -> None:
    ours, theirs = net(), net()
    ours[0].requires_grad_(False)
    theirs[0].requires_grad_(False)
    here = Plan.parse(Plan.of(ours, 9, is_counted=False).text)
    assert here.difference(Plan.of(theirs, 9, is_counted=False)) is None
    with torch.no_grad():
        next(theirs.parameters())[0, 0] += 1
    difference = here.difference(Plan.of(theirs, 9, is_counted=False))
    assert difference is not None
    assert "frozen" in difference


def test_what_a_launcher_calls_a_process_stands_above_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--name", "experiment-3"])
    monkeypatch.setenv(NAME_VARIABLE, "pi5")
    assert own_name(None) == "experiment-3"
    monkeypatch.setenv(ATTACH_VARIABLE, "{}")
    assert own_name(None) == "pi5"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"val_loss": float("nan")}, "'val_loss' is nan"),
        ({"top 5": 1.0}, "'top 5' is 1"),
        ({f"v{number}": 1.0 for number in range(65)}, "65 values"),
    ],
)
def test_values_that_cannot_be_told_are_named(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        attaching._logged(values)


@pytest.mark.parametrize(
    "layers",
    [
        [Layer("buffer", "mean", (3,), "float32")],
        [Layer("parameter", "weight", (0,), "float32")],
        [Layer("parameter", "weight", (2**30, 2**30), "float32")],
        [Layer("parameter", "w", (3,), "float32"), Layer("scratch", "s", (2**31,), "float64")],
    ],
)
def test_a_plan_that_cannot_be_held_is_refused_before_memory_is_taken(layers: list[Layer]) -> None:
    with pytest.raises(ProtocolError, match="the plan"):
        Plan.parse(Plan(tuple(layers), 9, is_counted=False).text)


def test_a_second_iterator_of_a_sampler_goes_on_where_the_first_one_stopped() -> None:
    lease = attaching._Lease(torch.arange(7), 7)
    cluster: Any = SimpleNamespace(running=True, _lease=lease)
    sampler = attaching.LeaseSampler(cluster, 3)
    assert [next(iter(sampler)) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(ConfigError, match=r"before optimizer\.step\(\)"):
        next(iter(sampler))
    cluster._lease = attaching._Lease(torch.arange(2), 2)
    assert next(iter(sampler)) == [0, 1]


class Attached:
    rank, running = 0, True

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False


def test_a_callback_leaves_a_training_that_was_cut_short_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callbacks, "attach", lambda *_, **__: Attached())
    callback = callbacks._Attached()
    begin_callback(callback, [0], 1, -1)
    first = callback.cluster
    assert first is not None
    begin_callback(callback, [0], 1, -1)
    assert not first.running
    assert callback.cluster is not None
    assert callback.cluster.running


def begin_callback(
    callback: callbacks._Attached, data: object, max_epochs: int, max_steps: int
) -> None:
    loader = SimpleNamespace(dataset=data)
    callback._begin(None, None, loader, batch_size=2, max_epochs=max_epochs, max_steps=max_steps)


@pytest.mark.parametrize(
    ("limits", "num_epochs", "is_said"),
    [
        ((1, -1), 1, False),
        ((1, 4), 1, True),
        ((1, 5), 1, False),
        ((-1, 5), 1, False),
        ((-1, 11), 3, True),
        ((-1, -1), None, False),
    ],
)
def test_a_run_has_the_trainer_s_epochs_and_a_trainer_that_stops_before_its_end_says_so(
    limits: tuple[int, int],
    num_epochs: int | None,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(callbacks, "attach", lambda *_, **each: told.update(each) or Attached())
    with caplog.at_level(logging.WARNING, "smolcluster"):
        begin_callback(callbacks._Attached(), range(9), *limits)
    assert (told["num_samples"], told["num_epochs"]) == (9, num_epochs)
    assert bool(caplog.records) == is_said


@pytest.mark.parametrize(
    ("num_epochs", "max_steps", "most"), [(4.0, -1, 4), (3.0, 1000, -1), (0.5, 0, 1)]
)
def test_steps_that_a_trainer_is_told_stand_above_its_epochs(
    num_epochs: float, max_steps: int, most: int
) -> None:
    told = SimpleNamespace(num_train_epochs=num_epochs, max_steps=max_steps)
    assert callbacks._max_epochs(told) == most


def test_a_callback_refuses_data_without_a_length() -> None:
    with pytest.raises(ConfigError, match="training data have no length"):
        begin_callback(callbacks._Attached(), iter([0]), 1, -1)


@pytest.mark.parametrize(
    ("how", "batch_size"),
    [
        ({"batch_size": 4}, 4),
        ({"batch_sampler": BatchSampler(range(9), 3, drop_last=False)}, 3),
        ({"batch_size": None}, 1),
        ({"batch_sampler": [[0, 1], [2]]}, None),
    ],
)
def test_a_step_counts_the_samples_of_a_loader_s_batch(
    how: dict[str, Any], batch_size: int | None
) -> None:
    loader = DataLoader(TensorDataset(torch.arange(9)), **how)
    if batch_size is not None:
        assert callbacks._batch_size(loader) == batch_size
        return
    with pytest.raises(ConfigError, match="batch_sampler an attribute batch_size"):
        callbacks._batch_size(loader)


@pytest.mark.parametrize("has_generator", [True, False])
def test_loaders_that_shuffle_draw_another_order_in_each_process(has_generator: bool) -> None:
    def order(rank: int) -> list[int]:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(7) if has_generator else None
        data = TensorDataset(torch.arange(100))
        loader = DataLoader(data, 100, shuffle=True, generator=generator)
        callbacks._shuffle_apart(loader, rank)
        [[indices]] = loader
        return [int(each) for each in indices]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert sorted(order(0)) == sorted(order(1)) == list(range(100))


class Counting(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["num_steps"] = state.get("num_steps", 0) + 1
            self.param_groups[0]["lr"] = 0.1 / state["num_steps"]
        return super().step(closure)


class CountingInGroups(torch.optim.SGD):
    """Keeps a number in its groups, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


def stepped(optimizer: LoopOptimizer, model: nn.Module, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "a user's": lambda model: Counting(model.parameters(), lr=0.1),
    "a user's that counts in groups": lambda model: CountingInGroups(model.parameters(), lr=0.1),
}


def of_loop(name: str, model: nn.Module) -> LoopOptimizer:
    optimizer = OPTIMIZERS[name](model)
    return LoopOptimizer(optimizer, optimizer.step, list(model.named_parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_s_optimizer_goes_on_with_a_state_that_was_kept_and_can_begin_anew(
    name: str,
) -> None:
    whole, resumed = net(), net()
    ours, theirs = of_loop(name, whole), of_loop(name, resumed)
    stepped(ours, whole, range(3))
    resumed.load_state_dict(whole.state_dict())
    other = LoopOptimizer(torch.optim.Adamax(net().parameters()), lambda: None, [])
    kept = {key: tensor.clone() for key, tensor in ours.state.items()}
    theirs.resume(kept | other.state | {"owed.0": torch.ones(3)})
    assert theirs.state.keys() == ours.state.keys()
    for each, model in ((ours, whole), (theirs, resumed)):
        stepped(each, model, range(3, 5))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    fresh = net()
    whole.load_state_dict(fresh.state_dict())
    ours.reset()
    for each, model in ((ours, whole), (of_loop(name, fresh), fresh)):
        stepped(each, model, range(2))
    assert all(map(torch.equal, whole.parameters(), fresh.parameters()))


def test_the_state_of_an_optimizer_of_another_class_is_left_aside() -> None:
    model = net()
    ours, theirs = of_loop("adam", model), of_loop("momentum", model)
    stepped(ours, model, range(1))
    theirs.resume(ours.state)
    assert not theirs.state
    stepped(theirs, model, range(2))
