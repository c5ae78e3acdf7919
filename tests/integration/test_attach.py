"""A loop of one's own in a cluster: attached processes as threads, with the real server beside them."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

from harness import SECRET, Cluster, Outcome, free_port
from peers import logger
from smolcluster.algorithms.DiLoCo import rounds
from smolcluster.algorithms.serving import ATTACHED, settings_for
from smolcluster.api import attach as attaching
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ClusterEmpty, ConfigError, ConnectTimeout, Rejected
from smolcluster.runs.events import BeginningEnded
from smolcluster.runs.summary import Summary
from smolcluster.server import offering
from smolcluster.server.link import WorkerSetup
from smolcluster.server.offering import BAD_OFFER, NO_MODEL, wait_for_offer
from smolcluster.utils.retry import Deadline
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import Welcome
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret
from tiers import at_night

NUM_SAMPLES, BATCH = 90, 20
DATA = TensorDataset(
    torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1)),
    torch.randn(NUM_SAMPLES, 2, generator=torch.Generator().manual_seed(2)),
)
LOG = logging.Logger("test")
ALGORITHMS = ("edp", "syncps", "diloco")
EXACT = {
    "edp": ("worker_update_interval=1",),
    "syncps": (),
    "diloco": ("outer_lr=1", "outer_momentum=0", "local_steps=3"),
}
"""With these one attached loop is the plain one."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Module:
    """The same weights each time, whatever other threads draw meanwhile."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


class Served:
    """A server of attached loops in a thread, and its cluster file."""

    def __init__(
        self, folder: Path, algorithm: str, *overrides: str, secret: Secret = SECRET
    ) -> None:
        self.file = folder / "cluster.yaml"
        self.file.write_text(
            "host_ip: {home: 127.0.0.1, ann: 127.0.0.1, bob: 127.0.0.1}\n"
            "server: home\nworkers: [ann, bob]\nnum_workers: 2\n"
            f"algorithm: {algorithm}\nport: {free_port()}\nmetrics_port: null\n"
            "heartbeat_timeout_s: 60\nstart_timeout_s: 120\nempty_cluster_timeout_s: 20\n"
        )
        self.folder = folder
        settings = load_settings(
            self.file, ATTACHED, None, [f"batch_size={BATCH}", "num_epochs=2", *overrides]
        )
        self.cluster: Cluster
        self.is_up = threading.Event()

        def serve() -> Summary | None:
            is_synchronous = algorithm == "syncps"
            spec = get_algorithm(algorithm)
            offered = wait_for_offer(
                settings.cluster,
                Node(
                    hello=introduce(settings.cluster.server),
                    secret=secret,
                    log=LOG,
                    encryption=settings.cluster.encryption,
                ),
                needs_optimizer=is_synchronous,
                check=lambda offer: settings_for(settings, spec, offer),
            )
            told = settings_for(settings, spec, offered.offer)
            self.cluster = Cluster(
                told, folder, None, secret, algorithm=algorithm, workload=offered.workload
            )
            self.is_up.set()
            self.cluster.server.join()
            return self.cluster.server.summary

        self.server = Outcome("serving", serve)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str = "ann",
        num_samples: int | None = None,
    ) -> attaching.Cluster:
        return attaching.attach(
            model,
            optimizer,
            self.file,
            name=name,
            num_samples=num_samples,
            secret=SECRET,
            overrides=(f"runs_dir={self.folder / 'runs'}",),
        )

    def finish(self) -> Summary:
        self.server.finish()
        summary = self.cluster.finish()
        assert summary.samples_applied == 2 * NUM_SAMPLES
        return summary

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.cluster.training.replica.model.state_dict()


def train_alone(
    batches: Iterable[list[int]], make: MakeOptimizer, max_norm: float = math.inf
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain loop, and its optimizer."""
    model = net()
    optimizer = make(model)
    for batch in batches:
        optimizer.zero_grad()
        inputs, targets = DATA[batch]
        backward(functional.mse_loss(model(inputs), targets))
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model, optimizer


def train(
    served: Served,
    name: str = "ann",
    make: MakeOptimizer = adam,
    model: nn.Module | None = None,
    *,
    val_loss: float | None = None,
    at_once: int | None = None,
) -> tuple[nn.Module, list[list[int]]]:
    """A user's loop, and the samples of each of its batches; `val_loss`: it finds that after each."""
    model = model or net()
    batches: list[list[int]] = []
    optimizer = make(model)
    with served.attach(model, optimizer, name) as cluster:
        sampler = Noted(cluster.sampler(DATA, at_once), batches)
        for inputs, targets in DataLoader(DATA, batch_sampler=sampler):
            loss = functional.mse_loss(model(inputs), targets)
            backward(loss)
            cluster.loss = loss
            if val_loss is not None:
                cluster.log(val_loss=val_loss)
            if cluster.is_step_due:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return model, batches


def train_both(
    served: Served, val_loss: float | None = None
) -> list[tuple[nn.Module, list[list[int]]]]:
    """Two loops at once, to the end of the run."""
    results: list[tuple[nn.Module, list[list[int]]]] = []

    def loop(name: str) -> None:
        results.append(train(served, name, val_loss=val_loss))

    workers = [Outcome(name, partial(loop, name)) for name in ("ann", "bob")]
    for worker in workers:
        worker.finish()
    served.server.finish()
    return results


class Noted(Sampler[list[int]]):
    """Keeps what a sampler gives."""

    def __init__(self, sampler: Sampler[list[int]], batches: list[list[int]]) -> None:
        self.sampler, self.batches = sampler, batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            self.batches.append(batch)
            yield batch


def assert_close(weights: dict[str, Tensor], model: nn.Module, atol: float = 1e-5) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=atol)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": 0.01 / (i + 1)} for i, p in enumerate(model.parameters())]
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("algorithm", "make"),
    [*((each, adam) for each in ALGORITHMS), ("edp", in_groups), ("syncps", momentum)],
)
def test_one_attached_loop_equals_the_plain_one(
    tmp_path: Path, algorithm: str, make: MakeOptimizer
) -> None:
    served = Served(tmp_path, algorithm, *EXACT[algorithm])
    model, batches = train(served, make=make)
    summary = served.finish()
    assert sorted(index for batch in batches for index in batch) == sorted(
        [*range(NUM_SAMPLES)] * 2
    )
    assert_close(served.weights, train_alone(batches, make)[0])
    assert_close(served.weights, model)
    assert summary.final.train_loss is not None
    rate = served.cluster.metrics.steps[-1].values["lr"]
    assert rate == (1.0 if algorithm == "edp" else make(net()).param_groups[0]["lr"])


@pytest.mark.parametrize("mode", ["streaming", *at_night("sync")])
def test_a_loop_in_diloco_keeps_the_state_of_its_optimizer_and_clips_as_the_run_does(
    tmp_path: Path, mode: str
) -> None:
    """It is saved beside the run's checkpoints, and is in the optimizer at the end."""
    clipping = "gradient_clipping.enabled=true", "gradient_clipping.max_norm=0.1"
    own = f"mode={mode}", "checkpoint_steps=3", "keep_last=100", *clipping
    served = Served(tmp_path, "diloco", *EXACT["diloco"], *own)
    used: list[torch.optim.Optimizer] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        used.append(adam(model))
        return used[-1]

    _, batches = train(served, make=make)
    served.finish()
    plain, optimizer = train_alone(batches, adam, max_norm=0.1)
    assert_close(served.weights, plain, atol=1e-6)
    assert len(batches) == 10
    states = [list(each.state.values()) for each in (used[0], optimizer)]
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"])
    kept = sorted(tmp_path.glob("runs/test-run/own/worker-rank0-ann/*.safetensors"))
    assert kept
    assert load_file(kept[-1])["Adam/0.weight/exp_avg/Tensor"].shape == (16, 6)


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [*((each, ()) for each in ALGORITHMS), ("diloco", ("mode=async", "local_steps=2"))],
)
def test_two_loops_share_the_samples_and_each_counts_once(
    tmp_path: Path, algorithm: str, own: tuple[str, ...]
) -> None:
    served = Served(tmp_path, algorithm, "min_workers=2", "batch_size=10", *own)
    results = train_both(served)
    served.finish()
    seen = [index for _, batches in results for batch in batches for index in batch]
    assert set(seen) == set(range(NUM_SAMPLES))
    for model, _ in results:
        assert_close(served.weights, model, atol=0)
    if algorithm == "syncps":
        assert served.cluster.training.replica.optimizer.state, (
            "the server has the loops' optimizer"
        )


def test_loops_that_patience_ends_within_a_round_have_the_runs_weights(tmp_path: Path) -> None:
    own = "min_workers=2", "batch_size=5", "mode=sync", "sync_fraction=0", "local_steps=10"
    served = Served(tmp_path, "diloco", *own, "patience=2")
    for model, _ in train_both(served, val_loss=1.0):
        assert_close(served.weights, model, atol=0)


def test_loops_begin_diloco_with_the_steps_of_one_with_their_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is all beginning: two loops' batches of 10 are one's of 20."""
    monkeypatch.setattr(rounds, "MOST_WAITING", math.inf)
    own = "min_workers=2", "batch_size=10", "sync_fraction=1", "codec=null", "grace=600"
    served = Served(tmp_path, "diloco", *own)

    train_both(served)
    served.finish()
    order = torch.cat([served.cluster.training.order(epoch) for epoch in range(2)])
    batches = [batch.tolist() for batch in torch.split(order, 20)]
    assert_close(served.weights, train_alone(batches, adam)[0], atol=1e-6)
    assert {step.values["lr"] for step in served.cluster.metrics.steps} == {0.01}


def test_a_loop_whose_optimizer_the_server_has_not_begins_with_rounds(tmp_path: Path) -> None:
    served = Served(tmp_path, "diloco", *EXACT["diloco"], "sync_fraction=1")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=0.01)

    _, batches = train(served, make=make)
    served.finish()
    assert_close(served.weights, train_alone(batches, make)[0], atol=1e-6)
    [event] = served.cluster.happened(BeginningEnded)
    assert "0 steps" in event.reason
    assert "is a loop whose optimizer" in event.reason


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_loop_with_its_own_sampler_and_schedule_is_counted(
    tmp_path: Path, algorithm: str
) -> None:
    served = Served(tmp_path, algorithm, *EXACT[algorithm])
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    loader = DataLoader(DATA, batch_size=BATCH)
    plain, steps = net(), 0
    progress: list[float] = []
    with served.attach(model, optimizer, num_samples=NUM_SAMPLES) as cluster:
        while cluster.running:
            for inputs, targets in loader:
                optimizer.zero_grad()
                for half in range(2):
                    part = slice(half, None, 2)
                    backward(functional.mse_loss(model(inputs[part]), targets[part]) / 2)
                progress.append(cluster.progress)
                optimizer.step()
                schedule.step()
                steps += cluster.running
    summary = served.finish()
    assert summary.final.train_loss is None, "nobody told a loss"
    assert "loss" not in served.cluster.metrics.steps[-1].values
    assert served.cluster.metrics.steps
    theirs = adam(plain)
    again = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.8**step)
    batches = [batch for _ in range(2) for batch in loader]
    for inputs, targets in batches:
        theirs.zero_grad()
        backward(functional.mse_loss(plain(inputs), targets))
        theirs.step()
        again.step()
    assert summary.steps == len(batches)
    assert_close(served.weights, plain)
    starts = [epoch * NUM_SAMPLES + start for epoch in (0, 1) for start in range(0, 90, BATCH)]
    assert progress[: len(starts)] == [start / (2 * NUM_SAMPLES) for start in starts]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_s_overflows_are_skipped_and_counted(
    tmp_path: Path, algorithm: str, unscales: bool
) -> None:
    """As it does alone, but for the samples: those of a step that is skipped count as seen."""
    served = Served(tmp_path, algorithm, *EXACT[algorithm])
    batches: list[list[int]] = []

    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, sampler: Iterable[list[int]]
    ) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**16), []
        for batch in sampler:
            batches.append(batch)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = functional.mse_loss(model(DATA[batch][0]).float(), DATA[batch][1]) * 100
            backward(scaler.scale(loss))
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    model = net()
    optimizer = adam(model)
    with served.attach(model, optimizer) as cluster:
        scales = loop(model, optimizer, cluster.sampler(DATA))
    summary = served.finish()
    plain = net()
    assert loop(plain, adam(plain), list(batches)) == scales
    num_skipped = sum(2.0**16 / scale > 1 for scale in sorted(set(scales)))
    assert num_skipped > 0
    assert served.cluster.core.report.status("ended").overflows == num_skipped
    assert served.cluster.metrics.steps[-1].values["overflows"] == num_skipped
    assert "loss_scale" not in served.cluster.metrics.steps[-1].values
    assert summary.steps == len(scales)
    assert_close(served.weights, plain)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_a_wrapper_that_would_step_past_the_cluster_is_refused() -> None:
    class Scaling(torch.optim.SGD):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(net().parameters())
            self.optimizer, self.scaler = optimizer, object()

    model = net()
    with pytest.raises(ConfigError, match="use bf16 instead of fp16"):
        attaching.attach(model, Scaling(adam(model)), "edp", name="pi5")


def test_without_a_server_there_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "host_ip: {home: 127.0.0.1, ann: 127.0.0.1}\nserver: home\nworkers: [ann]\nnum_workers: 1\n"
        f"port: {free_port()}\nmetrics_port: null\nstart_timeout_s: 0.2\n"
    )
    model = net()
    optimizer = adam(model)
    before = optimizer.step
    with (
        pytest.raises(ConnectTimeout, match=r"the server at 127\.0\.0\.1:\d+ did not let this"),
        attaching.attach(model, optimizer, file, name="ann", secret=SECRET),
    ):
        pass
    assert optimizer.step == before


def test_what_does_not_fit_the_run_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    served = Served(tmp_path, "edp", "min_workers=2")
    worker = Outcome("ann", lambda: train(served, "ann") and None)
    assert served.is_up.wait(30)
    wider = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    shorter = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    refusals: list[tuple[nn.Module, Any, int | None, str]] = [
        (wider, DATA, None, r"parameter 2\.weight \(3, 16\)"),
        (shorter, DATA, None, r"parameter 2\.weight \(2, 16\) float32 is only in"),
        (net(), DATA, NUM_SAMPLES, r"come from cluster\.sampler"),
        (net(), DATA.tensors[0][:30], None, "an epoch has 30, in the run 90"),
    ]
    for model, data, num_samples, sentence in refusals:
        with (
            pytest.raises(ConfigError, match=sentence),
            served.attach(model, adam(model), "bob", num_samples=num_samples) as cluster,
        ):
            cluster.sampler(data)
    train(served, "bob")
    worker.finish()
    served.finish()


def test_a_process_whose_offer_comes_second_joins_and_nobody_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path, "edp", "min_workers=2")
    worker = Outcome("ann", lambda: train(served, "ann") and None)
    assert served.is_up.wait(30)
    ask, before = WorkerSetup.ask, iter([Rejected("it was asked a moment ago", NO_MODEL)])

    def asked(self: WorkerSetup) -> Welcome:
        for answer in before:
            raise answer
        return ask(self)

    monkeypatch.setattr(WorkerSetup, "ask", asked)
    train(served, "bob")
    worker.finish()
    served.finish()
    assert not [line for line in served.cluster.log_lines if "not let in" in line]


@pytest.mark.parametrize(
    ("make", "overrides", "code", "sentence"),
    [
        (
            lambda model: torch.optim.RMSprop(model.parameters()),
            (),
            None,
            "RMSprop, SyncPS takes sgd, adam, adamw; use algorithm: edp",
        ),
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
            ("learning_rate=0.01", "lr_schedule.min_lr=0.005"),
            BAD_OFFER,
            "min_lr",
        ),
    ],
    ids=["an optimizer that its server cannot make", "settings that nobody can train with"],
)
def test_syncps_refuses_an_offer_and_its_server_waits_on(
    tmp_path: Path,
    make: MakeOptimizer,
    overrides: tuple[str, ...],
    code: str | None,
    sentence: str,
) -> None:
    served = Served(tmp_path, "syncps", *overrides)
    model = net()
    with (
        pytest.raises(Rejected, match=sentence) as caught,
        served.attach(model, make(model)) as cluster,
    ):
        cluster.sampler(DATA)
    assert code in {None, caught.value.code}
    train(served)
    served.finish()


def test_an_offer_that_the_server_cannot_hold_is_refused_and_it_waits_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offering, "MAX_SCRATCH_NBYTES", 8)
    served = Served(tmp_path, "edp")
    model = net()
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    with (
        pytest.raises(Rejected, match="12 bytes of non-persistent buffers") as caught,
        served.attach(model, adam(model)) as cluster,
    ):
        cluster.sampler(DATA)
    assert caught.value.code == BAD_OFFER
    train(served)
    served.finish()


def test_a_server_waits_for_an_offer_from_the_last_bucket_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []

    class NotedDeadline(Deadline):
        def __init__(self, seconds: float) -> None:
            made.append(seconds)
            super().__init__(seconds)

    monkeypatch.setattr(offering, "Deadline", NotedDeadline)
    served = Served(tmp_path, "edp", "num_epochs=1")
    model = nn.Linear(6, 100_000)  # 700,000 values are 3 buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with served.attach(model, optimizer) as cluster:
        cluster.sampler(DATA)
        assert served.is_up.wait(30)
        for _ in DataLoader(DATA, batch_sampler=cluster.sampler(DATA)):
            optimizer.step()
    served.server.finish()
    served.cluster.finish()
    assert made == [120.0] * 3


def test_edp_pushes_what_the_loop_itself_changes_between_two_steps(tmp_path: Path) -> None:
    """Here a second optimizer, and weights that are clipped as those of a WGAN."""

    def loop(model: nn.Module, batches: Iterable[list[int]]) -> None:
        first = torch.optim.SGD(model.get_submodule("0").parameters(), lr=0.05)
        second = torch.optim.Adam(model.get_submodule("2").parameters(), lr=0.01)
        attached = served.attach(model, first) if model is own else nullcontext()
        with attached as cluster:
            for batch in batches if cluster is None else cluster.sampler(DATA):
                drawn.append(batch)
                model.zero_grad()
                inputs, targets = DATA[batch]
                backward(functional.mse_loss(model(inputs), targets))
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.3, 0.3)
                second.step()
                first.step()

    served = Served(tmp_path, "edp", *EXACT["edp"])
    drawn: list[list[int]] = []
    own, plain = net(), net()
    loop(own, [])
    served.finish()
    loop(plain, list(drawn))
    assert_close(served.weights, plain)


def test_wrong_uses_are_told(tmp_path: Path) -> None:
    served = Served(tmp_path, "edp")
    model = net()
    optimizer = adam(model)
    with served.attach(model, optimizer) as cluster:
        with pytest.raises(ConfigError, match="attached already"), served.attach(model, optimizer):
            pass
        with pytest.raises(
            ConfigError, match=r"cluster\.sampler\(dataset\), or give attach num_samp"
        ):
            optimizer.step()
        loader = DataLoader(DATA, batch_size=BATCH, sampler=cluster.sampler(DATA))
        with pytest.raises(ConfigError, match="pass it to the DataLoader as batch_sampler"):
            next(iter(loader))
    with pytest.raises(ConfigError, match="not the model's"), served.attach(net(), optimizer):
        pass
    train(served)
    served.finish()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_loader_that_reads_ahead_is_refused_and_its_samples_count_once_elsewhere(
    tmp_path: Path, algorithm: str
) -> None:
    served = Served(tmp_path, algorithm)
    model = net()
    optimizer = adam(model)
    with (
        pytest.raises(ConfigError, match=r"cluster\.sampler was asked for more .*num_workers=0"),
        served.attach(model, optimizer, "bob") as cluster,
    ):
        loader = DataLoader(DATA, batch_sampler=cluster.sampler(DATA), num_workers=1)
        for inputs, targets in loader:
            backward(functional.mse_loss(model(inputs), targets))
            optimizer.step()
    train(served)
    served.finish()


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    served = Served(tmp_path, "edp", "empty_cluster_timeout_s=0.1")
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ConfigError, match="weight is sparse; make its embedding with sparse=False"),
        served.attach(model, optimizer, num_samples=9),
    ):
        backward(functional.embedding(torch.arange(5), model.weight, sparse=True).sum())
        optimizer.step()
    assert served.is_up.wait(30)
    assert isinstance(served.cluster.server.failure(), ClusterEmpty)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_batch_norm_has_seen_reaches_the_server(tmp_path: Path, algorithm: str) -> None:
    served = Served(tmp_path, algorithm, *EXACT[algorithm])
    model = nn.Sequential(
        nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    train(served, model=model)
    summary = served.finish()
    assert_close(served.weights, model)
    assert served.weights["2.num_batches_tracked"] == summary.steps


@pytest.mark.parametrize(("batch_size", "at_once"), [(89, None), (45, 11)])
def test_a_batch_of_one_sample_does_not_stop_batch_norm(
    tmp_path: Path, batch_size: int, at_once: int | None
) -> None:
    served = Served(tmp_path, "edp", "worker_update_interval=1", f"batch_size={batch_size}")
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    _, batches = train(served, model=model, at_once=at_once)
    served.finish()
    assert 1 in map(len, batches)
    assert all(each.training for each in model.modules())
    assert_close(served.weights, model)


def test_evaluations_of_a_loop_are_the_run_s(tmp_path: Path) -> None:
    served = Served(tmp_path, "edp")
    model = net()
    optimizer = adam(model)
    with served.attach(model, optimizer) as cluster:
        for number, _ in enumerate(cluster.sampler(DATA)):
            backward(model(DATA.tensors[0]).square().mean())
            cluster.log(0.5)
            cluster.log(val_loss=2.0 - number / 10, val_accuracy=0.25)
            optimizer.step()
        lines: list[str] = []
        cluster._log = logger(lines)
        cluster.log(val_loss=9.0)
        cluster.log(val_loss=9.0)
        assert len(lines) == 1, "what comes too late is said once"
    summary = served.finish()
    assert summary.final.val_loss == pytest.approx(2.0 - number / 10)
    assert summary.final.model_dump()["val_accuracy"] == 0.25
    assert summary.final.train_loss == 0.5
