"""What `smolcluster config` prints and refuses."""

import json
from pathlib import Path

import pytest

from smolcluster.configs.load import parse_yaml
from smolcluster.configs.resolve import load_resolved, load_settings
from smolcluster.errors import ConfigError
from smolcluster.launch.setup.config_commands import check, schema, show

Out = pytest.CaptureFixture[str]


@pytest.mark.parametrize("kind", ["cluster", "training"])
def test_schemas_are_printed_as_json(kind: str, capsys: Out) -> None:
    assert schema(kind) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].endswith("2020-12/schema")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^'nn' is no kind .* \(known: cluster, training\)$"):
        schema("nn")


def test_what_is_shown_is_what_a_run_saves(tmp_path: Path, capsys: Out) -> None:
    overrides = ["port=6000", "nodes.pi5.threads=3", "num_epochs=7"]
    assert show("syncps", "gpt", "pi5", overrides, local=False, environ={}) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("#")] == [
        "# The machines and how they work together",
        "# What belongs to the machine pi5",
        "# What is trained",
    ]
    settings = load_settings("syncps", "gpt", "pi5", overrides, {})
    assert parse_yaml(shown) == parse_yaml(settings.to_yaml(env_names=True))
    saved = tmp_path / "config.yaml"
    saved.write_text(shown)
    assert load_resolved(saved) == settings
    assert settings.node.threads == 3


def test_of_a_machines_environment_only_the_names_are_shown(capsys: Out) -> None:
    overrides = ["nodes.pi5.env.HF_TOKEN=hf_abcdefgh"]
    assert show("syncps", "gpt", "pi5", overrides, local=False, environ={}) == 0
    out = capsys.readouterr().out
    assert "hf_abcdefgh" not in out
    assert parse_yaml(out)["node"]["env"] == {"HF_TOKEN": "***"}


def test_with_local_it_is_what_the_launcher_would_start(capsys: Out) -> None:
    assert show(None, None, None, [], local=True, environ={}) == 0
    shown = parse_yaml(capsys.readouterr().out)
    assert set(shown["cluster"]["host_ip"].values()) == {"127.0.0.1"}
    assert shown["train"]["dataset"]["name"] == "digits"
    assert shown["node"]["threads"] == 1
    assert show(None, None, None, ["threads=2"], local=True, environ={}) == 0
    assert parse_yaml(capsys.readouterr().out)["node"]["threads"] == 2


def test_good_files_are_summed_up(capsys: Out) -> None:
    assert check("edp", "nn", [], environ={}) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line == (
        "ok: server mini1, 3 workers (pi5, win, macbook), port 65432; SimpleNN on MNIST, 2 epochs of "
        "batches of 32; for edp, diloco, mesh, pipeline, syncps"
    )


def test_it_says_which_algorithm_can(capsys: Out) -> None:
    assert check("edp", "nn", ["update_rule=mixing"], environ={}) == 0
    assert capsys.readouterr().out.endswith("; for edp\n")
    assert check("edp", "nn", ["global_batch_size=96"], environ={}) == 0
    assert capsys.readouterr().out.endswith("; for syncps\n")


def test_files_that_no_algorithm_can_follow_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^edp: .*; syncps: update_rule is 'mixing', which is EDP"
    ):
        check("edp", "nn", ["update_rule=mixing", "codec=int8"], environ={})


def test_settings_of_every_node_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "host_ip: {a: 10.0.0.1, b: 10.0.0.1}\nnum_workers: 1\nworkers: [b]\nserver: a\n"
        "nodes:\n  b: {threads: 0}\n"
    )
    with pytest.raises(ConfigError, match=r"cluster\.yaml: nodes\.b\.threads is 0, must be"):
        check(str(file), "nn", [], environ={})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("dataset.name=mnist", r"dataset\.name is 'mnist', allowed: .*; did you mean MNIST\?"),
        (
            "dataset.name=text",
            r"dataset\.name is text, which is text, but model\.type is SimpleNN; .*",
        ),
        ("nodes.pi5.device=gpu", r".*device is 'gpu', must be cuda, cuda:N, mps or cpu, or null"),
        ("optimizer_args.beta=0.9", r"optimizer_args has beta, .* did you mean betas\?"),
        ("optimizer_args.lr=0.1", r"optimizer_args has lr, .*; set learning_rate itself"),
        (
            "optimizer=RAdam optimizer_args.lr=1",
            r"optimizer_args has lr, .*; set learning_rate itself",
        ),
        (
            "optimizer=RAdam optimizer_args.bets=1",
            r"optimizer_args has bets, which RAdam .* betas\?",
        ),
        ("optimizer=muon optimizer_args.ns_step=1", r"optimizer_args has ns_step, .* ns_steps\?"),
        ("optimizer_args.betas=0.9", r"optimizer_args\.betas is 0\.9, must be two numbers .*"),
        ("optimizer_args.betas=[0.9]", r"optimizer_args\.betas is \[0\.9\], must be two .*"),
        ("optimizer_args.betas=[0.9,1.0]", r"optimizer_args\.betas is .*, below 1"),
        ("optimizer_args.eps=null", r"optimizer_args\.eps is null, must be a number .*"),
        (
            "optimizer=sgd optimizer_args.momentum='0.9'",
            r"optimizer_args\.momentum is '0\.9', must be a number of 0 or more",
        ),
        ("optimizer=sgd optimizer_args.dampening=yes", r"optimizer_args\.dampening is .*number"),
        ("optimizer=sgd optimizer_args.nesterov=1", r"optimizer_args\.nesterov is 1, .* false"),
        ("optimizer=muon optimizer_args.ns_steps=2.5", r"optimizer_args\.ns_steps is 2\.5, .*"),
        (
            "optimizer=sgd optimizer_args.nesterov=true",
            r"optimizer_args\.nesterov is true, which .*",
        ),
    ],
)
def test_names_that_are_known_only_where_things_are_made_are_checked(
    override: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{says}$"):
        check("edp", "nn", override.split(), environ={})


@pytest.mark.parametrize(
    "override",
    [
        "optimizer=muon optimizer_args.muon=[layers.*] optimizer_args.ns_steps=3",
        "optimizer=RAdam optimizer_args.betas=[0.9,0.95]",
        "optimizer=auto",
        "workload=train.py:workload dataset.name=mine",
        "nodes.pi5.device=cuda:1",
    ],
)
def test_names_that_may_be_known_later_are_not_refused(override: str) -> None:
    assert check("edp", "nn", override.split(), environ={}) == 0
