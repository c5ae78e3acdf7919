import sys
from pathlib import Path

import pytest

from smolcluster.utils.folders import user_cache


@pytest.mark.parametrize(("platform", "cache"), [("linux", ".cache"), ("darwin", "Library/Caches")])
def test_the_cache_is_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, cache: str
) -> None:
    """At another place what is kept there, such as tokens, would be made again."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / cache / "smolcluster"
