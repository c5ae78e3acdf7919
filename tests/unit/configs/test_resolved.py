"""The configuration that a run keeps: read back, it is what it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smolcluster.configs.load import Kind, dump_yaml, parse_yaml, read_config, shipped_names
from smolcluster.configs.resolve import load_resolved, load_settings, save_resolved
from smolcluster.configs.schema import LONGEST_WAIT_S, Settings
from smolcluster.errors import ConfigError

SECTIONS = ["cluster", "train", "node"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def kept(settings: Settings, file: Path) -> Path:
    save_resolved(settings, file)
    return file


def shipped(
    *overrides: str, cluster: str = "edp", train: str = "digits", **kwargs: Any
) -> Settings:
    return load_settings(cluster, train, kwargs.pop("node_name", None), overrides, {}, **kwargs)


@pytest.mark.parametrize(
    ("cluster", "train"),
    [
        *((name, "digits") for name in shipped_names("cluster")),
        *(("edp", name) for name in shipped_names("training")),
    ],
)
def test_every_shipped_configuration_is_read_back_as_it_was(
    file: Path, cluster: str, train: str
) -> None:
    """Each is a section of its own in what is kept, whatever the other one is."""
    for settings in (
        shipped(cluster=cluster, train=train),
        shipped(cluster=cluster, train=train, local=True, local_workers=7),
    ):
        assert load_resolved(kept(settings, file)) == settings


FINITE = st.floats(1e-9, 1e9)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(1, 65535),
        "seed": st.integers(0, 2**31 - 1),
        "timeout": st.one_of(st.none(), st.floats(1e-9, LONGEST_WAIT_S)),
        "checkpoint_steps": st.one_of(st.none(), st.integers(1, 10**6)),
        "keep_last": st.integers(1, 100),
        "bind": st.one_of(st.none(), st.just(["127.0.0.1", "::1"])),
        "staleness.exponent": st.floats(0, 10),
        "staleness.bound": st.one_of(st.none(), st.integers(1, 100)),
        "use_quantization": st.booleans(),
        "learning_rate": FINITE,
        "num_epochs": st.integers(1, 1000),
        "gradient_clipping.max_norm": FINITE,
        "model.input_dim": st.one_of(st.none(), st.integers(1, 2000)),
        "device": st.sampled_from([None, "cpu", "cuda:1"]),
        "threads": st.one_of(st.none(), st.integers(1, 64)),
        "microbatch": st.one_of(st.none(), st.integers(1, 64)),
        "dataset.root": st.sampled_from([None, "/data", "~/data", "relative/data"]),
        "dataset.download": st.booleans(),
        "runs_dir": st.sampled_from([None, "/runs", "~/runs", "a folder/with spaces"]),
        "nodes.pi5.threads": st.integers(1, 8),
        "nodes.mini1.microbatch": st.integers(1, 8),
    },
)


@hypothesis_settings(max_examples=10)
@given(overrides=OVERRIDES, node_name=st.sampled_from([None, "mini1", "macbook"]))
def test_whatever_was_overridden_is_read_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, overrides: dict[str, object], node_name: str | None
) -> None:
    texts = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    settings = shipped(*texts, node_name=node_name)
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    assert load_resolved(kept(settings, file)) == settings


def test_the_node_is_the_one_that_kept_it(file: Path) -> None:
    """Its own values, though the cluster's file says others of the server's machine."""
    settings = shipped("nodes.mini1.threads=3", "threads=5", "nodes.mini1.device=cuda")
    assert (settings.node.threads, settings.node.device) == (5, "cuda")
    again = load_resolved(kept(settings, file))
    assert (again.node.threads, again.node.device) == (5, "cuda")
    assert again.cluster.nodes == settings.cluster.nodes


def test_the_environment_of_now_changes_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = shipped("port=7001")
    kept(settings, file)
    for name, value in (("PORT", "9999"), ("NUM_EPOCHS", "77"), ("THREADS", "13")):
        monkeypatch.setenv(f"SMOLCLUSTER_{name}", value)
    assert load_resolved(file) == settings


SECRET = "hf_abcdefgh"
SECRETS = [f"nodes.pi5.env.HF_TOKEN={SECRET}", f"nodes.mini1.env.KEY={SECRET}", f"env.OWN={SECRET}"]


def test_values_of_a_machines_environment_are_kept_nowhere(file: Path) -> None:
    settings = shipped("port=7001", "nodes.pi5.threads=3", *SECRETS)
    assert settings.cluster.nodes["pi5"].env == {"HF_TOKEN": SECRET}
    assert SECRET not in kept(settings, file).read_text()
    again = load_resolved(file)
    assert (again.cluster.port, again.cluster.nodes["pi5"].threads) == (7001, 3)
    assert again.cluster.nodes["pi5"].env == again.node.env == {}
    assert again.train == settings.train


def test_shown_are_only_the_names_of_a_machines_environment() -> None:
    shown = parse_yaml(shipped(*SECRETS).to_yaml(env_names=True))
    assert SECRET not in str(shown)
    assert shown["cluster"]["nodes"]["pi5"]["env"] == {"HF_TOKEN": "***"}
    assert shown["node"]["env"] == {"KEY": "***", "OWN": "***"}


# As a configuration file


def test_a_runs_configuration_stands_for_both_files(file: Path) -> None:
    settings = shipped("port=7001", "learning_rate=0.25")
    kept(settings, file)
    for cluster, train in ((file, file), (str(file), "digits"), ("edp", file)):
        again = load_settings(cluster, train, None, ["seed=5"], {})
        assert again.cluster.seed == 5
        assert again.cluster.port == (65432 if cluster == "edp" else 7001)
        assert (again.train.learning_rate == 0.25) == (train == file)
    assert load_settings(file, file, None, [], {}).train == settings.train


def test_with_local_a_runs_configuration_is_made_local(file: Path) -> None:
    kept(shipped("port=7001"), file)
    again = load_settings(file, file, None, [], {}, local=True, local_workers=2)
    assert (again.cluster.num_workers, again.cluster.port) == (2, 7001)
    assert set(again.cluster.host_ip.values()) == {"127.0.0.1"}


@pytest.mark.parametrize("kind", ["cluster", "training"])
@pytest.mark.parametrize(
    "content",
    [
        {"port": 7001},
        {"cluster": {"port": 1}, "train": {"port": 2}},
        {"cluster": {"port": 1}, "train": {"port": 2}, "node": {}, "more": {}},
        {"cluster": {"port": 1}, "node": {}},
        {"train": 5, "cluster": 5, "node": {}},
    ],
    ids=repr,
)
def test_a_file_with_other_keys_is_read_whole(
    file: Path, kind: Kind, content: dict[str, Any]
) -> None:
    """So that a mistake in it is told with its key."""
    file.write_text(dump_yaml(content))
    assert read_config(file, kind) == content


def damaged(file: Path, section: str, **changes: Any) -> None:
    """Change a kept configuration; a value of ... takes the key away."""
    content = parse_yaml(kept(shipped(), file).read_text())
    changed = content[section] | changes
    changed = {key: value for key, value in changed.items() if value is not ...}
    file.write_text(dump_yaml(content | {section: changed}))


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("cluster", {"port": "a door"}),
        ("cluster", {"prot": 7001}),
        ("cluster", {"num_workers": 9}),
        ("cluster", {"host_ip": ...}),
        ("train", {"learning_rate": -1.0}),
        ("train", {"model": 5}),
        ("train", {"epochs": 3}),
        ("node", {"threads": 0}),
        ("node", {"treads": 1}),
        ("node", {"dataset": 5}),
    ],
    ids=repr,
)
def test_a_kept_configuration_with_a_mistake_names_file_and_key(
    file: Path, section: str, changes: dict[str, Any]
) -> None:
    damaged(file, section, **changes)
    with pytest.raises(ConfigError) as caught:
        load_resolved(file)
    text = str(caught.value)
    assert text.isprintable()
    assert str(file) in text
    assert next(iter(changes)) in text


@pytest.mark.parametrize("section", SECTIONS)
def test_a_kept_configuration_that_lacks_a_part_is_refused(file: Path, section: str) -> None:
    content = parse_yaml(kept(shipped(), file).read_text())
    assert content.keys() == set(SECTIONS)
    for without in ({k: v for k, v in content.items() if k != section}, content | {section: 5}):
        file.write_text(dump_yaml(without))
        with pytest.raises(ConfigError, match=str(file)):
            load_resolved(file)
