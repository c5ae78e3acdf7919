"""Grafana, Loki and Prometheus in Docker, from the project's folder `logging`.

Docker is asked through its command line, as a person would: `docker compose`, or the older `docker-compose`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from smolcluster.errors import LaunchError, TryAgain
from smolcluster.launch.host import Done, run_here
from smolcluster.observability.exporter import LOOPBACK, is_free
from smolcluster.wire.security import default_secret_path, ensure_secret

FOLDER = "logging"
COMPOSE_FILE = "docker-compose.yml"
PASSWORD = "GRAFANA_PASSWORD"  # noqa: S105 - the name of a variable
GRAFANA, LOKI_PORT = "http://localhost:3000", 3100
ASK_S = 10.0
"""How long Docker may take to answer a question."""
ANSWER_S = 2.0
"""How long a service may take to say how it is."""
LOKI_BUILD, LOKI_S = "/loki/api/v1/status/buildinfo", 0.5
"""Where Loki answers from the start, as `/ready` does not for a quarter of a minute, and how soon."""
UP_S, DOWN_S = 1800.0, 120.0
"""How long Docker may take to fetch and start the images, and to stop the containers."""
OF_SERVICE = '{{.Label "com.docker.compose.service"}}\t{{.Status}}'
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with


@dataclass(frozen=True)
class Service:
    """One of the three, as who runs it sees it.

    Attributes:
        name: of its container.
        url: where it says how it is.
        word: what is in its answer when it is well.
    """

    name: str
    url: str
    word: str


def services(environ: Mapping[str, str] = os.environ) -> tuple[Service, ...]:
    """The three services, Grafana first; Loki may be published on another address than 127.0.0.1.

    Compose reads LOKI_BIND in the environment, else in the file `.env` of the stack's folder; so is it here.
    """
    return (
        Service("grafana", "http://127.0.0.1:3000/api/health", "database"),
        Service("loki", f"{own_loki(environ)}/ready", "ready"),
        Service("prometheus", "http://127.0.0.1:9090/-/healthy", "Healthy"),
    )


def loki_bind(environ: Mapping[str, str] = os.environ) -> str:
    """The address on which the user wants Loki to be published; empty: this machine alone."""
    return environ["LOKI_BIND"] if "LOKI_BIND" in environ else _bound_in_file(own_stack())


def own_stack() -> Path | None:
    """The stack's folder in the checkout that this is; None: it is none."""
    folder = Path(__file__).resolve().parents[4] / FOLDER
    return folder if (folder / COMPOSE_FILE).is_file() else None


def _bound_in_file(folder: Path | None) -> str:
    """The LOKI_BIND of a stack's `.env`; empty: it has none."""
    with suppress(OSError, UnicodeDecodeError):
        text = "" if folder is None else (folder / ".env").read_text()
        if found := re.search(r"^LOKI_BIND=[\"']?([^\s\"'#]*)", text, re.MULTILINE):
            return found[1]
    return ""


def check_docker(timeout_s: float = ASK_S) -> None:
    """See that Docker runs and can be used.

    Raises:
        LaunchError: it is not installed, or not for this user.
        TryAgain: it does not run, or does not answer.
    """
    if shutil.which("docker") is None:
        raise LaunchError("Docker is not installed: install Docker, or Docker Desktop on a Mac")
    answer = _ask(["docker", "version", "--format", "{{.Server.Version}}"], timeout_s)
    if answer.ok:
        return
    if "permission denied" in answer.stderr.lower():
        raise LaunchError(
            "Docker does not let this user in: `sudo usermod -aG docker $USER`, then log in again"
        )
    start = "open Docker Desktop" if sys.platform == "darwin" else "`sudo systemctl start docker`"
    raise TryAgain(f"Docker is not running: {start}")


def compose(folder: Path) -> list[str]:
    """The words with which Compose is called for the stack.

    Raises:
        LaunchError: Docker has no Compose.
    """
    if _ask(["docker", "compose", "version"], ASK_S).ok:
        words = ["docker", "compose"]
    elif shutil.which("docker-compose") is not None:
        words = ["docker-compose"]
    else:
        raise LaunchError(
            "Docker has no Compose: install docker-compose-plugin (Debian's docker-compose does as well)"
        )
    return [*words, "--file", str(folder / COMPOSE_FILE)]


def password_file() -> Path:
    """Where Grafana's password is kept, by default `~/.config/smolcluster/grafana-password`, mode 0600."""
    return default_secret_path().with_name("grafana-password")


def stack_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What Compose is called with: GRAFANA_PASSWORD as the user has it, else the random one of the file.

    Raises:
        AuthError: the file cannot be made, or others can read it.
    """
    if environ.get(PASSWORD):
        return dict(environ)
    return {**environ, PASSWORD: ensure_secret(password_file()).key.decode()}


def takes_password(grafana: str = GRAFANA) -> bool:
    """Whether Grafana lets the administrator in with the password that it should have."""
    with suppress(httpx.HTTPError):
        auth = ("admin", stack_environ()[PASSWORD])
        reply = httpx.get(f"{grafana}/api/org", auth=auth, timeout=ANSWER_S, trust_env=False)
        return reply.status_code != httpx.codes.UNAUTHORIZED
    return True


def begin_up(folder: Path) -> None:
    """Start the stack without waiting for it, which may take minutes where images are fetched.

    Raises:
        LaunchError: Docker has no Compose.
        AuthError: see `stack_environ`.
    """
    argv = [*compose(folder), "up", "--detach"]
    detached = ["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *argv]
    run_here(detached, timeout_s=ASK_S, environ=stack_environ())


def runs(folder: Path, service: Service) -> bool:
    return containers(folder).get(service.name, "").startswith("Up")


def answers(service: Service, timeout_s: float = ANSWER_S) -> bool:
    try:
        reply = httpx.get(service.url, timeout=timeout_s, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return reply.status_code == httpx.codes.OK and service.word in reply.text


def own_loki(environ: Mapping[str, str] = os.environ) -> str:
    """Where Loki is on this machine, if it runs."""
    bound = loki_bind(environ)
    return f"http://{LOOPBACK if bound in ('', *EVERYWHERE) else bound}:{LOKI_PORT}"


def is_loki(base: str) -> bool:
    return answers(Service("loki", base + LOKI_BUILD, "version"), LOKI_S)


def bridge_address() -> str | None:
    """An address of this machine that its containers reach and other machines do not; None: there is none.

    That is Docker's bridge on Linux. With Docker in a virtual machine the bridge is elsewhere: there
    containers reach what listens on 127.0.0.1.
    """
    if sys.platform != "linux":
        return None
    first = "{{(index .IPAM.Config 0).Gateway}}"
    answer = _ask(["docker", "network", "inspect", "bridge", "--format", first], ASK_S)
    address = answer.stdout.strip()
    return address if answer.ok and address and is_free(address, 0) else None


def containers(folder: Path) -> dict[str, str]:
    """What Docker says of the containers that Compose made from the folder, by service."""
    label = f"label=com.docker.compose.project.working_dir={folder}"
    answer = _ask(["docker", "ps", "--all", "--filter", label, "--format", OF_SERVICE], ASK_S)
    lines = (line.partition("\t") for line in answer.stdout.splitlines())
    return {name: state for name, tab, state in lines if tab}


def run_compose(folder: Path, words: Sequence[str], timeout_s: float) -> None:
    """Call Compose for the stack; what Docker says goes to the terminal.

    Raises:
        LaunchError: there is no Docker, or Compose fails.
        TryAgain: Docker does not run.
        AuthError: see `stack_environ`.
    """
    check_docker()
    argv = [*compose(folder), *words]
    try:
        environ = stack_environ()
        done = subprocess.run(argv, check=False, timeout=timeout_s, env=environ)  # noqa: S603 - a list
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"`{' '.join(argv)}` did not end within {timeout_s:g} s") from error
    if code := done.returncode:
        raise LaunchError(f"`{' '.join(argv)}` ended with exit code {code}; it says why above")


def _ask(argv: Sequence[str], timeout_s: float) -> Done:
    """Run a command; one that is missing or too slow has failed, too."""
    try:
        return run_here(argv, timeout_s=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Done(1, "", str(error))
