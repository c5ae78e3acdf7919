"""What `smolcluster doctor` looks at between the workers and the server: port, way and speed.

On the server's machine a listener waits for some seconds at the addresses and the port of the real server.
Each worker connects to it twice: from a plain command, and from inside a tmux session as a run does. macOS
since 15 cuts programs off from the local network until the user has granted it, by the program that started
them; a tmux server keeps the standing that it was born with. So the session is one of the user's tmux server,
where that runs: a run's sessions will be there too.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from smolcluster.configs.schema import ClusterConfig
from smolcluster.launch.doctor.findings import (
    Answer,
    Check,
    Context,
    Finding,
    fail,
    fields,
    ok,
    skipped,
    warn,
)
from smolcluster.launch.probing import (
    Listener,
    probe_script,
    probe_source,
    python_lines,
    read_listener,
)
from smolcluster.utils.units import format_address, format_rate
from smolcluster.utils.words import as_command

LISTEN_S = 15.0
REACH_S = 20.0
INSIDE_S = 6
TURN_S = 1.5
"""The longest turn of a worker that measures its link."""
LOW_SPEED_MB_PER_S, LARGE_LATENCY_MS = 1.0, 20.0
LOCAL_NETWORK_FIX = (
    "macOS keeps tmux from the local network: on that Mac's own screen open System Settings > Privacy & "
    "Security > Local Network, turn on Terminal and tmux; if tmux is not listed, run "
    "`tmux new-session 'nc -vz {address} {port}'` in Terminal and allow what it asks"
)
NEW_TMUX_FIX = (
    "the tmux server that runs there keeps the network that it was born with: when you need none of its "
    "sessions any more (`tmux list-sessions`), `tmux kill-server`, which ends them all"
)
TMUX_FAILS = "tmux does not start"


# --- the server's port


def listening_addresses(cluster: ClusterConfig) -> list[str]:
    return list(cluster.bind or dict.fromkeys(cluster.host_ip.values()))


def listen_seconds(cluster: ClusterConfig) -> int:
    return int(LISTEN_S + REACH_S + link_limit_s(cluster))


def link_limit_s(cluster: ClusterConfig) -> float:
    """How long a worker may wait for its turn and take it."""
    return REACH_S + TURN_S * cluster.num_workers


def listen_script(context: Context) -> str:
    cluster = context.cluster
    words = (cluster.port, context.token, listen_seconds(cluster), *listening_addresses(cluster))
    return probe_script(context.python, "listen", *words)


def judge_port(answer: Answer, context: Context) -> Finding:
    listener, cluster = read_listener(answer), context.cluster
    if listener is None:
        return fail(
            f"the test listener does not start ({answer.stderr_tail})",
            "there: `uv python install` brings a Python that can",
        )
    told = json.loads(answer.stdout)
    if "busy" in listener.states.values():
        by = f" by {told['holder']}" if told["holder"] else ""
        other = f"--override port={told['free']}" if told["free"] else "another port"
        return fail(
            f"port {cluster.port} is in use{by}",
            f"{as_command('runs')} shows whether a run has it; end that, or take {other}",
        )
    if "refused" in listener.states.values():
        why = next(place["why"] for place in told["places"].values() if place["state"] == "refused")
        return fail(f"port {cluster.port} may not be used ({why})", "take a port above 1023")
    if "listening" not in listener.states.values():
        return fail(_foreign(listener, context), _own_fix(listener, context, "host_ip"))
    return ok(f"{cluster.port} free")


def _foreign(listener: Listener, context: Context) -> str:
    stated = ", ".join(listener.states)
    return f"{stated}: no address of {context.cluster.server}, which has {_own(listener)}"


def _own(listener: Listener) -> str:
    return ", ".join(listener.own) or "none"


def _own_fix(listener: Listener, context: Context, key: str) -> str:
    return f"set {key} to an address of {context.cluster.server}: {_own(listener)}"


# --- the way there


def needs_server(context: Context) -> str | None:
    return None if context.listener else "needs the server"


def is_foreign(context: Context) -> bool:
    listener = context.listener
    return listener is not None and listener.states.get(context.address) == "foreign"


def needs_address(context: Context) -> str | None:
    return "needs the server" if is_foreign(context) else needs_server(context)


def _target(context: Context) -> tuple[str, int, str]:
    """The address, port and token of the listener for this worker."""
    ports = context.listener.ports if context.listener else {}
    port = ports.get(context.address) or next(iter(ports.values()), context.cluster.port)
    return context.address, port, context.token


def reach_script(context: Context) -> str:
    """Connect from here, and from inside a tmux session.

    The session is of the user's tmux server if that runs, else of one of its own, as a launch would start it.
    It is ended in any case.
    """
    if is_foreign(context):
        return "true"
    return f"""
dir=$(mktemp -d) || exit 9
trap 'rm -rf "$dir"' EXIT
trap 'exit 9' HUP INT TERM
cat > "$dir/probe.py"
printf %s "$PATH" > "$dir/path"
cat > "$dir/inside.sh" <<'END'
sh "$1/knock.sh" "$1" > "$1/part" 2>&1
mv "$1/part" "$1/inside"
END
cat > "$dir/knock.sh" <<'END'
PATH=$(cat "$1/path"); export PATH
{python_lines(context.python)}
python "$1/probe.py" knock {shlex.join(map(str, _target(context)))}
END
echo "outside $(sh "$dir/knock.sh" "$dir" 2>&1 | tail -n 1)"
command -v tmux >/dev/null || exit 0
session=smolcluster-doctor-$$
if tmux list-sessions >/dev/null 2>&1; then
  echo "tmux runs"
  of_doctor() {{ tmux "$@"; }}
  trap 'tmux kill-session -t "=$session" 2>/dev/null; rm -rf "$dir"' EXIT
else
  rmdir "${{TMUX_TMPDIR:-/tmp}}/tmux-$(id -u)" 2>/dev/null  # it is empty if asking has made it
  of_doctor() {{ tmux -S "$dir/socket" -f /dev/null "$@"; }}
  trap 'of_doctor kill-server 2>/dev/null; rm -rf "$dir"' EXIT
fi
of_doctor new-session -d -s "$session" sh "$dir/inside.sh" "$dir" \\; \
  set-option -t "=$session:" destroy-unattached off || sleep 1
of_doctor has-session -t "=$session" 2>/dev/null || [ -e "$dir/inside" ] || {{
  echo 'inside {{"error": "{TMUX_FAILS}"}}'; exit 0; }}
end=$(($(date +%s) + {INSIDE_S}))
while [ ! -e "$dir/inside" ] && [ "$(date +%s)" -le $end ]; do sleep 0.1; done
echo "inside $(tail -n 1 "$dir/inside" 2>/dev/null)" """


def judge_reach(answer: Answer, context: Context) -> Finding:
    listener, cluster = context.listener, context.cluster
    if listener and is_foreign(context):
        return fail(
            f"{context.address} is no address of {cluster.server}, which has {_own(listener)}",
            _own_fix(listener, context, f"host_ip.{context.node}"),
        )
    told = fields(answer.stdout)
    outside = json.loads(told["outside"])
    inside = json.loads(told["inside"]) if told.get("inside") else None
    if outside["error"]:
        return _unreached(outside, context)
    if inside is None:
        return (
            skipped("needs tmux")
            if "inside" not in told
            else _cut_off_in_tmux("ETIMEDOUT", context, is_old="tmux" in told)
        )
    if inside["error"]:
        return _cut_off_in_tmux(inside["error"], context, is_old="tmux" in told)
    return ok("from tmux too")


def _cut_off_in_tmux(error: str, context: Context, *, is_old: bool) -> Finding:
    """What keeps tmux from the server; `is_old`: it is a tmux server that ran before."""
    if error == TMUX_FAILS:
        return fail(error, "there: `tmux new-session -d` says why")
    address, port = context.address, context.cluster.port
    what = f"{format_address(address, port)} is reached, but not from inside tmux ({error})"
    if error == "EHOSTUNREACH" and context.facts.is_mac:
        fix = LOCAL_NETWORK_FIX.format(address=address, port=port)
        return fail(what, f"{fix}; then {NEW_TMUX_FIX}" if is_old else fix)
    if is_old:
        return fail(what, NEW_TMUX_FIX)
    return fail(what, f"there: `tmux new-session 'nc -vz {address} {port}'` shows it")


def _unreached(told: dict[str, Any], context: Context) -> Finding:
    place = format_address(context.address, context.cluster.port)
    server, key = context.cluster.server, f"host_ip.{context.node}"
    match told["error"]:
        case "name":
            return fail(
                f"{context.address} has no address there", f"set {key} to an address of {server}"
            )
        case "EHOSTUNREACH" | "ENETUNREACH" | "EHOSTDOWN":
            return fail(
                f"there is no way to {place} ({told['error']})",
                f"connect both to one network, or set {key} to an address of {server} in "
                f"{context.node}'s network",
            )
        case "stranger":
            return fail(
                f"at {place} somebody else than {server} answers",
                f"set {key} to an address of {server}; two machines may have the same address",
            )
        case error:
            port = context.cluster.port
            return fail(
                f"{place} does not answer ({error})",
                f"open port {port} on {server} (Linux: `sudo ufw allow {port}/tcp`; macOS: System Settings > "
                f"Network > Firewall), and check the cable and {key}",
            )


# --- its speed


def link_script(context: Context, verb: str = "measure") -> str:
    """Measure round trips and bandwidth, or with `large` only see that large packets pass."""
    return probe_script(context.python, verb, *_target(context))


def lost_packets(told: Mapping[str, str], context: Context) -> tuple[str, str]:
    way = f"{told['way']} {context.cluster.server}"
    ping = "ping -D -s 1472" if context.facts.is_mac else "ping -M do -s 1472"
    return (
        f"small packets pass, but large ones {way} ({context.address}) are lost",
        "give both ends and what is between them the same MTU, such as 1500 "
        f"({context.there(f'{ping} {context.address}')} shows what passes)",
    )


def judge_link(answer: Answer, context: Context) -> Finding:
    told = json.loads(answer.stdout)
    if told["error"] == "large":
        return fail(*lost_packets(told, context))
    if told["error"] == "broke":
        return fail(f"the connection broke while it was measured ({told['why']})", "look again")
    if told["error"]:
        return skipped("needs the server")
    shown = f"{format_rate(1e6 * told['mb_per_s'])} {told['ms']:.2g} ms"
    if told["mb_per_s"] < LOW_SPEED_MB_PER_S:
        return warn(
            f"the link to the server is slow: {shown}",
            "use a cable; or `--override use_quantization=true worker_update_interval=50`",
        )
    if told["ms"] > LARGE_LATENCY_MS:
        return warn(
            f"the link to the server has long delays: {shown}", "use a cable, or 5 GHz Wi-Fi"
        )
    return ok(shown)


def port_check() -> Check:
    """What is looked at on the server's machine, and leaves the listener there."""
    return Check("port", listen_script, judge_port, LISTEN_S, stdin=lambda _: probe_source())


def link_checks(cluster: ClusterConfig) -> Sequence[Check]:
    """What is looked at from every worker, while the listener waits."""
    source, limit_s = probe_source(), link_limit_s(cluster)
    return (
        Check("server", reach_script, judge_reach, REACH_S, needs_server, lambda _: source),
        Check("link", link_script, judge_link, limit_s, needs_address, lambda _: source),
    )
