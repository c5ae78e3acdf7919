"""Draws the pictures of a run in images/, from a run of this version: `uv run scripts/make_pictures.py`.

A server and four workers learn digits on this machine, and one worker is killed. `top` is recorded as SVG;
Chromium takes the dashboard and the report. It needs the packages that `scripts/test.sh` installs.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import psutil
from PIL import Image
from rich.console import Console
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from smolcluster.launch.watch.top.command import drawn
from smolcluster.launch.watch.top.source import Source
from smolcluster.runs.launched import Launched, read_launched
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import read_status

IMAGES = Path(__file__).resolve().parents[1] / "images"
SMOLCLUSTER = (sys.executable, "-m", "smolcluster.cli")
NUM_WORKERS, KILLED = 4, 3
KILLED_AT, TAKEN_AT = 400, 900
"""Steps at which a worker is killed, and at which the pictures of the running run are taken."""
WIDE, NARROW, PAGE = (1280, 1330), (400, 1500), (936, 1344)
"""Width and height in pixels: of the dashboard, of the same on a telephone, and of the report."""
TOP_COLUMNS, TOP_LINES = 130, 26
DEADLINE_S = 600.0
SETTLE_S = 4.0
"""A page draws its curves in so many seconds."""
Found = TypeVar("Found")


def main() -> None:
    with TemporaryDirectory(prefix="pictures-") as folder:
        place = Path(folder)
        with training(place) as paths, chromium(place) as browser:
            launched = eventually(lambda: launched_of(paths))
            eventually(lambda: step_of(paths) >= KILLED_AT)
            kill(launched)
            eventually(lambda: step_of(paths) >= TAKEN_AT)
            record_top(paths, place)
            with dashboard(paths) as address:
                for scheme in ("light", "dark"):
                    take(browser, address, f"dashboard-{scheme}.png", WIDE, scheme)
                take(browser, address, "dashboard-narrow.png", NARROW)
        subprocess.run([*SMOLCLUSTER, "report", str(paths.root)], check=True)  # noqa: S603
        with chromium(place) as browser:
            take(browser, paths.report.as_uri(), "report.png", PAGE)


@contextmanager
def training(folder: Path) -> Iterator[RunPaths]:
    """A run until the end of the block, then to its own end; its folder."""
    settings = (
        f"port={free_port()}",
        f"runs_dir={folder / 'runs'}",
        "metrics_port=null",
        "num_epochs=300",
    )
    words = ("launch", "edp", "--local", "--no-tmux", "--workers", str(NUM_WORKERS))
    command = [*SMOLCLUSTER, *words, "--override", *settings, "learning_rate=0.01"]
    with subprocess.Popen(command) as run:  # noqa: S603 - our own command
        try:
            yield eventually(lambda: newest_run(folder / "runs"))
            run.wait(DEADLINE_S)
        finally:
            run.terminate()


@contextmanager
def dashboard(paths: RunPaths) -> Iterator[str]:
    """The page's address, while the block lasts."""
    command = [*SMOLCLUSTER, "dashboard", "--port", str(free_port()), str(paths.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:  # noqa: S603
        assert page.stdout is not None  # noqa: S101 - it is a pipe
        try:
            yield next(
                found[0] for line in page.stdout if (found := re.search(r"http://\S+", line))
            )
        finally:
            page.terminate()


@contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """A browser that asks nobody for anything."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        raise SystemExit("needs Chromium and its driver: apt-get install chromium chromium-driver")
    os.environ |= {"SE_OFFLINE": "true", "SE_AVOID_STATS": "true"}
    options = ChromeOptions()
    options.binary_location = program
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    flags += [f"--user-data-dir={folder / 'chromium'}", "--no-first-run"]
    for flag in [*flags, *(["--no-sandbox"] if os.geteuid() == 0 else [])]:
        options.add_argument(flag)
    browser = Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def take(
    browser: Chrome, address: str, name: str, size: Sequence[int], scheme: str = "light"
) -> None:
    """Take a picture of a page, in 256 colours."""
    width, height = size
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)
    time.sleep(SETTLE_S)
    browser.save_screenshot(str(IMAGES / name))
    with Image.open(IMAGES / name) as picture:
        picture.quantize(256).save(IMAGES / name, optimize=True)


def record_top(paths: RunPaths, folder: Path) -> None:
    """What `smolcluster top` shows now, as SVG."""
    console = Console(
        file=StringIO(),
        record=True,
        width=TOP_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
    )
    source = Source(paths, folder / "top")
    try:
        console.print(drawn(source.look(), console, TOP_LINES), no_wrap=True, crop=False)
    finally:
        source.close()
    console.save_svg(str(IMAGES / "top.svg"), title="smolcluster top")


def newest_run(runs: Path) -> RunPaths | None:
    found = sorted(runs.glob("edp-*/status.json"))
    return RunPaths(found[-1].parent) if found else None


def launched_of(paths: RunPaths) -> Launched | None:
    return read_launched(paths.launched) if paths.launched.is_file() else None


def kill(launched: Launched) -> None:
    """Kill a worker, and what would start it again."""
    pid = next(each.pid for each in launched.workers if each.rank == KILLED)
    supervisor = psutil.Process(pid)
    for each in (supervisor, *supervisor.children(recursive=True)):
        each.kill()


def step_of(paths: RunPaths) -> int:
    try:
        return read_status(paths.status).step
    except (OSError, json.JSONDecodeError):
        return 0


def eventually(look: Callable[[], Found | None]) -> Found:
    """What `look` finds, as soon as it finds something."""
    end = time.monotonic() + DEADLINE_S
    while not (found := look()):
        if time.monotonic() > end:
            raise SystemExit(f"nothing came of it within {DEADLINE_S:g} s")
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
