from collections.abc import Iterator

import pytest
import torch
from peers import wait_for_threads


@pytest.fixture(autouse=True)
def nothing_goes_on_afterwards() -> Iterator[None]:
    """Every thread that a test starts ends with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    wait_for_threads()
    torch.set_num_threads(before)
