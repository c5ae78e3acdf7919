"""Where a peer listens."""

from dataclasses import dataclass

from smolcluster.utils.units import format_address


@dataclass(frozen=True)
class Address:
    """Where a peer listens, as this machine reaches it, and the peer's name; None: it is not known."""

    host: str
    port: int
    node: str | None = None

    def __str__(self) -> str:
        return format_address(self.host, self.port)
