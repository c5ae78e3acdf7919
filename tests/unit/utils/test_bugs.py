"""What is said of an error that nobody foresaw."""

import re
from pathlib import Path

from smolcluster.utils.bugs import describe_bug


def test_a_message_has_an_end_and_the_file_has_all_of_it() -> None:
    told = describe_bug(ValueError("x" * 100_000))
    assert len(told) < 1000
    file = Path(re.split("see ", told)[1])
    assert "x" * 100_000 in file.read_text()
    file.unlink()
