"""Writes Grafana's dashboards, logging/grafana/dashboards/*.json: `uv run scripts/make_dashboards.py`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "logging" / "grafana" / "dashboards"
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
LOKI = {"type": "loki", "uid": "loki"}
COLUMNS = 24
"""Of Grafana's grid."""
WORKER = "{{rank}} {{node}}"
PROCESS = "{{role}} {{rank}} {{node}}"
NODE = 'node=~"$node"'
OF_THE_OWNER = 'role!="worker"'
ON_THE_LINK = 'role="worker", phase=~"send|wait"'
STREAMS = '{job=~"smolcluster-.+", run=~"$run", host=~"$host", rank=~"$rank", level=~"$level"}'
# A line that is no JSON has no message, and would make an error of the whole count.
FOUND = f'{STREAMS} |~ "(?i)$search" | json message="message" | drop __error__, __error_details__'
MESSAGE = '| line_format "{{ if .message }}{{ .message }}{{ else }}{{ __line__ }}{{ end }}"'

Json = dict[str, Any]

OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {
            "showLegend": True,
            "displayMode": "table",
            "placement": "bottom",
            "calcs": ["lastNotNull"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"},
    "state-timeline": {"showValue": "never", "mergeValues": True},
    "logs": {
        "showTime": True,
        "wrapLogMessage": True,
        "enableLogDetails": True,
        "showLabels": False,
    },
}
"""Of each kind of panel."""


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard.

    Attributes:
        title: what it shows.
        queries: PromQL or LogQL expressions, by what names the series that they return.
        unit: one of Grafana's, such as s, percentunit, Bps.
        kind: timeseries, stat, state-timeline or logs.
        width: in columns of the grid.
        height: in rows of the grid.
        description: what a reader may ask.
        stacked: whether the areas of its series lie on each other.
        repeat: a variable, for each of whose values there is such a panel.
        right: a regular expression of the names whose scale is on the right.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    description: str = ""
    stacked: bool = False
    repeat: str = ""
    right: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A page of panels about the chosen runs, from one data source; variables are choices at its top."""

    name: str
    source: Json
    panels: Sequence[Panel]
    variables: Sequence[Json]


def of(metric: str, labels: str = "") -> str:
    matchers = ", ".join(filter(None, ['run=~"$run"', labels]))
    return f"smolcluster_{metric}{{{matchers}}}"


def rate(metric: str, labels: str = "") -> str:
    """How fast a counter of the chosen runs grows, per second."""
    return f"rate({of(metric, labels)}[$__rate_interval])"


def quantile(share: float) -> str:
    """The staleness that this share of the pushes does not exceed."""
    return f"histogram_quantile({share}, sum by (le) ({rate('staleness_steps_bucket')}))"


def stat(title: str, expression: str, unit: str = "short", description: str = "") -> Panel:
    return Panel(title, {"": expression}, unit, "stat", 4, 4, description)


def chosen(name: str, query: Json, source: Json) -> Json:
    """A variable with the values that a data source knows, of which several can be chosen."""
    return {
        "name": name,
        "type": "query",
        "datasource": source,
        "query": query,
        "refresh": 2,
        "sort": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def typed(name: str) -> Json:
    return {"name": name, "type": "textbox", "query": "", "current": {"text": "", "value": ""}}


def label_values(label: str) -> Json:
    """What Loki is asked for all values of a label."""
    return {
        "label": label,
        "refId": "LokiVariableQueryEditor-VariableQuery",
        "stream": "",
        "type": 1,
    }


def values_of(metric: str, label: str) -> Json:
    """What Prometheus is asked for all values of a metric's label."""
    query = f"label_values({metric}, {label})"
    return {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"}


RUN_CHOICE = chosen("run", values_of("smolcluster_run_info", "run"), PROMETHEUS)
NODE_CHOICE = chosen("node", values_of(of("process_steps_total"), "node"), PROMETHEUS)

RUN = Dashboard(
    "Run",
    PROMETHEUS,
    [
        stat("Progress", f"{of('samples_applied')} / {of('samples_target')}", "percentunit"),
        stat("Step", of("step")),
        stat("Samples/s", of("samples_per_second")),
        stat("Workers", f"sum({of('worker_up')})"),
        stat(
            "Since the last step",
            f"time() - {of('last_step_timestamp_seconds')}",
            "s",
            "An evaluation or a checkpoint takes its time; minutes mean that nothing moves.",
        ),
        stat("Alerts", 'count(ALERTS{alertstate="firing", run=~"$run"}) or vector(0)'),
        Panel("Loss", {"training": of("loss"), "validation": of("validation_loss")}),
        Panel(
            "Accuracy or perplexity",
            {"accuracy": of("validation_accuracy"), "perplexity": of("validation_perplexity")},
            right="perplexity",
        ),
        Panel(
            "Throughput",
            {
                "samples/s": of("samples_per_second"),
                "steps/s": rate("process_steps_total", OF_THE_OWNER),
            },
            right="steps/s",
        ),
        Panel(
            "Version",
            {"step": of("step"), "epoch": of("epoch")},
            description="The server's version of the weights is its step.",
            right="epoch",
        ),
        Panel(
            "Staleness",
            {
                "half of the pushes": quantile(0.5),
                "95% of the pushes": quantile(0.95),
                "bound": of("staleness_bound_steps"),
            },
            description="How many steps the weights of a gradient were behind when it was applied.",
        ),
        Panel(
            "Mean staleness by worker",
            {WORKER: f"{rate('staleness_steps_sum')} / {rate('staleness_steps_count')}"},
        ),
        Panel(
            "Pushes",
            {"{{reason}}": f"sum by (reason) ({rate('pushes_total')})"},
            "cps",
            stacked=True,
        ),
        Panel(
            "Learning rate and gradient norm",
            {"learning rate": of("learning_rate"), "gradient norm": of("gradient_norm")},
            right="gradient norm",
        ),
    ],
    [RUN_CHOICE],
)

WORKERS = Dashboard(
    "Workers",
    PROMETHEUS,
    [
        Panel(
            "Taking part",
            {WORKER: of("worker_up")},
            kind="state-timeline",
            description="1 while the server has the worker; 0 after it left or was lost.",
        ),
        Panel("Samples/s", {WORKER: of("worker_samples_per_second")}, stacked=True),
        Panel(
            "Share of the samples",
            {
                WORKER: (
                    f"{rate('worker_samples_total')} / on () group_left () "
                    f"sum({rate('worker_samples_total')})"
                )
            },
            "percentunit",
            stacked=True,
        ),
        Panel("Silent for", {WORKER: of("worker_silent_seconds")}, "s"),
        Panel(
            "A second of $node",
            {"{{phase}}": f"sum by (phase) ({rate('phase_seconds_total', NODE)})"},
            "s",
            stacked=True,
            repeat="node",
            description="Where the time goes; what is missing to 1 is none of these phases.",
        ),
        Panel(
            "Seconds a step",
            {
                PROCESS: (
                    f"sum by (role, rank, node) ({rate('phase_seconds_total', NODE)}) / "
                    f"sum by (role, rank, node) ({rate('process_steps_total', NODE)})"
                )
            },
            "s",
        ),
        Panel("Processor", {PROCESS: rate("process_cpu_seconds_total", NODE)}, "cores"),
        Panel("Memory", {PROCESS: of("process_resident_memory_bytes", NODE)}, "bytes"),
        *(
            Panel(title, {PROCESS: of(metric, NODE)}, unit, width=6)
            for title, metric, unit in (
                ("GPU", "gpu_utilization_ratio", "percentunit"),
                ("GPU memory", "gpu_memory_used_bytes", "bytes"),
                ("GPU temperature", "gpu_temperature_celsius", "celsius"),
                ("GPU power", "gpu_power_watts", "watt"),
            )
        ),
        Panel(
            "Free on the disk of the runs",
            {PROCESS: f"{of('disk_free_bytes')} / {of('disk_size_bytes')}"},
            "percentunit",
        ),
    ],
    [RUN_CHOICE, NODE_CHOICE],
)

LINKS = Dashboard(
    "Links",
    PROMETHEUS,
    [
        Panel(
            "From the workers",
            {WORKER: rate("link_bytes_total", 'direction="sent"')},
            "Bps",
            stacked=True,
        ),
        Panel(
            "To the workers",
            {WORKER: rate("link_bytes_total", 'direction="received"')},
            "Bps",
            stacked=True,
        ),
        Panel("Round trip", {WORKER: of("link_round_trip_seconds")}, "s"),
        Panel(
            "Frames waiting to be sent",
            {WORKER: of("link_queue_frames")},
            description="At the worker. A queue that does not empty is a link that is full.",
        ),
        Panel(
            "Codec ratio",
            {WORKER: of("codec_ratio")},
            description="Bytes of the gradients as fp32, divided by the bytes that were sent.",
        ),
        Panel(
            "Time spent sending and waiting",
            {PROCESS: f"sum by (role, rank, node) ({rate('phase_seconds_total', ON_THE_LINK)})"},
            "percentunit",
        ),
        Panel(
            "Sent and received since each worker joined",
            {
                WORKER
                + " {{direction}}": f"sum by (rank, node, direction) ({of('link_bytes_total')})"
            },
            "bytes",
        ),
        Panel(
            "Scraped",
            {"{{role}} {{node}}": 'up{job="smolcluster", run=~"$run"}'},
            kind="state-timeline",
            description="0 where Prometheus does not reach a process's /metrics.",
        ),
    ],
    [RUN_CHOICE],
)

LOGS = Dashboard(
    "Logs",
    LOKI,
    [
        Panel(
            "Lines by level",
            {"{{level}}": f"sum by (level) (count_over_time({FOUND} [$__auto]))"},
            stacked=True,
        ),
        Panel(
            "Lines by host",
            {"{{host}}": f"sum by (host) (count_over_time({FOUND} [$__auto]))"},
            stacked=True,
        ),
        Panel(
            "Warnings and errors",
            {"": f'{FOUND} | level=~"WARNING|ERROR|CRITICAL" {MESSAGE}'},
            kind="logs",
            width=COLUMNS,
        ),
        Panel("Lines", {"": f"{FOUND} {MESSAGE}"}, kind="logs", width=COLUMNS, height=16),
    ],
    [
        RUN_CHOICE,
        *(chosen(name, label_values(name), LOKI) for name in ("host", "rank", "level")),
        typed("search"),
    ],
)
DASHBOARDS = (RUN, WORKERS, LINKS, LOGS)


RANGE: dict[str, Json] = {
    "prometheus": {"range": True, "instant": False},
    "loki": {"queryType": "range"},
}
"""How each data source is asked for values over time."""
UP_OR_DOWN: Json = {
    "mode": "absolute",
    "steps": [{"color": "red", "value": None}, {"color": "green", "value": 1}],
}


def rendered(dashboard: Dashboard) -> str:
    uid = f"smolcluster-{dashboard.name.lower()}"
    page = {
        "uid": uid,
        "title": dashboard.name,
        "tags": ["smolcluster"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "tags": ["smolcluster"],
                "title": "",
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": list(dashboard.variables)},
        "annotations": {"list": []},
        "panels": list(placed(dashboard)),
    }
    return json.dumps(page, indent=2, ensure_ascii=False) + "\n"


def placed(dashboard: Dashboard) -> Iterator[Json]:
    """The panels, line by line from the upper left corner; a repeated one has a line to itself."""
    x = y = height = 0
    for number, panel in enumerate(dashboard.panels, start=1):
        width = COLUMNS if panel.repeat else panel.width
        if x + width > COLUMNS:
            x, y, height = 0, y + height, 0
        place = {"x": x, "y": y, "w": width, "h": panel.height}
        yield {"id": number, "gridPos": place} | rendered_panel(panel, dashboard.source)
        x, height = x + width, max(height, panel.height)


def rendered_panel(panel: Panel, source: Json) -> Json:
    made: Json = {
        "title": panel.title,
        "type": panel.kind,
        "datasource": source,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": expression,
                "legendFormat": legend,
                **RANGE[source["type"]],
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
        "options": OPTIONS[panel.kind],
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }
    if panel.description:
        made["description"] = panel.description
    if panel.repeat:
        made |= {"repeat": panel.repeat, "repeatDirection": "h", "maxPerRow": 3}
    if panel.kind == "timeseries":
        made["fieldConfig"]["defaults"] |= {
            "min": 0,
            "custom": {
                "fillOpacity": 30 if panel.stacked else 0,
                "showPoints": "never",
                "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            },
        }
    if panel.kind == "state-timeline":
        made["fieldConfig"]["defaults"]["thresholds"] = UP_OR_DOWN
    if panel.right:
        on_the_right = {"id": "custom.axisPlacement", "value": "right"}
        names = {"id": "byRegexp", "options": panel.right}
        made["fieldConfig"]["overrides"] = [{"matcher": names, "properties": [on_the_right]}]
    return made


def main() -> None:
    for dashboard in DASHBOARDS:
        path = FOLDER / f"{dashboard.name.lower()}.json"
        path.write_text(rendered(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
