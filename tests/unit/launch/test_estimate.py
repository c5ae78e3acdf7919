"""What a run will cost, compared with the models and codecs themselves."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from smolcluster.algorithms.planning.costs import VALUE_NBYTES
from smolcluster.codec.registry import get_codec
from smolcluster.configs.load import shipped_names
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import CodecName, GPTConfig, Settings, SimpleNNConfig
from smolcluster.launch.estimate import FEATURES, VOCABULARIES, cost_of, params_of, tensors_of
from smolcluster.models.registry import build_model


def settings_of(train: str, *overrides: str, algorithm: str = "edp") -> Settings:
    return load_settings(algorithm, train, overrides=overrides, environ={})


def num_params(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", shipped_names("training"))
def test_the_shipped_models_have_as_many_weights_as_is_said(name: str) -> None:
    settings = settings_of(name)
    config = settings.train.model
    if isinstance(config, GPTConfig):
        sizes = (config.max_seq_len, VOCABULARIES[settings.train.dataset.tokenizer])
    else:
        sizes = (config.input_dim or FEATURES[settings.train.dataset.name], config.out)
    with torch.device("meta"):
        model = build_model(config, *sizes)
    assert params_of(settings) == num_params(model)
    assert tensors_of(settings) == len(list(model.parameters()))


def test_a_gpt_of_one_layer_has_as_many_weights_as_it_ever_had() -> None:
    assert params_of(settings_of("gpt", "model.num_layers=1")) == 13_688_832


def test_where_only_the_data_tell_nothing_is_said(tmp_path: Path) -> None:
    unknown = settings_of("gpt", "data.tokenizer=somebody/else")
    assert params_of(unknown) is None
    assert cost_of(unknown, "edp") is None
    train = settings_of("digits").train
    other = train.dataset.model_copy(update={"name": "other"})
    assert isinstance(train.model, SimpleNNConfig)
    assert (
        params_of(
            Settings(unknown.cluster, train.model_copy(update={"dataset": other}), unknown.node)
        )
        is None
    )


# Bytes


@pytest.mark.parametrize("name", get_args(CodecName))
def test_a_gradient_takes_the_bytes_that_its_codec_makes(name: str) -> None:
    numel = 101_770
    codec = get_codec(name)
    made = codec.encoded_nbytes(numel)
    assert made == pytest.approx(numel * VALUE_NBYTES[name], rel=1e-3)
    cost = cost_of(settings_of("nn", f"codec={name}"), "edp")
    assert cost
    assert cost.sent_nbytes == pytest.approx(made, rel=1e-3)


def test_edp_pulls_now_and_then_and_syncps_gets_every_mean() -> None:
    interval = 5
    asked = ("codec=fp16", f"worker_update_interval={interval}")
    elastic = cost_of(settings_of("nn", *asked), "edp")
    exact = cost_of(settings_of("nn", *asked, algorithm="syncps"), "syncps")
    assert elastic and exact
    assert elastic.received_nbytes == 4 * 101_770 // interval, "weights travel whole"
    assert exact.received_nbytes == exact.sent_nbytes == 2 * 101_770


@pytest.mark.parametrize(("optimizer", "moments"), [("sgd", 0), ("adam", 2), ("adamw", 2)])
def test_memory_is_counted_in_copies_of_the_weights(optimizer: str, moments: int) -> None:
    cost = cost_of(settings_of("nn", f"optimizer={optimizer}"), "edp")
    assert cost
    copy = 4 * cost.num_params
    assert cost.worker_nbytes == (4 + moments) * copy
    assert cost.server_nbytes == (2 + moments + 3 + 1) * copy


def test_seconds_are_those_of_the_busier_direction() -> None:
    cost = cost_of(settings_of("nn", "worker_update_interval=1", "codec=int8"), "edp")
    assert cost
    assert cost.transfer_s(12.5) == pytest.approx(4 * 101_770 / 12.5e6)
