"""What files of a run say, read back: lines of logs, whoever has written between them."""

from dataclasses import dataclass

from smolcluster.runs.files import json_objects, seconds_of


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        seconds: when it was written, since 1970, on the clock of who wrote it.
        node: the machine, where the line says it.
        source: the title of the process whose log it is, where lines of several are together.
    """

    seconds: float
    level: str
    message: str
    exception: str = ""
    node: str = ""
    source: str = ""


def parse_log_line(line: bytes, otherwise: float) -> LogLine | None:
    """What a line says; one that is no JSON object as it is. None: it is empty.

    `otherwise` is the time of a line that has none.
    """
    fields = next(json_objects([line]), None)
    if fields is None:
        text = line.decode("utf-8", "replace").strip()
        return LogLine(otherwise, "", text) if text else None
    return LogLine(
        seconds_of(fields.get("ts"), otherwise),
        str(fields.get("level", ""))[:8],
        str(fields.get("message", "")),
        str(fields.get("exception", "")),
        str(fields.get("node") or ""),
    )
