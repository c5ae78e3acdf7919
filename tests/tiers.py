"""When parameters of a test run: at once, or at night."""

from typing import Any

import pytest


def at_night(*cases: Any) -> list[Any]:
    """Parameters that run at night; one of several arguments is a tuple."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.nightly)
        for each in cases
    ]
