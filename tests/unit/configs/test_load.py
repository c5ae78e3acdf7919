import os
from pathlib import Path

import pytest

from smolcluster.configs.load import dump_yaml, find_config, parse_yaml, read_yaml
from smolcluster.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def refusal(path: Path) -> str:
    """What `read_yaml` says about a file, without its name."""
    with pytest.raises(ConfigError) as raised:
        read_yaml(path)
    text = str(raised.value)
    assert text.isprintable()
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


def test_a_shipped_name_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_config("digits", "training").name == "nn_config_digits.yaml"


def test_a_path_is_found_also_in_the_home_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.touch()
    monkeypatch.setenv("HOME", str(file.parent))
    assert find_config("~/mine.yaml", "training") == file
    assert find_config(file, "cluster") == file


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere/x.yaml", "no such file; give a path or a shipped name: gpt, stdlib, nn, digits"),
        ("digts", r"nn, digits, workload \(did you mean digits\?\)"),
        ("nn_config_digit.yaml", r"\(did you mean digits\?\)"),
        ("", "no such file"),
        ("~nobody-of-that-name/x.yaml", "no such file"),
        ("a\nb", r"'a\\nb': no such file"),
        ("a\0b", r"no such file"),
    ],
)
def test_a_configuration_that_is_nowhere_is_refused_with_the_shipped_names(
    source: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        find_config(source, "training")
    assert str(raised.value).isprintable()


def test_yaml_1_2_decides_what_is_a_number(file: Path) -> None:
    file.write_text("a: 6e-4\nb: 1E3\nc: yes\nd: 010\ne: null\nf: [1, 2.5]\ng: 'x'\n")
    expected = {"a": 6e-4, "b": 1000.0, "c": "yes", "d": 10, "e": None, "f": [1, 2.5], "g": "x"}
    content = read_yaml(file)
    assert content == expected
    assert isinstance(content["a"], float)


def test_a_byte_order_mark_is_no_part_of_the_first_key(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfport: 1\n")
    assert read_yaml(file) == {"port": 1}


def test_odd_but_valid_yaml_is_read_in_silence(file: Path) -> None:
    file.write_text("a: &x 1\nb: &x 2\nc: *x\n")
    assert read_yaml(file) == {"a": 1, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("port: 1\nseed: 2\nport: 3\n", ', line 3: duplicate key "port"; keep one of them'),
        ("model:\n\ttype: x\n", ", line 2: has a tab in a place where YAML allows spaces only"),
        ("- 1\n- 2\n", ": holds a list, must hold a mapping of keys to values"),
        ("just text\n", ": holds a single value, must hold a mapping of keys to values"),
        ("# nothing\n", ": is empty, must hold a mapping of keys to values"),
        ("", ": is empty, must hold a mapping of keys to values"),
        ("1: x\n", ": the key 1 must be text; put it in quotes"),
        ("a:\n  - {null: x}\n", ": the key None must be text; put it in quotes"),
        ("a: 1\nb: *nothing\n", ", line 2: is not valid YAML"),
        ("a: [1, 2\n", ", line 2: is not valid YAML"),
        ("a: 1\n---\nb: 2\n", ", line 2: is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", ", line 1: is not valid YAML"),
        ("a: 1\nb: \x01\n", ", line 2: holds the control character 0x1"),
        ("a: " + 700 * "[", ": is nested too deeply, or an alias holds itself"),
        ("a: &a [*a]\n", ": is nested too deeply, or an alias holds itself"),
        ("a: 2026-13-45\n", ": holds an impossible date or number (month must be in 1..12)"),
        ("a: " + 5000 * "9", ": holds an impossible date or number (Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_its_line(
    file: Path, content: str, says: str
) -> None:
    file.write_text(content)
    assert refusal(file).startswith(says)


def test_text_in_another_encoding_is_refused(file: Path) -> None:
    file.write_bytes("a: 1\nserver: Zürich\n".encode("latin-1"))
    assert refusal(file) == ", line 2: is not UTF-8 text; save it as UTF-8"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == ": is a folder, must be a YAML file"


def test_a_file_that_may_not_be_read_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("port: 1\n")
    file.chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refusal(file) == ": may not be read by this user; change its permissions"


def test_a_path_that_cannot_be_a_file_is_refused(file: Path) -> None:
    file.touch()
    assert refusal(file / "below.yaml") == ": cannot be read (Not a directory)"


def test_what_is_dumped_is_read_back() -> None:
    content = {"a": {"b": 1e-05, "c": "007", "d": None, "e": ["yes", "6e-4", "~"]}, "f": True}
    assert parse_yaml(dump_yaml(content)) == content
