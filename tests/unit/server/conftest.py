"""What holds for these tests."""

from peers import door, nothing_goes_on_afterwards

__all__ = ["door", "nothing_goes_on_afterwards"]
