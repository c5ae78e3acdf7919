import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from smolcluster.algorithms.EDP.config import EDPConfig
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.SynchronousPS.config import SyncPSConfig
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.load import find_config, parse_yaml, read_yaml, shipped_names
from smolcluster.configs.machines import localise
from smolcluster.configs.overrides import (
    check_node_overrides,
    from_overrides,
    node_overrides,
    public_overrides,
)
from smolcluster.configs.problems import SettingError, UnknownKey
from smolcluster.configs.resolve import load_resolved, load_settings, resolve, save_resolved
from smolcluster.configs.schema import (
    AlgorithmName,
    Settings,
    SimpleNNConfig,
    cluster_section,
    train_section,
)
from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.utils.words import one_line, show

HOSTS = {"mini1": "10.10.0.1", "macbook": "10.10.0.1", "pi5": "192.168.50.1", "win": "10.10.0.1"}
CLUSTER: dict[str, Any] = {
    "host_ip": HOSTS,
    "port": 65432,
    "num_workers": 3,
    "workers": ["pi5", "win", "macbook"],
    "server": "mini1",
    "worker_update_interval": 10,
    "use_quantization": False,
    "seed": 42,
}
TODAY = {key: value for key, value in CLUSTER.items() if key != "use_quantization"}
SYNCPS = TODAY | {"worker_update_interval": 4, "timeout": 0.1}
NN: dict[str, Any] = {
    "batch_size": 32,
    "learning_rate": 0.001,
    "num_epochs": 2,
    "eval_steps": 200,
    "track_gradients": True,
    "polyak_alpha": 0.5,
    "gradient_clipping": {"enabled": True, "max_norm": 1.0},
    "model": {"type": "SimpleNN", "input_dim": 784, "hidden": 128, "out": 10},
    "dataset": {"name": "MNIST"},
}


def settle(
    *overrides: str,
    environ: Mapping[str, str] | None = None,
    node_name: str | None = None,
    cluster: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> Settings:
    """Resolve the users' two files with some changes."""
    return resolve(
        cluster=CLUSTER | (cluster or {}),
        train=NN | (train or {}),
        node_name=node_name,
        overrides=overrides,
        environ=environ,
    )


def raised(*overrides: str, **layers: Any) -> SettingError:
    """The error with which a configuration is refused."""
    with pytest.raises(SettingError) as caught:
        settle(*overrides, **layers)
    return caught.value


def refusal(*overrides: str, **layers: Any) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        settle(*overrides, **layers)
    text = str(caught.value)
    assert text.isprintable()
    for jargon in ("Traceback", "pydantic", "input_value", "[type=", "Input should"):
        assert jargon not in text
    return text


# What is shipped


def test_every_yaml_in_the_folder_is_shipped_under_a_name() -> None:
    folder = find_config("edp", "cluster").parent
    named = {find_config(name, "cluster") for name in shipped_names("cluster")}
    named |= {find_config(name, "training") for name in shipped_names("training")}
    assert named == set(folder.glob("*.yaml"))


def test_the_shipped_files_hold_what_users_have_by_todays_keys() -> None:
    assert read_yaml(find_config("edp", "cluster")) == {**TODAY, "codec": None}
    assert read_yaml(find_config("syncps", "cluster")) == SYNCPS
    assert read_yaml(find_config("nn", "training")) == NN


def test_keys_that_users_do_not_have_get_their_defaults() -> None:
    settings = settle()
    assert settings.cluster == cluster_section().model_validate(TODAY)
    assert settings.train == train_section().model_validate(NN)
    assert (settings.train.optimizer, settings.cluster.elastic) == ("adam", True)
    assert settings.cluster.codec is None
    assert settings.of(EDPConfig) == EDPConfig()
    assert settings.of(SyncPSConfig) == SyncPSConfig()
    assert (settings.train.global_batch_size, settings.node.microbatch) == (None, None)


@pytest.mark.parametrize(
    ("stated", "chosen"),
    [
        ((), "muon"),
        (("servers=[mini1,pi5]",), "adamw"),
        (("mesh.tp=2",), "adamw"),
        (("mesh.fsdp=2",), "adamw"),
        (("mesh.dp=2", "mesh.pp=2"), "muon"),
        (("nodes.pi5.ranks={dp: 1, fsdp: 2}",), "adamw"),
        (("nodes.pi5.ranks={dp: 2}",), "muon"),
        (("optimizer=sgd",), "sgd"),
    ],
)
def test_an_optimizer_is_chosen_by_who_holds_parts_of_matrices(
    stated: tuple[str, ...], chosen: str
) -> None:
    assert settle("optimizer=auto", *stated).train.optimizer == chosen


# Precedence


def test_override_beats_environment_beats_file_beats_default() -> None:
    environ = {"SMOLCLUSTER_PORT": "2", "SMOLCLUSTER_SEED": "2", "SMOLCLUSTER_MODEL__HIDDEN": "2"}
    settings = settle("port=3", environ=environ, cluster={"min_workers": 2})
    assert settings.cluster.port == 3
    assert settings.cluster.seed == 2
    assert settings.train.model == SimpleNNConfig(hidden=2)
    assert settings.cluster.min_workers == 2
    assert settings.cluster.start_timeout_s == 120.0


def test_a_node_has_its_own_layer_between_environment_and_file() -> None:
    cluster = {"nodes": {"pi5": {"threads": 2, "device": "cpu", "dataset": {"root": "/pi"}}}}
    train = {"dataset": {"name": "MNIST", "root": "/file", "download": False}}
    environ = {"SMOLCLUSTER_DEVICE": "mps"}
    node = settle("threads=4", environ=environ, node_name="pi5", cluster=cluster, train=train).node
    assert (node.threads, node.device) == (4, "mps")
    assert (node.dataset.root, node.dataset.download) == (Path("/pi"), False)


@pytest.mark.parametrize(
    ("here", "stated", "environ", "expected"),
    [
        (["pi5", "win", "macbook"], None, {}, 3),
        (["pi5"], None, {}, 6),
        ([], None, {}, None),
        (["win", "macbook"], None, {}, None),
        (["pi5", "win", "macbook"], 2, {}, 2),
        (["pi5", "win", "macbook"], None, {"OMP_NUM_THREADS": "4"}, None),
    ],
)
def test_processes_of_one_machine_share_its_cores(
    here: list[str],
    stated: int | None,
    environ: dict[str, str],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's is one of them."""
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    overrides = [f"host_ip.{node}=127.0.0.1" for node in here]
    told = settle(*overrides, f"threads={'null' if stated is None else stated}", node_name="pi5")
    assert told.num_threads(environ) == expected


@pytest.mark.parametrize(
    ("node", "cluster", "overrides", "environ", "threads"),
    [
        ("pi5", {"nodes": {"pi5": {"threads": 2}}}, [], {}, 2),
        ("win", {"nodes": {"pi5": {"threads": 2}}}, [], {}, None),
        (None, {"nodes": {"mini1": {"threads": 2}}}, [], {}, 2),  # the server
        ("pi5", {}, ["nodes.pi5.threads=2"], {}, 2),
        ("win", {}, ["nodes.pi5.threads=2"], {}, None),
        ("pi5", {"nodes": {"pi5": None}}, ["nodes.pi5.threads=2"], {}, 2),
        ("pi5", {"nodes": None}, ["nodes.pi5.threads=2"], {}, 2),
        (None, {}, ["nodes.mini1.threads=2"], {"SMOLCLUSTER_THREADS": "8"}, 2),
    ],
)
def test_a_node_has_what_is_set_by_its_full_key(
    node: str | None,
    cluster: dict[str, Any],
    overrides: list[str],
    environ: dict[str, str],
    threads: int | None,
) -> None:
    settings = settle(*overrides, node_name=node, cluster=cluster, environ=environ)
    assert settings.node.threads == threads
    [stated] = settings.cluster.nodes.values()
    assert stated.threads == 2


def test_the_place_of_a_dataset_is_the_machine_s_and_its_name_the_run_s() -> None:
    overrides = ["dataset.root=/data", "dataset.download=false", "dataset.name=digits"]
    settings = settle(*overrides, cluster={"nodes": {"mini1": {"dataset": {"root": "/other"}}}})
    assert settings.node.dataset.root == settings.train.dataset.root == Path("/data")
    assert settings.node.dataset.download is settings.train.dataset.download is False
    assert settings.train.dataset.name == "digits"


def test_resolving_leaves_its_arguments_alone() -> None:
    before = json.dumps([CLUSTER, NN])
    settle("host_ip.pi5=127.0.0.1", "model.hidden=3", "nodes.pi5.threads=1")
    assert json.dumps([CLUSTER, NN]) == before


def test_other_variables_of_the_environment_are_ignored() -> None:
    assert settle(environ={"PORT": "1", "smolcluster_port": "1", "WANDB_API_KEY": "x"}) == settle()


# Values


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("learning_rate=6e-4", "train.learning_rate", 6e-4),
        ("learning_rate=1", "train.learning_rate", 1.0),
        ("timeout=null", "cluster.timeout", None),
        ("timeout=", "cluster.timeout", None),
        ("timeout=0.1", "cluster.timeout", 0.1),
        ("bind=[127.0.0.1, ::1]", "cluster.bind", ("127.0.0.1", "::1")),
        ("codec=null", "cluster.codec", None),
        ("codec=bf16", "cluster.codec", "bf16"),
        ("mixing_rate=0.9999", "cluster.mixing_rate", 0.9999),
        (
            "batch_share={pi5: 0.25, win: 0.25, macbook: 0.5}",
            "cluster.batch_share",
            {"pi5": 0.25, "win": 0.25, "macbook": 0.5},
        ),
        ("global_batch_size=96", "train.global_batch_size", 96),
        ("microbatch=8", "node.microbatch", 8),
        ("staleness={bound: 4}", "cluster.staleness.bound", 4),
        ("staleness={bound: 4}", "cluster.staleness.exponent", 0.5),
        ("lr_schedule.warmup_iters=100", "train.lr_schedule.warmup_iters", 100),
        ("model.input_dim=null", "train.model.input_dim", None),
        ("logging.project_name=2026", "train.logging.project_name", "2026"),
        ("logging.project_name='a b'", "train.logging.project_name", "a b"),
        ("logging.project_name=a: b #1", "train.logging.project_name", "a: b #1"),
        ("dataset.root=/a=b", "node.dataset.root", Path("/a=b")),
        ("secret_file=null", "node.secret_file", None),
        (" port = 7 ", "cluster.port", 7),
    ],
)
def test_values_on_the_command_line_are_read_as_yaml(override: str, path: str, value: Any) -> None:
    found: Any = settle(override)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", ["macbook", "newcomer", "pi5.local"])
def test_addresses_are_set_by_name_also_of_new_nodes(name: str) -> None:
    settings = settle(f"host_ip.{name}=127.0.0.1")
    assert settings.cluster.host_ip == HOSTS | {name: "127.0.0.1"}


def test_a_mapping_sets_its_keys_and_leaves_the_others() -> None:
    settings = settle("host_ip={pi5: 127.0.0.1}", "gradient_clipping={enabled: false}")
    assert settings.cluster.host_ip == HOSTS | {"pi5": "127.0.0.1"}
    assert settings.train.gradient_clipping.max_norm == 1.0


def test_names_of_nodes_in_the_environment_match_whatever_their_case() -> None:
    environ = {"SMOLCLUSTER_HOST_IP__MINI1": "127.0.0.1", "SMOLCLUSTER_HOST_IP__PI5": "127.0.0.2"}
    hosts = {"Mini1": "10.0.0.1", **HOSTS}
    del hosts["mini1"]
    settings = settle(environ=environ, cluster={"host_ip": hosts, "server": "Mini1"})
    assert settings.cluster.host_ip == hosts | {"Mini1": "127.0.0.1", "pi5": "127.0.0.2"}


# Refusals


ABOVE_0 = "a whole number above 0"
WAIT = "a number above 0 and of 1000000 or less"
NAME = "a name of at most 64 letters, digits, '.', '_' and '-'"
ADDRESS = "an address or a name, without a port, such as 10.10.0.1"
NODE = "a node of host_ip (known: mini1, macbook, pi5, win)"
BLAMED = {
    "workers=[pi5, 2, win]": "workers[1]",
    "nodes.pi4.threads=1": "nodes",
    "host_ip.a/b=1.1.1.1": "host_ip",
    "bind=[pi@10.0.0.1]": "bind[0]",
    "kubernetes.secrets={A: b}": "kubernetes.secrets.A",
    "slurm.options={time: [1]}": "slurm.options.time",
    "optimizer_args={betas: {a: 1}}": "optimizer_args.betas",
}
"""The key that is blamed, where it is not the one that is set."""


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("foo", "--override: 'foo' has no '=', must be key=value, such as port=6000"),
        ("=5", "--override: the key '' is empty or has an empty part, must be like a.b"),
        (
            "model..hidden=5",
            "--override: the key 'model..hidden' is empty or has an empty part, must be like a.b",
        ),
    ],
)
def test_what_is_no_assignment_is_refused(override: str, says: str) -> None:
    assert refusal(override) == says


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("learning_rte=1", "learning_rte", "learning_rate"),
        ("modle.hiden=1", "modle.hiden", "model.hidden"),
        ("model={hiden: 1}", "model.hiden", "model.hidden"),
        ("training.epoch=1", "training.epoch", "training.epochs"),
        ("max_norm=1", "max_norm", "gradient_clipping.max_norm"),
        ("nodes.pi5.thread=1", "nodes.pi5.thread", "nodes.pi5.threads"),
        ("xyzzy=1", "xyzzy", None),
        ("port.x=1", "port.x", "port"),
        ("workers.0=pi5", "workers.0", "workers"),
        ("po\nrt=6", "po\nrt", "port"),
        ("use_quantisation=true", "use_quantisation", "use_quantization"),
        ("EDP={}", "EDP", "edp"),
        ("lr_schedule.warmup=5", "lr_schedule.warmup", "lr_schedule.warmup_iters"),
        ("gradient_clipping.max=1", "gradient_clipping.max", "gradient_clipping.max_norm"),
        ("checkpoint=9", "checkpoint", "checkpoint_steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    override: str, key: str, nearest: str | None
) -> None:
    error = raised(override)
    assert isinstance(error, UnknownKey)
    assert (error.source, error.key, error.nearest) == ("--override", key, nearest)
    hint = f"did you mean {nearest}?" if nearest else "known here: "
    assert refusal(override).startswith(one_line(f"--override: {key} is not a setting; {hint}"))


@pytest.mark.parametrize(
    ("override", "value", "says"),
    [
        ("model={}", {}, "name the keys to set"),
        (
            "port=[1",
            "[1",
            "which cannot be read: line 1: is not valid YAML (expected ',' or ']', but got '<stream end>')",
        ),
        ("num_workers=three", "three", ABOVE_0),
        ("num_workers=2.0", 2.0, ABOVE_0),
        ("num_workers=true", True, ABOVE_0),
        ("num_workers=4", 4, "but workers lists 3 (pi5, win, macbook); the two must agree"),
        ("port=0", 0, "a whole number from 1 to 65535"),
        ("learning_rate=null", None, "a number above 0"),
        ("learning_rate=.inf", math.inf, "a finite number above 0"),
        ("learning_rate=.nan", math.nan, "a finite number above 0"),
        ("use_quantization=yes", "yes", "true or false"),
        ("optimizer=adm", "adm", "one of adam, adamw, sgd, muon, auto, ASGD, Adadelta, Adagrad"),
        ("model=5", 5, "a mapping with keys of type, input_dim, hidden, out, activat"),
        ("lr_schedule=5", 5, "a mapping with keys of warmup_iters, min_lr, or null"),
        ("batch_share=5", 5, "a mapping of names to values, or null"),
        ("dataset.name=null", None, "text"),
        ("project_dir=x", "x", "a path that begins with / or ~/, without backslashes"),
        ("bind=127.0.0.1", "127.0.0.1", "a list of at least one, such as [a, b], or null"),
        ("bind=[]", [], "a list of at least one, such as [a, b], or null"),
        ("workers=[pi5, 2, win]", 2, NAME),
        ("workers=[pi5, win, pi5]", ("pi5", "win", "pi5"), "must list each node once"),
        ("server=mini2", "mini2", NODE),
        ("nodes.pi4.threads=1", "pi4", NODE),
        ("host_ip.a/b=1.1.1.1", "a/b", NAME),
        ("host_ip.pi5=", None, ADDRESS),
        ("host_ip.pi5=10.0.0.1:65432", "10.0.0.1:65432", ADDRESS),
        ("host_ip.pi5=http://pi5", "http://pi5", ADDRESS),
        ("host_ip.pi5=10.0.0.1/24", "10.0.0.1/24", ADDRESS),
        ("bind=[pi@10.0.0.1]", "pi@10.0.0.1", ADDRESS),
        ("nodes.pi5.ssh=-oProxyCommand=x", "-oProxyCommand=x", "what ssh connects to, such as"),
        ("nodes.pi5.env={A-B: x}", "A-B", "a variable's name of letters, digits and '_'"),
        ("nodes.pi5.torch=CUDA", "CUDA", "auto, pypi, or what uv's --torch-backend takes"),
        ("loki_url=localhost:3100", "localhost:3100", "an address such as http://192.168"),
        ("algorithm=EDP", "EDP", "an algorithm's name in small letters, such as edp, or null"),
        ("dataset.repository=a b", "a b", "a name on the Hugging Face hub, such as"),
        ("slurm.options={Gres: 1}", "Gres", "a long option of sbatch without its dashes"),
        ("kubernetes.namespace=Mine", "Mine", "a name of at most 63 small letters"),
        ("kubernetes.secrets={A: b}", "b", "a Secret's name and one of its keys, such as"),
        ("slurm.options={time: [1]}", [1], "text without blanks and quotes, a whole number"),
        ("sharding=[1]", [1], "a sharding file, what it holds, or null"),
        ("optimizer_args={betas: {a: 1}}", {"a": 1}, "a number, text, true, false or null, or a"),
        ("timeout=0", 0, f"{WAIT}, or null"),
        ("timeout=1e300", 1e300, f"{WAIT}, or null"),
        ("start_timeout_s=1e300", 1e300, WAIT),
        ("prepare_timeout_s=1e300", 1e300, WAIT),
        ("empty_cluster_timeout_s=1e9", 1000000000.0, WAIT),
        ("reconnect_timeout_s=1e300", 1e300, WAIT),
        ("heartbeat_timeout_s=1e300", 1e300, "a number from 0.1 to 1000000"),
        ("heartbeat_timeout_s=1e-300", 1e-300, "a number from 0.1 to 1000000"),
        ("model.activation=rely", "rely", "one of relu, gelu, silu, tanh"),
        ("codec=zip", "zip", "one of fp32, bf16, fp16, int8, int4, or null"),
        ("polyak_alpha=2", 2, "a number from 0 to 1"),
        ("mixing_rate=0", 0, "a number above 0"),
        (
            "mixing_rate=1",
            1,
            "must be below 1: a fresh worker's weights would replace the server's outright",
        ),
        ("update_rule=mix", "mix", "one of gradient, mixing"),
        ("global_batch_size=0", 0, f"{ABOVE_0}, or null"),
        ("microbatch=0", 0, f"{ABOVE_0}, or null"),
        ("batch_share.pi5=-1", -1, "a number of 0 or more"),
        ("staleness.exponent=-1", -1, "a number of 0 or more"),
        ("threads=0", 0, f"{ABOVE_0}, or null"),
        (
            "secret_file=~nobody-here/x",
            "~nobody-here/x",
            "must not begin with the home folder of an unknown user",
        ),
        ("port=6\n7", "6 7", "a whole number from 1 to 65535"),
    ],
)
def test_a_bad_override_is_refused_with_what_is_allowed(
    override: str, value: object, says: str
) -> None:
    key = BLAMED.get(override, override.partition("=")[0])
    error = raised(override)
    assert (error.source, error.key) == ("--override", key)
    assert show(error.value) == show(value)
    assert (error.allowed or error.problem).startswith(says)
    told = f"--override: {key} {error.verb} {show(value)}, {'must be ' * bool(error.allowed)}"
    assert refusal(override).startswith(f"{told}{says}")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PORT", "abc", "port is 'abc', must be a whole number from 1 to 65535"),
        ("MODEL__HIDEN", "1", "model.hiden is not a setting; did you mean model.hidden?"),
        ("", "1", "the key '' is empty"),
        ("NUM_WORKERS", "4", "num_workers is 4, but workers lists 3"),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(name: str, value: str, says: str) -> None:
    text = refusal(environ={f"SMOLCLUSTER_{name}": value})
    assert text.startswith(f"environment variable SMOLCLUSTER_{name}: {says}")


def test_the_value_of_an_unknown_variable_is_never_shown() -> None:
    assert "hunter2" not in refusal(environ={"SMOLCLUSTER_SECRET": "hunter2"})


HERE = "is not a setting here; did you mean"


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"prot": 1}, "prot is not a setting; did you mean port?"),
        (
            {"training": {"epochs": 1}, "port": 0},
            f"port is 0, must be a whole number from 1 to 65535; training.epochs {HERE} "
            "training.epochs in the training file?",
        ),
        ({"learning_rate": 1}, f"learning_rate {HERE} learning_rate in the training file?"),
        ({"model": {}}, f"model {HERE} model in the training file?"),
        ({"hidden": 1}, f"hidden {HERE} model.hidden in the training file?"),
        ({"threads": 1}, f"threads {HERE} threads in nodes.<name> of the cluster file?"),
        ({"num_workers": "3"}, f"num_workers is '3', must be {ABOVE_0}"),
        ({"num_workers": 2}, "num_workers is 2, but workers lists 3 (pi5, win, macbook)"),
        ({"workers": "pi5"}, "workers is 'pi5', must be a list such as [a, b]"),
        ({"host_ip": ["10.0.0.1"]}, "host_ip is ['10.0.0.1'], must be a mapping of names to valu"),
        ({"host_ip": HOSTS | {"pi5": 10.5}}, f"host_ip.pi5 is 10.5, must be {ADDRESS}"),
        ({"nodes": {"pi5": {"devise": ""}}}, "nodes.pi5.devise is not a setting; did you mean n"),
        ({"nodes": {"pi5": {"threads": "x"}}}, f"nodes.pi5.threads is 'x', must be {ABOVE_0}"),
        (
            {"nodes": {"pi5": {"runs_dir": [1]}}},
            "nodes.pi5.runs_dir is [1], must be a path, or null",
        ),
        ({"staleness": 1}, "staleness is 1, must be a mapping with keys of exponent, bound"),
    ],
)
def test_a_bad_cluster_file_is_refused_by_its_name(cluster: dict[str, Any], says: str) -> None:
    assert refusal(cluster=cluster).startswith(f"cluster configuration: {says}")


def test_a_missing_key_is_named_with_what_it_must_be() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(cluster=CLUSTER, train={"batch_size": 32})
    says = "training configuration: dataset is missing, must be a mapping with keys of "
    assert str(raised.value).startswith(says)


def test_several_problems_are_told_on_one_line_and_not_without_end() -> None:
    text = refusal("port=0", train={}, cluster={"seed": -1, "start_timeout_s": 0})
    assert text == (
        "--override: port is 0, must be a whole number from 1 to 65535; "
        "cluster configuration: seed is -1, must be a whole number from 0 to 9223372036854775807; "
        "start_timeout_s is 0, must be a number above 0 and of 1000000 or less"
    )
    many = {f"unknown_{index}": 1 for index in range(20)}
    assert refusal(cluster=many).endswith("; and 15 more")


def test_a_list_is_not_blamed_for_its_items() -> None:
    allowed = f"must be {ADDRESS}"
    text = refusal("bind=[1, 2]")
    assert text == f"--override: bind[0] is 1, {allowed}; bind[1] is 2, {allowed}"


def test_a_file_s_mistake_is_not_blamed_on_an_override_beside_it() -> None:
    assert refusal("seed=1", cluster={"port": 0}).startswith("cluster configuration: port is 0")
    assert refusal("model.out=1", train={"model": 5}).startswith(
        "training configuration: model is 5"
    )


def test_an_unknown_node_is_refused_with_those_that_are_known() -> None:
    says = (
        "node: 'pi4' has no address in host_ip (known: mini1, macbook, pi5, win); did you mean pi5?"
    )
    assert refusal(node_name="pi4") == says


# What travels, and what may be handed on


def test_what_travels_holds_nothing_of_this_machine() -> None:
    settings = settle("dataset.root=/data", "dataset.download=false", "device=cpu", "seed=7")
    run = settings.run_config("edp-1", "edp")
    assert (run.run_id, run.algorithm, run.seed) == ("edp-1", "edp", 7)
    assert run.train.dataset == train_section().model_validate(NN).dataset
    assert "/data" not in run.model_dump_json()


EDP_OWN = EDPConfig().model_dump()


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("codec=bf16", "codec", "bf16"),
        ("use_quantization=true", "codec", "int8"),
        ("update_rule=mixing", "own", EDP_OWN | {"update_rule": "mixing"}),
        ("mixing_rate=0.25", "own", EDP_OWN | {"mixing_rate": 0.25}),
    ],
)
def test_how_gradients_are_exchanged_travels(override: str, field: str, value: object) -> None:
    plain, changed = (settle(*texts).run_config("edp-1", "edp") for texts in ((), (override,)))
    assert changed == plain.model_copy(update={field: value})
    assert changed != plain


@pytest.mark.parametrize(
    ("algorithm", "overrides", "samples"),
    [
        ("syncps", ["batch_size=10"], 30),
        ("syncps", ["batch_size=10", "global_batch_size=64"], 64),
        ("edp", ["batch_size=10"], None),
        ("single", ["batch_size=10"], None),
        ("single", ["global_batch_size=64"], 64),
    ],
)
def test_the_global_batch_of_the_synchronous_server_travels_as_a_number(
    algorithm: AlgorithmName, overrides: list[str], samples: int | None
) -> None:
    train = settle(*overrides).run_config("r-1", algorithm).train
    assert train.global_batch_size == samples


# What an algorithm cannot follow


def objection(settings: Settings, algorithm: AlgorithmName) -> str | None:
    """Why the algorithm cannot follow these settings; None: it can."""
    try:
        check_algorithm(settings, algorithm)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", shipped_names("cluster"))
@pytest.mark.parametrize("is_local", [False, True])
def test_the_shipped_files_fit_the_algorithm_of_their_name(name: Any, is_local: bool) -> None:
    for train in shipped_names("training"):
        settings = load_settings(name, train, environ={}, local=is_local)
        assert objection(settings, name) is None, train


SHARES = "batch_share={pi5: 0.25, win: 0.25, macbook: 0.5}"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "says"),
    [
        (
            "syncps",
            ["global_batch_size=2"],
            "global_batch_size is 2, must be at least num_workers, 3, so that each worker has a sample "
            "of every step; raise global_batch_size, or lower num_workers and shorten workers",
        ),
        (
            "syncps",
            ["update_rule=mixing"],
            "update_rule is 'mixing', which is EDP's: all other servers apply gradients; "
            "set update_rule to gradient, or launch edp",
        ),
        (
            "edp",
            ["global_batch_size=96"],
            "global_batch_size is 96, which is SyncPS's: elsewhere a step is one worker's batch, of "
            "batch_size; set global_batch_size to null, or launch syncps",
        ),
        (
            "edp",
            [SHARES],
            "batch_share is a mapping, which is SyncPS's: any other worker takes as many batches as it can; "
            "set batch_share to null, or launch syncps",
        ),
        *(
            (
                "edp",
                ["update_rule=mixing", override],
                f"update_rule is mixing and codec is {codec}, but weights must travel whole; set codec to "
                "fp32, or update_rule to gradient",
            )
            for override, codec in (("use_quantization=true", "int8"), ("codec=fp16", "fp16"))
        ),
        (
            "edp",
            ["optimizer=muon", "servers=[mini1, pi5]"],
            "optimizer is muon and servers lists mini1, pi5, but each host steps a part of the weights, "
            "which only adam, adamw, sgd can; set servers to null, take algorithm diloco, or set "
            "optimizer to adamw",
        ),
        *(
            (
                algorithm,
                ["ema_decay=0.9", "servers=[mini1, pi5]"],
                "ema_decay is 0.9 and servers lists several, but the weights are averaged where all of them "
                "lie; set ema_decay or servers to null",
            )
            for algorithm in ("edp", "diloco")
        ),
        ("edp", ["optimizer=muon"], None),
        ("edp", ["optimizer=adamw", "servers=[mini1, pi5]"], None),
        ("diloco", ["optimizer=muon", "servers=[mini1, pi5]"], None),
        ("syncps", ["optimizer=muon", "ema_decay=0.9", "servers=[mini1, pi5]"], None),
        ("syncps", [], None),
        ("syncps", ["global_batch_size=3"], None),
        ("syncps", ["batch_size=1"], None),
        ("syncps", [SHARES, "codec=bf16"], None),
        ("edp", ["codec=int8"], None),
        ("edp", ["update_rule=mixing"], None),
        ("edp", ["update_rule=mixing", "codec=fp32"], None),
        ("single", ["global_batch_size=1"], None),
    ],
)
def test_what_an_algorithm_cannot_follow_is_refused(
    algorithm: AlgorithmName, overrides: list[str], says: str | None
) -> None:
    assert objection(settle(*overrides), algorithm) == says


def test_the_saved_configuration_is_yaml_and_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    settings = settle()
    save_resolved(settings, tmp_path / "config.yaml")
    assert read_yaml(tmp_path / "config.yaml") == parse_yaml(settings.to_yaml())
    with pytest.raises(SmolclusterError, match=r"gone/config\.yaml: cannot be written \(No such"):
        save_resolved(settings, tmp_path / "gone" / "config.yaml")


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("nodes.pi5.env.HF_TOKEN=abc", []),
        ("nodes.pi5.env={HF_TOKEN: abc, B: c}", []),
        ("nodes.pi5={env: {HF_TOKEN: abc}}", []),
        ("nodes={pi5: {env: {A: abc}}, win: {env: {A: abc}}}", []),
        ("env.HF_TOKEN=abc", []),
        ("env={HF_TOKEN: abc}", []),
        ("nodes.pi5={env: {A: abc}, threads: 2}", ['nodes={"pi5": {"threads": 2}}']),
        (
            'nodes={"pi5.local": {env: {A: abc}, dataset: {root: /data}}}',
            ['nodes={"pi5.local": {"dataset": {"root": "/data"}}}'],
        ),
        ("nodes.env.threads=2", ["nodes.env.threads=2"]),
        ("threads=2", ["threads=2"]),
        ("host_ip.env=10.0.0.1", ["host_ip.env=10.0.0.1"]),
    ],
)
def test_a_machines_environment_is_kept_from_others(text: str, public: list[str]) -> None:
    assert public_overrides(["port=7000", text, "seed=1"]) == ["port=7000", *public, "seed=1"]
    before, after = from_overrides([text]), from_overrides(public)
    assert [(each.path, each.value) for each in after] == [
        (each.path, each.value) for each in before if "env" not in (each.path[0], *each.path[2:3])
    ]


def test_workers_are_handed_what_is_their_machine_s_and_the_way_to_the_server() -> None:
    own = [
        "device=cpu",
        "threads=1",
        "microbatch=8",
        "dataset.root=/data",
        "secret_file=/s",
        "nodes.pi5.threads=1",
    ]
    way = ["server=pi5", "port=7000", "host_ip.pi5=127.0.0.1", "start_timeout_s=5", "encryption=on"]
    others = [
        "seed=1",
        "codec=bf16",
        "batch_share.pi5=1",
        "dataset.name=digits",
        "dataset={name: digits, root: /data}",
        "bind=[::1]",
    ]
    assert node_overrides([*own, *others, *way]) == [*own, *way]
    check_node_overrides([*own, *way])
    for override in others:
        with pytest.raises(ConfigError, match="is not a worker's to set; give it to the server"):
            check_node_overrides([override])


def test_an_override_of_the_servers_is_answered_with_the_nearest_of_a_workers() -> None:
    with pytest.raises(ConfigError) as refused:
        check_node_overrides(["microbatches=4"])
    answer = str(refused.value)
    assert answer.endswith("; did you mean microbatch?")
    assert "smolcluster config show --node NODE" in answer
    assert "recompute" not in answer, "not every key"


@pytest.mark.parametrize("override", ["foo", "devise=cpu"])
def test_a_bad_override_is_not_silently_kept_from_workers(override: str) -> None:
    with pytest.raises(ConfigError, match="--override: "):
        node_overrides([override])


# On this machine alone


def local(overrides: Sequence[str] = (), num_workers: int | None = None, **more: Any) -> Settings:
    return load_settings(
        "edp", "digits", None, overrides, {}, local=True, local_workers=num_workers, **more
    )


@pytest.mark.parametrize(("asked", "num_workers"), [(None, 3), (1, 1), (3, 3), (5, 5)])
def test_a_local_cluster_is_on_this_machine_with_as_many_workers_as_asked_for(
    asked: int | None, num_workers: int
) -> None:
    cluster = local(num_workers=asked).cluster
    assert (cluster.server, cluster.bind) == ("mini1", ("127.0.0.1",))
    assert cluster.num_workers == num_workers
    assert cluster.workers == tuple(f"worker{number}" for number in range(1, num_workers + 1))
    assert set(cluster.workers) <= set(cluster.host_ip)
    assert set(cluster.host_ip.values()) == {"127.0.0.1"}


def test_a_local_cluster_forgets_the_deadline_for_late_workers_and_keeps_the_rest() -> None:
    stated = cluster_section().model_validate(
        TODAY
        | {"timeout": 0.1, "min_workers": 3, "elastic": False, "nodes": {"pi5": {"threads": 2}}}
    )
    cluster = localise(stated, 2)
    assert getattr(cluster, "timeout", 0.1) is None
    assert cluster.min_workers == 2
    assert cluster.nodes == {"worker1": stated.nodes["pi5"]}
    assert cluster_section().model_validate(cluster.model_dump()) == cluster


def test_pipelines_on_one_machine_have_a_port_each(tmp_path: Path) -> None:
    def stages(node: str) -> dict[str, Any]:
        return {"stages": {"host_ip": {node: "127.0.0.1"}}}

    path = tmp_path / "cluster.yaml"
    nodes = {node: stages(node) for node in ("pi5", "win", "macbook")}
    path.write_text(json.dumps(CLUSTER | {"nodes": nodes, "port": 65434}))
    own = load_settings(path, "digits", environ={}, local=True).cluster.nodes.values()
    ports = [each.stages.port for each in own if each.stages is not None]
    assert ports == [65433, 65435, 65436]
    fewer = load_settings(path, "digits", environ={}, local=True, local_workers=2).cluster
    assert fewer.stage_nodes == ("worker1", "worker2")
    with pytest.raises(
        ConfigError, match=r"nodes\.win\.stages\.port is 65433, and nodes\.worker1\."
    ):
        load_settings(path, "digits", None, ["nodes.win.stages.port=65433"], environ={}, local=True)


def test_a_local_run_that_goes_on_with_more_workers_has_the_next_names(tmp_path: Path) -> None:
    """Of an earlier version, too, which called workers by the machines of the file."""
    for earlier in (local(num_workers=2), settle("workers=[pi5, win]", "num_workers=2")):
        file = tmp_path / "config.yaml"
        save_resolved(earlier, file)
        settings = load_settings(
            file, file, None, ["nodes.win.threads=2"], {}, local=True, local_workers=3
        )
        assert settings.cluster.workers == ("worker1", "worker2", "worker3")
        assert settings.cluster.nodes["worker2"].threads == 2


def test_names_of_the_file_stand_for_the_workers_of_a_local_cluster() -> None:
    stages = (
        "{host_ip: {pi5: 127.0.0.1, mini1: 127.0.0.1}, shard_plan: {mini1: [0, 2], pi5: [2, 4]}}"
    )
    overrides = [
        *("nodes.win.threads=2", f"nodes.pi5.stages={stages}", "servers=[mini1, macbook]"),
        *("batch_share={pi5: 0.5, win: 0.5}", "shard_plan={macbook: [0, 1], win: [1, 2]}"),
        "workload_args.nodes={pi5: 1}",
    ]
    environ = {
        "SMOLCLUSTER_NODES__MACBOOK__DEVICE": "cpu",
        "SMOLCLUSTER_BATCH_SHARE__MACBOOK": "0",
        "SMOLCLUSTER_WORKERS": "[macbook, pi5, win]",
    }
    settings = load_settings("edp", "digits", "macbook", overrides, environ, local=True)
    cluster = settings.cluster
    assert (settings.name, settings.node.device) == ("worker3", "cpu")
    assert cluster.workers == ("worker3", "worker1", "worker2")
    assert cluster.servers == ("mini1", "worker3")
    assert cluster.nodes["worker2"].threads == 2
    stage = cluster.nodes["worker1"].stages
    assert stage is not None
    assert set(stage.host_ip) == {"worker1", "mini1"}
    assert stage.shard_plan == {"mini1": (0, 2), "worker1": (2, 4)}
    assert settings.of(SyncPSConfig).batch_share == {"worker1": 0.5, "worker2": 0.5, "worker3": 0}
    assert settings.of(PipelineConfig).shard_plan == {"worker3": (0, 1), "worker2": (1, 2)}
    assert settings.train.workload_args == {"nodes": {"pi5": 1}}


def test_an_address_by_a_name_of_the_file_is_its_worker_s_on_a_local_cluster() -> None:
    cluster = local(["host_ip.macbook=127.0.0.2"]).cluster
    assert cluster.host_ip[cluster.node_of("macbook")] == "127.0.0.2"


@pytest.mark.parametrize("layer", ["file", "override", "environment"])
def test_settings_of_a_worker_hold_for_it_on_a_local_cluster_by_either_name(
    tmp_path: Path, layer: str
) -> None:
    path = tmp_path / "cluster.yaml"
    nodes = {"nodes": {"win": {"microbatch": 2}}} if layer == "file" else {}
    path.write_text(json.dumps(CLUSTER | nodes))
    overrides = ["nodes.win.microbatch=2"] if layer == "override" else []
    environ = {"SMOLCLUSTER_NODES__WIN__MICROBATCH": "2"} if layer == "environment" else {}
    for name, microbatch in (("win", 2), ("worker2", 2), ("worker1", None), ("mini1", None)):
        settings = load_settings(path, "digits", name, overrides, environ, local=True)
        assert settings.node.microbatch == microbatch


@pytest.mark.parametrize(
    ("server", "workers", "called"),
    [
        ("mini1", ["mini1", "pi5"], ("mini1", "worker2")),
        ("mini1", ["worker2", "pi5"], ("worker2", "pi5")),
        ("worker1", ["pi5", "win"], ("pi5", "win")),
    ],
)
def test_a_local_worker_keeps_its_name_where_it_is_the_server_s_or_a_node_has_the_new_one(
    tmp_path: Path, server: str, workers: list[str], called: tuple[str, ...]
) -> None:
    path = tmp_path / "cluster.yaml"
    hosts = dict.fromkeys((server, *workers), "10.0.0.1")
    mine = {"host_ip": hosts, "server": server, "workers": workers, "num_workers": 2}
    path.write_text(json.dumps(CLUSTER | mine))
    assert load_settings(path, "digits", environ={}, local=True).cluster.workers == called
    more = load_settings(path, "digits", environ={}, local=True, local_workers=3).cluster
    assert more.workers == (*called, "worker3")


SECTION = {"update_rule": "mixing", "staleness": {"bound": 4}}


@pytest.mark.parametrize("layer", ["file", "override", "environment", "one key"])
@pytest.mark.parametrize("is_local", [False, True])
def test_an_algorithm_s_keys_may_stand_below_its_name(
    tmp_path: Path, layer: str, is_local: bool
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(CLUSTER | ({"edp": SECTION} if layer == "file" else {})))
    overrides, environ = [], {}
    if layer == "override":
        overrides = [f"edp={json.dumps(SECTION)}"]
    elif layer == "one key":
        overrides = ["edp.update_rule=mixing", "edp.staleness.bound=4"]
    elif layer == "environment":
        environ = {
            "SMOLCLUSTER_EDP__UPDATE_RULE": "mixing",
            "SMOLCLUSTER_EDP__STALENESS__BOUND": "4",
        }
    settings = load_settings(path, "digits", None, overrides, environ, local=is_local)
    own = settings.of(EDPConfig)
    assert (own.update_rule, own.staleness.bound) == ("mixing", 4)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (
            {"edp": {"update_rul": "mixing"}},
            "edp.update_rul is not a setting; did you mean edp.update_rule?",
        ),
        ({"edp": {"mixing_rate": 2}}, "edp.mixing_rate is 2, must be below 1"),
        ({"edp": {"timeout": 2}}, "edp.timeout is not a setting"),
        ({"edp": {"port": 2}}, "edp.port is not a setting; did you mean port?"),
        ({"edp": 5}, "edp is 5, must be a mapping of keys to values"),
        (
            {"edp": SECTION, "update_rule": "mixing"},
            "update_rule is 'mixing', and also set as edp.update_rule",
        ),
        ({"syncps": {"polyak_alpha": 0.1}}, "did you mean polyak_alpha in the training file?"),
    ],
)
def test_what_is_wrong_below_an_algorithm_s_name_is_told_in_these_words(
    cluster: dict[str, Any], says: str
) -> None:
    assert says in refusal(cluster=cluster)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({"pi": 0.5, "win": 0.5}, "'pi', must be a node of host_ip"),
        ({"pi5": 0.5, "mini1": 0.5}, "no share for the worker 'win'"),
        ({"pi5": 0.25, "win": 0.25, "macbook": 0.25}, "adds up to 0.75, must add up to 1"),
        ({"pi5": 0.25, "win": 0.25, "macbook": 0.500002}, "adds up to 1.000002, must"),
        ({}, "no share for the worker 'pi5'"),
        ({"pi5": 0.333333, "win": 0.333333, "macbook": 0.333333}, None),
        ({"pi5": 0, "win": 0.9, "macbook": 0, "mini1": 0.1}, None),
    ],
)
def test_shares_are_of_all_workers_and_make_a_whole(
    shares: dict[str, float], says: str | None
) -> None:
    said = objection(settle(cluster={"batch_share": shares}), "syncps")
    assert said is None if says is None else says in (said or "")


@pytest.mark.parametrize("num_workers", [0, -1])
def test_a_cluster_without_workers_is_refused(num_workers: int) -> None:
    with pytest.raises(ConfigError, match=f"--workers is {num_workers}, must be a whole number ab"):
        local(num_workers=num_workers)


def test_a_number_of_workers_is_for_local_clusters_only() -> None:
    with pytest.raises(ConfigError, match="--workers needs --local"):
        load_settings("edp", "nn", environ={}, local_workers=2)


@pytest.mark.parametrize("is_local", [False, True])
def test_files_are_named_in_messages(tmp_path: Path, is_local: bool) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(CLUSTER | {"port": "x"}))
    with pytest.raises(ConfigError) as raised:
        load_settings(path, "nn", environ={}, local=is_local)
    assert str(raised.value) == f"{path}: port is 'x', must be a whole number from 1 to 65535"


@pytest.mark.parametrize(
    ("stated", "plan"),
    [
        ("even", "even"),
        ("{mini1: [0, 2], pi5: [2, 3]}", {"mini1": (0, 2), "pi5": (2, 3)}),
        ("{mini1: [[0, 1], [2, 3]]}", {"mini1": [(0, 1), (2, 3)]}),
    ],
)
def test_a_cut_may_be_written_in_an_override(stated: str, plan: object) -> None:
    settings = load_settings("pipeline", "digits", None, (f"shard_plan={stated}",), environ={})
    assert settings.of(PipelineConfig).shard_plan == plan


@pytest.mark.parametrize("stated", ["evenly", "{mini1: 3}", "{mini1: [0, x]}", "null"])
def test_what_is_no_cut_is_refused_with_what_is_one(stated: str) -> None:
    with pytest.raises(
        ConfigError, match=r"shard_plan is .*, must be auto, even, or ranges of layers"
    ):
        load_settings("pipeline", "digits", None, (f"shard_plan={stated}",), environ={})


def test_a_run_that_never_began_has_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run had not begun when it ended"):
        load_resolved(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "said",
    [
        "workload_args.hf_token=abcdefgh1",
        "workload_args.key=hf_abcdefghijklmnop",
        "workload_args={hub: {password: correct-horse}}",
        "workload_args.openai_api_key=sk0123!456789",
        "workload_args.tokens=[hf_abcdefghijklmnop]",
        "workload_args.url=https://ada:hf_abcdefghijklmnop@x",
        "workload_args.hfToken=abcdefgh1",
        "workload_args.HFToken=abcdefgh1",
        "workload_args={hub-token: abcdefgh1}",
        "workload_args.apiKey=abcdefgh1",
        "workload_args.wandb_key=abcdefgh1",
        "workload_args.auth=abcdefgh1",
        "workload_args.authorization='Bearer abcdefgh1'",
        "workload_args.token_2=abcdefgh1",
        "workload_args.password=10123456",
        "workload_args.database=postgres://ada:horse@x/y",
        "workload_args.key=glpat-abcdefghijklmnop",
        "workload_args.key=pypi-abcdefghijklmnop",
        "workload_args.key=sk-abcdefghijklmnop",
        "workload_args.key=ghp_abcdefghijklmnop",
        "workload_args.key=[[ghu_abcdefghijklmnop]]",
    ],
)
def test_a_secret_among_the_arguments_is_refused_without_being_told(said: str) -> None:
    with pytest.raises(ConfigError, match=r"looks like a secret, .*env:NAME") as refused:
        load_settings("edp", "digits", None, [said], environ={})
    assert not any(each in str(refused.value) for each in ("abcdefgh", "horse", "0123"))


@pytest.mark.parametrize(
    "said",
    [
        "workload_args.hf_token=env:HF_TOKEN",
        "workload_args.max_tokens=123456789",
        "workload_args.pad_token='<|endoftext|>'",
        "workload_args.tokenizer=abcdefgh1",
        "workload_args.mask_token=__mask__",
        "workload_args.credentials=/etc/creds.json",
        "workload_args.tokens=5",
        "workload_args.tokens=abcdefgh1",
        "workload_args.token=50256",
        "workload_args.author=AdaLovelace1",
        "workload_args.auth=anonymous",
        "workload_args.password=''",
        "workload_args.maxTokens=123456789",
        "workload_args.padToken=endoftext1",
        "workload_args.sort_key=abcdefgh1",
        "workload_args.monkey=abcdefgh1",
        "workload_args.use_auth=true",
        "workload_args.wandbKey=env:WANDB_API_KEY",
        "workload_args.prefix=[hf_model, sk-learn, pypi-mirror]",
        "workload_args.url=http://10.0.0.1:8000/a@b",
    ],
)
def test_what_is_no_secret_is_not_taken_for_one(said: str) -> None:
    assert load_settings("edp", "digits", None, [said], environ={}).train.workload_args
