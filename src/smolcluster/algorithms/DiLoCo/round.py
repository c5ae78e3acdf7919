"""Where the present round stands: what was handed out of it, and which fragments are being exchanged."""

from collections.abc import Iterator


class Round:
    """A round of a run, which begins anew with `begin`; `num_fragments` are exchanged in it, one by one.

    A round has `local_steps` batches for each worker. Fragment i of F is asked for when all but
    (F - 1 - i) / F of them have been handed out.
    """

    def __init__(self, num_fragments: int) -> None:
        self._numbers = range(num_fragments)
        self.local_steps = 1
        """H: how many batches it has for each worker."""
        self.most_steps: int | None = None
        """So many it may come to while slow links hold it up; None: the user has said how long rounds are."""
        self.is_whole = False
        """Whether all fragments are exchanged together at its end."""
        self.num_handed = 0
        """Batches that were handed out, and not taken back."""
        self.plan: dict[int, int] = {}
        """How many more batches each worker should get, by its number."""
        self.asked: set[int] = set()
        """Fragments whose changes were asked for."""
        self.gathering: dict[int, float] = {}
        """Since when those are awaited that have not all come, also of the round before."""
        self.exchange_s: dict[int, float] = {}
        """By fragment: how long it took the last time from asking to the outer step."""

    def begin(
        self, local_steps: int, most_steps: int | None = None, *, is_whole: bool = False
    ) -> None:
        """`most_steps`: so many it may come to while slow links hold it up; None: it waits for them."""
        self.local_steps, self.most_steps, self.is_whole = local_steps, most_steps, is_whole
        self.num_handed = 0
        self.asked.clear()

    def num_left(self, num_workers: int) -> int:
        """Batches that are to be handed out."""
        return self.local_steps * num_workers - self.num_handed

    def num_later(self, number: int, num_workers: int) -> int:
        """How many batches are handed out after a fragment's exchange has begun."""
        num_after = 0 if self.is_whole else max(0, len(self._numbers) - 1 - number)
        return self.local_steps * num_workers * num_after // len(self._numbers)

    def budget(self, num_workers: int) -> int:
        """Batches that may be handed out before the next fragment is asked for.

        That is the one whose turn it is, where the user has said how long rounds are; else the first that
        may be asked for. While there is none, because their last exchanges are not over, the round becomes
        longer.
        """
        num_left = self.num_left(num_workers)
        planned = num_left - self.num_later(len(self.asked), num_workers)
        if self.most_steps is None or self.is_asked:
            return planned
        if (free := next(self.unasked, None)) is not None:
            return num_left - self.num_later(free, num_workers)
        longest = self.most_steps * num_workers - self.num_handed
        return max(planned, min(num_workers, longest))

    def is_due(self, number: int, num_workers: int) -> bool:
        """Whether all that belongs before a fragment's exchange has been handed out."""
        return self.num_handed > 0 and self.num_left(num_workers) <= self.num_later(
            number, num_workers
        )

    @property
    def unasked(self) -> Iterator[int]:
        """Fragments that may be asked for: none of their changes of the round before is awaited."""
        for number in self._numbers:
            if number not in self.asked and number not in self.gathering:
                yield number

    def ask(self, number: int, now: float) -> None:
        """A fragment's changes are asked for; `now` is of any one clock, in seconds."""
        self.asked.add(number)
        self.gathering[number] = now

    def gathered(self, number: int, now: float) -> None:
        """All of a fragment's changes have come."""
        self.exchange_s[number] = now - self.gathering.pop(number)

    @property
    def is_asked(self) -> bool:
        """Whether all fragments have been asked for."""
        return len(self.asked) == len(self._numbers)
