"""What is said where PyTorch's compiler cannot work, and where a layer does not."""

from inspect import currentframe
from pathlib import Path

import pytest
import torch
from torch import nn

from smolcluster.algorithms.Mesh.compiling import compile_layers, compiler_named
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.training.stages.cut import Stage
from smolcluster.training.user_code import user_code


def test_without_a_compiler_the_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/no/compiler",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU())
    stage = Stage(model, [model], 0, 1)
    compile_layers(stage)
    with pytest.raises(ConfigError, match="compile is true, but") as raised, compiler_named():
        stage(torch.ones(2, 3))
    assert "set compile to false" in str(raised.value) and "\n" not in str(raised.value)


def test_a_mistake_in_a_layer_is_not_blamed_on_the_compiler() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 4))
    stage = Stage(model, [model], 0, 1)
    compile_layers(stage)
    with (
        pytest.raises(UserCodeError, match="TorchRuntimeError"),
        user_code("model"),
        compiler_named(),
    ):
        stage(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("is_cached", "says", "is_removed"),
    [
        (True, "file too short", True),
        (True, "invalid ELF header", True),
        (True, "undefined symbol: omp_get_thread_num", False),
        (False, "file too short", False),
    ],
)
def test_half_a_library_in_the_cache_is_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cached: bool,
    says: str,
    is_removed: bool,
) -> None:
    from torch._inductor.exc import InductorError

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    library = tmp_path / ("cache" if is_cached else "elsewhere") / "i5" / "layer.main.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(ConfigError) as raised, compiler_named():
        raise InductorError(ImportError(f"{library}: {says}"), currentframe())
    assert library.exists() != is_removed
    assert ("start again" in str(raised.value)) == is_removed
