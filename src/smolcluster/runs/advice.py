"""What was predicted of a run before it was launched: `advice.json` in its folder."""

from typing import Any

from pydantic import Field

from smolcluster.runs.model_file import ModelFile, Strict


class LinkSpeed(Strict):
    """What a node's link to the server was measured to carry while nobody else sent, bytes a second."""

    up_bytes_s: float
    down_bytes_s: float


class Prediction(Strict):
    """What `launch --auto` was told.

    Attributes:
        settings: keys of the cluster file that were advised, with their values.
        samples_per_s: by all workers, once they train.
        lost: share of what the machines could compute that waiting costs, in 0..1.
        received_bytes_s, sent_bytes_s: by the server.
        alone: the fastest machine, and its samples a second when it trains alone.
        links: by node; none of those on the server's machine.
    """

    algorithm: str
    settings: dict[str, Any]
    samples_per_s: float
    lost: float
    received_bytes_s: float
    sent_bytes_s: float
    alone: str
    alone_samples_per_s: float
    links: dict[str, LinkSpeed] = Field({})


ADVICE = ModelFile[Prediction](Prediction, "is damaged", "was it launched without --auto?")
