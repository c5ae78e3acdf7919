"""What holds for these tests."""

from peers import nothing_goes_on_afterwards

__all__ = ["nothing_goes_on_afterwards"]
