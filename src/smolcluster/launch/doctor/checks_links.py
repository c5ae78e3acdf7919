"""What `smolcluster doctor` looks at between the workers and the server: port, way and speed.

On the server's machine a listener waits for some seconds at the addresses and the port of the real server.
Each worker connects to it twice: from a plain command, and from inside a tmux session as a run does. macOS
since 15 cuts programs off from the local network until the user has granted it, by the program that started
them; a tmux server keeps the standing that it was born with. So the session is one of the user's tmux server,
where that runs: a run's sessions will be there too.
"""

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import LaunchError, PortBusy
from smolcluster.launch.doctor.findings import (
    Check,
    Finding,
    NodeChecks,
    fail,
    fields,
    ok,
    skipped,
    warn,
)
from smolcluster.launch.host import Done, Host
from smolcluster.launch.links import (
    Listener,
    ask,
    listening,
    probe_script,
    probe_source,
    python_lines,
    read_listener,
)
from smolcluster.launch.node_facts import Facts, facts_of
from smolcluster.launch.plan import Machines
from smolcluster.launch.prepare import run_on_all
from smolcluster.launch.watch.listing import living
from smolcluster.runs.launched import launched_of
from smolcluster.runs.paths import all_runs
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
PORT_FACTS = ("listeners", "port_holder")


# --- the server's port


def listening_addresses(cluster: ClusterConfig) -> list[str]:
    return list(cluster.bind or dict.fromkeys(cluster.host_ip.values()))


def listen_seconds(cluster: ClusterConfig) -> int:
    return int(LISTEN_S + 2 * REACH_S + TURN_S * cluster.num_workers)


def link_limit_s(node: NodeChecks) -> float:
    """How long a worker may wait for its turn and take it."""
    return REACH_S + TURN_S * node.cluster.num_workers


def listen_script(node: NodeChecks) -> str:
    cluster = node.cluster
    words = (cluster.port, node.token, listen_seconds(cluster), *listening_addresses(cluster))
    return probe_script(node.machine.interpreter, "listen", *words)


def judge_port(answer: Done, node: NodeChecks) -> Finding:
    listener, port = read_listener(answer), node.cluster.port
    if listener is None:
        return fail(
            f"the test listener does not start ({answer.stderr_tail})",
            "there: `uv python install` brings a Python that can",
        )
    came = {place.state: place for place in listener.places.values()}
    if "busy" in came:
        by, other = _holder_and_other(port, node.facts)
        if own := _own_run_on(port, node.host.destination):
            return warn(
                f"port {port} is in use by your run {own}",
                f"to start another beside it take {other}; {as_command('stop', own)} ends it",
            )
        return fail(
            f"port {port} is in use{by}",
            f"{as_command('runs')} shows whether a run has it; end that, or take {other}",
        )
    if "refused" in came:
        why = came["refused"].why
        return fail(f"port {port} may not be used ({why})", "take a port above 1023")
    if "listening" not in came:
        return _foreign(f"{', '.join(listener.places)}: no address of", "host_ip", listener, node)
    return ok(f"{port} free")


def _holder_and_other(port: int, facts: Facts) -> tuple[str, str]:
    """Who has a port that is in use, as a sentence's end, and what to take in its place."""
    by = f" by {facts.port_holder}" if facts.port_holder else ""
    free = facts.next_free(port)
    return by, f"--override port={free}" if free else "another port"


def _own_run_on(port: int, destination: str | None) -> str | None:
    """The user's running run whose server listens on this port of that machine."""
    for paths in living(all_runs()):
        launched = launched_of(paths)
        if launched and (launched.port, launched.server.ssh) == (port, destination):
            return paths.run_id
    return None


def _foreign(what: str, key: str, listener: Listener, node: NodeChecks) -> Finding:
    server, own = node.cluster.server, ", ".join(listener.own) or "none"
    return fail(f"{what} {server}, which has {own}", f"set {key} to an address of {server}: {own}")


# --- the way there


def needs_server(node: NodeChecks) -> str | None:
    return None if node.listener else "needs the server"


def is_foreign(node: NodeChecks) -> bool:
    """Whether the server is said to be at an address that is none of its own."""
    place = node.listener and node.listener.places.get(node.address)
    return bool(place and place.state == "foreign")


def needs_address(node: NodeChecks) -> str | None:
    return "needs the server" if is_foreign(node) else needs_server(node)


def _target(node: NodeChecks) -> tuple[str, int, str]:
    """The address, port and token of the listener for this worker."""
    ports = node.listener.ports if node.listener else {}
    port = ports.get(node.address) or next(iter(ports.values()), node.cluster.port)
    return node.address, port, node.token


def reach_script(node: NodeChecks) -> str:
    """Connect from here, and from inside a tmux session.

    The session is of the user's tmux server if that runs, else of one of its own, as a launch would start it.
    It is ended in any case.
    """
    if is_foreign(node):
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
{python_lines(node.machine.interpreter)}
python "$1/probe.py" knock {shlex.join(map(str, _target(node)))}
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


def judge_reach(answer: Done, node: NodeChecks) -> Finding:
    if node.listener and is_foreign(node):
        what, key = f"{node.address} is no address of", f"host_ip.{node.name}"
        return _foreign(what, key, node.listener, node)
    told = fields(answer.stdout)
    outside = json.loads(told["outside"])["error"]
    if outside:
        return _unreached(outside, node)
    if "inside" not in told:
        return skipped("needs tmux")
    inside = json.loads(told["inside"])["error"] if told["inside"] else "ETIMEDOUT"
    return _cut_off_in_tmux(inside, node, is_old="tmux" in told) if inside else ok("from tmux too")


def _cut_off_in_tmux(error: str, node: NodeChecks, *, is_old: bool) -> Finding:
    """What keeps tmux from the server; `is_old`: it is a tmux server that ran before."""
    if error == TMUX_FAILS:
        return fail(error, "there: `tmux new-session -d` says why")
    address, port = node.address, node.cluster.port
    what = f"{format_address(address, port)} is reached, but not from inside tmux ({error})"
    if error == "EHOSTUNREACH" and node.facts.is_mac:
        fix = LOCAL_NETWORK_FIX.format(address=address, port=port)
        return fail(what, f"{fix}; then {NEW_TMUX_FIX}" if is_old else fix)
    if is_old:
        return fail(what, NEW_TMUX_FIX)
    return fail(what, f"there: `tmux new-session 'nc -vz {address} {port}'` shows it")


def _unreached(error: str, node: NodeChecks) -> Finding:
    port, server, key = node.cluster.port, node.cluster.server, f"host_ip.{node.name}"
    place, mend = format_address(node.address, port), f"set {key} to an address of {server}"
    match error:
        case "name":
            return fail(f"{node.address} has no address there", mend)
        case "EHOSTUNREACH" | "ENETUNREACH" | "EHOSTDOWN":
            return fail(
                f"there is no way to {place} ({error})",
                f"connect both to one network, or {mend} in {node.name}'s network",
            )
        case "stranger":
            return fail(
                f"at {place} somebody else than {server} answers",
                f"{mend}; two machines may have the same address",
            )
    return fail(
        f"{place} does not answer ({error})",
        f"open port {port} on {server} (Linux: `sudo ufw allow {port}/tcp`; macOS: System Settings > "
        f"Network > Firewall), and check the cable and {key}",
    )


# --- its speed


def link_script(node: NodeChecks, verb: str = "measure") -> str:
    """Measure round trips and bandwidth, or with `large` only see that large packets pass."""
    return probe_script(node.machine.interpreter, verb, *_target(node))


def lost_packets(told: Mapping[str, str], node: NodeChecks) -> tuple[str, str]:
    way = f"{told['way']} {node.cluster.server}"
    ping = "ping -D -s 1472" if node.facts.is_mac else "ping -M do -s 1472"
    return (
        f"small packets pass, but large ones {way} ({node.address}) are lost",
        "give both ends and what is between them the same MTU, such as 1500 "
        f"({node.there(f'{ping} {node.address}')} shows what passes)",
    )


def judge_link(answer: Done, node: NodeChecks) -> Finding:
    told = json.loads(answer.stdout)
    if told["error"] == "large":
        return fail(*lost_packets(told, node))
    if told["error"] == "broke":
        return fail(f"the connection broke while it was measured ({told['why']})", "look again")
    if told["error"]:
        return skipped("needs the server")
    shown = f"{format_rate(1e6 * told['mb_per_s'])} {told['ms']:.2g} ms"
    if told["mb_per_s"] < LOW_SPEED_MB_PER_S:
        return warn(
            f"the link to the server is slow: {shown}",
            "use a cable; or `--override codec=int8 worker_update_interval=50`",
        )
    if told["ms"] > LARGE_LATENCY_MS:
        return warn(
            f"the link to the server has long delays: {shown}", "use a cable, or 5 GHz Wi-Fi"
        )
    return ok(shown)


def probe_stdin(_node: NodeChecks) -> bytes:
    return probe_source()


PORT_CHECK = Check("port", listen_script, judge_port, LISTEN_S, stdin=probe_stdin, of="server")
"""Leaves the listener there."""
LINK_CHECKS = (
    Check("server", reach_script, judge_reach, REACH_S, needs_server, probe_stdin, "worker"),
    Check("link", link_script, judge_link, link_limit_s, needs_address, probe_stdin, "worker"),
)
"""While the listener waits."""


def check_port(cluster: ClusterConfig, server: Host) -> None:
    """See that the server's port is free, as far as its machine tells without any Python.

    Raises:
        PortBusy: somebody listens there; the message offers the next free port.
        LaunchError: the machine cannot be asked.
    """
    facts = _port_facts(cluster, server)
    if facts.is_taken(cluster.port, listening_addresses(cluster)):
        raise _port_busy(cluster, server, facts)


def _port_facts(cluster: ClusterConfig, server: Host) -> Facts:
    return facts_of(server, *PORT_FACTS, port=cluster.port)


def _port_busy(cluster: ClusterConfig, server: Host, facts: Facts) -> PortBusy:
    by, other = _holder_and_other(cluster.port, facts)
    what = f"{as_command('runs')} shows whether a run has it"
    if own := _own_run_on(cluster.port, server.destination):
        by, what = f" by your run {own}", f"{as_command('stop', own)} ends it"
    return PortBusy(
        f"{server.node} ({server.shown}): port {cluster.port} is in use{by}; {what}; take {other}"
    )


def check_links(cluster: ClusterConfig, machines: Machines, senders: Sequence[str]) -> None:
    """See before a run that the server's port is free, and that packets of full size reach it from `senders`.

    Where an MTU on the way is smaller than those of both ends, connections are made and large frames never
    arrive: a run would begin, and train nothing. What cannot be measured is left to the run to tell.

    Raises:
        PortBusy: somebody listens at the port; the message offers the next free one.
        LaunchError: large packets are lost on the way of at least one worker.
    """
    token = secrets.token_hex(8)
    server, *others = (
        NodeChecks(machines[each], cluster, token=token) for each in (cluster.server, *senders)
    )

    def look(node: NodeChecks) -> None:
        node.listener = listener
        try:
            told = ask(node.host, link_script(node, "large"), REACH_S)
        except LaunchError:
            return
        if told.get("error") == "large":
            what, fix = lost_packets(told, node)
            raise LaunchError(f"{node.name}: {what}: {fix}")

    with ExitStack() as stack:
        try:
            listen = listening(server.host, listen_script(server), LISTEN_S)
            listener = stack.enter_context(listen)
        except LaunchError:
            return
        if any(place.state == "busy" for place in listener.places.values()):
            raise _port_busy(cluster, server.host, _port_facts(cluster, server.host))
        run_on_all(others, look)
