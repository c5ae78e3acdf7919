"""What a launch means that says little: it trains what needs no download, on one machine or many."""

import pytest

from smolcluster.configs.resolve import Settings
from smolcluster.configs.spec import algorithms
from smolcluster.launch.requests import request_of, settings_of


def settings(name: str, *, local: bool, train_config: str | None = None) -> Settings:
    spec, command = next(
        (spec, command)
        for spec in algorithms().values()
        for command in spec.commands
        if command.name == name
    )
    request = request_of(
        spec,
        command,
        local=local,
        num_workers=None,
        config=None,
        train_config=train_config,
        overrides=(),
    )
    return settings_of(request, local)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("name", "dataset"), [("edp", "digits"), ("syncps", "digits"), ("edp-gpt", "stdlib")]
)
def test_what_a_launch_trains_needs_no_download(name: str, dataset: str, local: bool) -> None:
    assert settings(name, local=local).train.dataset.name == dataset


def test_what_is_named_is_trained() -> None:
    assert settings("edp", local=False, train_config="nn").train.dataset.name == "MNIST"
    assert settings("edp-gpt", local=False, train_config="gpt").train.dataset.name == "wikitext"


def test_on_a_cluster_all_train_on_the_library_of_the_servers_python() -> None:
    assert settings("edp-gpt", local=False).train.dataset.source == "server"
    assert settings("edp-gpt", local=True).train.dataset.source == "local"
    assert settings("edp-gpt", local=False, train_config="stdlib").train.dataset.source == "local"
