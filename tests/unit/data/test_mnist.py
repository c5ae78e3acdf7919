import sys
import urllib.error
import urllib.request
from http.client import IncompleteRead
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from smolcluster.data import mnist
from smolcluster.data.mnist import FILES, load_mnist
from smolcluster.errors import DataError

REAL = Path(__file__).parents[4] / "shared" / "data"
needs_files = pytest.mark.skipif(
    not (REAL / "MNIST" / "raw").is_dir(), reason=f"MNIST is not in {REAL / 'MNIST' / 'raw'}"
)


def idx(shape: tuple[int, ...], magic: int = 0x800) -> bytes:
    """A file of the MNIST format whose bytes are all 3."""
    header = (magic + len(shape)).to_bytes(4, "big")
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return header + sizes + bytes([3]) * torch.Size(shape).numel()


def write_small(raw: Path) -> None:
    for part, count in (("train", 5), ("t10k", 2)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx((count, 28, 28)))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx((count,)))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a tiny, whole MNIST in it."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    write_small(raw)
    return tmp_path


@needs_files
def test_real_files_are_read_with_their_own_validation_split() -> None:
    data = load_mnist(REAL, download=False)
    inputs, targets = data.train.batch(torch.arange(data.train.num_samples))

    assert (data.input_dim, data.num_classes) == (784, 10)
    assert data.validation.num_samples > 0
    assert inputs.mean().item() == pytest.approx(0.0, abs=0.02)
    assert inputs.std().item() == pytest.approx(1.0, abs=0.02)
    assert set(targets.tolist()) == set(range(10))


def test_a_batch_is_normalised_with_the_mean_and_deviation_of_mnist(small: Path) -> None:
    inputs, targets = load_mnist(small, download=False).train.batch(torch.tensor([0, 4]))

    assert inputs.shape == (2, 784)
    torch.testing.assert_close(inputs, torch.full((2, 784), (3 / 255 - 0.1307) / 0.3081))
    assert targets.tolist() == [3, 3]


def test_files_that_are_there_are_not_fetched(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    assert load_mnist(small, download=True).train.num_samples == 5


def test_missing_files_name_the_folder_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load_mnist(tmp_path, download=False)
    assert str(tmp_path / "MNIST" / "raw") in str(error.value)
    assert "dataset.download=true" in str(error.value)


def fake_download(self: Any) -> None:
    raw = Path(self.raw_folder)
    raw.mkdir(parents=True)
    write_small(raw)


def test_fetched_files_are_whole_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.MNIST.download", fake_download)
    data = load_mnist(tmp_path / "new", download=True)

    assert data.train.num_samples == 5
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["MNIST"]
    assert sorted(path.name for path in (tmp_path / "new/MNIST/raw").iterdir()) == sorted(FILES)


def test_a_folder_with_some_of_the_files_is_completed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.datasets.MNIST.download", fake_download)
    (small / "MNIST" / "raw" / FILES[2]).unlink()
    assert load_mnist(small, download=True).validation.num_samples == 2


@pytest.mark.parametrize(
    "error",
    [TimeoutError("timed out"), IncompleteRead(b""), EOFError("short"), OSError(28, "full")],
)
def test_a_download_that_breaks_off_leaves_nothing_behind(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(self: Any) -> NoReturn:
        Path(self.raw_folder).mkdir(parents=True)
        (Path(self.raw_folder) / FILES[0]).write_bytes(b"half")
        raise error

    monkeypatch.setattr("torchvision.datasets.MNIST.download", break_off)
    with pytest.raises(
        DataError, match=r"could not be fetched into .* set dataset\.download=false"
    ):
        load_mnist(tmp_path, download=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def no_network(*args: object, **kwargs: object) -> NoReturn:
    raise urllib.error.URLError("Temporary failure in name resolution")


def test_a_failed_download_is_one_line_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    mirrors = [f"https://mirror{number}.example.org/{'mnist/' * 8}" for number in range(6)]
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", mirrors)
    with pytest.raises(DataError, match=r"could not be fetched.*name resolution>\)") as error:
        load_mnist(tmp_path, download=True)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", b"\x00\x00"),
        ("train-images-idx3-ubyte", idx((5, 28, 28))[:-100]),
        ("train-images-idx3-ubyte", idx((5, 28, 28), magic=0x4D00)),
        ("train-images-idx3-ubyte", idx((4, 28, 28))),
        ("train-images-idx3-ubyte", idx((5, 27, 28))),
        ("train-images-idx3-ubyte", idx((5,))),
        ("train-images-idx3-ubyte", idx((0, 28, 28))),
        ("t10k-labels-idx1-ubyte", idx((2,))[:-1] + b"\x63"),
        ("t10k-labels-idx1-ubyte", idx((0,))),
    ],
)
def test_damaged_files_are_refused_in_one_line(small: Path, name: str, content: bytes) -> None:
    (small / "MNIST" / "raw" / name).write_bytes(content)
    with pytest.raises(DataError, match="MNIST") as error:
        load_mnist(small, download=False)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "MNIST").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"cannot be stored in .* set dataset.root"):
        load_mnist(tmp_path, download=True)


def test_the_default_folder_is_the_package_if_it_has_the_data(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "__file__", str(small / "mnist.py"))
    assert mnist.default_root() == small


def test_the_default_folder_is_a_cache_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "__file__", str(tmp_path / "lib" / "smolcluster" / "data" / "m.py"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert mnist.default_root() == tmp_path / "cache" / "smolcluster"


def test_the_folder_may_be_given_from_home(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(small))
    (small / "sets").mkdir()
    (small / "MNIST").rename(small / "sets" / "MNIST")
    assert load_mnist(Path("~/sets"), download=False).train.num_samples == 5
