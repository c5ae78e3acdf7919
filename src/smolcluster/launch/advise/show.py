"""What `smolcluster advise` prints: for people, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from smolcluster.algorithms.planning.advice import Option
from smolcluster.configs.spec import title_of
from smolcluster.launch.advise.command import Found, as_overrides
from smolcluster.observability.terminal import SteadyConsole
from smolcluster.utils.units import format_rate
from smolcluster.utils.words import as_command


def show(found: Found, console: SteadyConsole) -> None:
    """Print machines, ways, what each algorithm would do, and the advice."""
    if found.ways:
        console.print(ways_table(found))
    console.print(options_table(found))
    for line in lines(found):
        console.print(Text(line), soft_wrap=True)


def ways_table(found: Found) -> Table:
    """A row a worker: the address to use, and what it carries."""
    table = Table("worker", "server at", "to it", "from it", "while all send", "round trip")
    for node, way in found.ways.items():
        crowd = "" if way.crowd_up_mb_s is None else f"{way.crowd_up_mb_s:.3g} MB/s"
        row = (
            *(node, f"{way.address} ({way.interface})"),
            *(format_rate(1e6 * way.up_mb_s), format_rate(1e6 * way.down_mb_s)),
            *(crowd, f"{1e3 * way.latency_s:.2g} ms"),
        )
        table.add_row(*map(Text, row))
    return table


def options_table(found: Found) -> Table:
    """A row an algorithm, and one for the fastest machine alone."""
    table = Table("", unit(found), "lost waiting", "server gets", "server sends", "settings")
    for option in found.advice.options:
        forecast = option.forecast
        row = (
            *(title_of(option.algorithm), rate(found, forecast.samples_per_s)),
            f"{forecast.lost:.0%}",
            *(format_rate(forecast.received_bytes_s), format_rate(forecast.sent_bytes_s)),
            settings_words(option),
        )
        table.add_row(*map(Text, row))
    machine, samples_per_s = found.advice.alone
    table.add_row(*map(Text, (f"{machine} alone", rate(found, samples_per_s), "", "", "", "")))
    return table


def lines(found: Found) -> Iterator[str]:
    """The advice in words: addresses that would be better, then what to do."""
    for node, way in found.ways.items():
        told = found.stated[node]
        if way.address != told:
            yield f"host_ip.{node}: {way.address} is better than {told} ({way.reason})"
    yield advice_line(found)
    if found.followed is None:
        return
    request = found.followed.request
    overrides = [word for text in request.overrides for word in ("--override", text)]
    config = ("--config", str(request.config))
    command = as_command("launch", request.algorithm.commands[0].name, *config, *overrides)
    yield f"{command}, or launch --auto, does it"


def advice_line(found: Found) -> str:
    """What to do, in one line."""
    advice, (machine, alone) = found.advice, found.advice.alone
    alone_told = f"{rate(found, alone)} {unit(found)}"
    if advice.chosen is None:
        best = advice.options[0]
        told = f"{rate(found, best.forecast.samples_per_s)} {unit(found)}"
        return (
            f"do not distribute this: {machine} alone trains {alone_told}, the cluster {told} "
            f"({title_of(best.algorithm)})"
        )
    chosen = advice.chosen
    told = f"{rate(found, chosen.forecast.samples_per_s)} {unit(found)}"
    with_settings = f" with {words}" if (words := settings_words(chosen)) else ""
    than_alone = f"{advice.gain:.1f} times {machine} alone ({alone_told})"
    return f"{title_of(chosen.algorithm)}{with_settings}: {told}, {than_alone}"


def settings_words(option: Option) -> str:
    words = [*as_overrides(option.settings), option.forecast.chosen]
    return ", ".join(filter(None, words))


def unit(found: Found) -> str:
    return "tokens/s" if found.tokens_per_sample else "samples/s"


def rate(found: Found, samples_per_s: float) -> str:
    each = samples_per_s * (found.tokens_per_sample or 1)
    return f"{each:,.0f}" if each >= 99.5 else f"{each:.3g}"


def as_document(found: Found) -> dict[str, Any]:
    """All of it for programs; rates are of samples a second, links in MB a second."""
    advice = found.advice
    machine, samples_per_s = advice.alone
    return {
        "distribute": advice.chosen is not None,
        "advice": None if advice.chosen is None else _option(advice.chosen),
        "options": [_option(each) for each in advice.options],
        "alone": {"machine": machine, "samples_per_s": samples_per_s},
        "tokens_per_sample": found.tokens_per_sample or None,
        "machines": {node: speed.model_dump() for node, speed in found.speeds.items()},
        "links": {node: asdict(way) for node, way in found.ways.items()},
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "algorithm": option.algorithm,
        "settings": dict(option.settings),
        **asdict(option.forecast),
    }
