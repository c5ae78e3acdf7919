"""The dashboard in a real browser: Chromium, headless, from the system's packages."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chromium import remote_connection
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.client_config import ClientConfig
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from exporting import GPU
from harness import free_port, steps_in
from made_runs import NODES, MadeRun, killed_run, rank_status, worker_status
from processes import Child, Processes
from proxy import Proxy
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.report.page import write_report
from smolcluster.observability.view.stages import numbers_of
from smolcluster.runs.advice import ADVICE, LinkSpeed, Prediction
from smolcluster.runs.events import CheckpointSaved, Event, kind_of
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths, find_run
from smolcluster.runs.status import read_status
from texts import tiny_settings, train_alone, write_text
from waiting import DEADLINE_S, eventually

EVIL = "<script>document.title='taken'</script><b id='evil'>bold</b>"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs Chromium and its driver: apt-get install chromium chromium-driver",
    ),
    pytest.mark.xdist_group("chromium"),
]


def patient(*args: Any, **options: Any) -> ClientConfig:
    """Selenium itself gives a browser two minutes to begin, which is not enough on a very busy machine."""
    return ClientConfig(*args, **options | {"timeout": round(DEADLINE_S)})


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser that asks nobody for anything."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    arguments += [
        "--window-size=1280,900",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ]
    arguments += ["--disable-background-networking", "--no-first-run"]
    for argument in [*arguments, *(["--no-sandbox"] if os.geteuid() == 0 else [])]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SE_OFFLINE", "true")
        monkeypatch.setenv("SE_AVOID_STATS", "true")
        monkeypatch.setattr(remote_connection, "ClientConfig", patient)
        driver = Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(DEADLINE_S)
    driver.set_script_timeout(DEADLINE_S)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Chrome]:
    """The browser as if it were new: what it keeps belongs to an address with a port."""
    yield chromium
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get("about:blank")
    complaints(chromium)


def dashboard(processes: Processes, *arguments: str) -> tuple[Child, str]:
    """The page's server, and the address that it prints."""
    port = str(free_port())
    child = processes.smolcluster("dashboard", "--port", port, *arguments)
    child.wait_for("Ctrl-C")
    found = re.search(r"http://\S+", child.output)
    assert found is not None
    return child, found[0]


def run_js(browser: Chrome, script: str, *arguments: object) -> Any:
    return browser.execute_script(script, *arguments)


# The page replaces elements at any time: one script finds an element and reads or presses it.


def text_of(browser: Chrome, selector: str) -> str:
    """Its words; none where there is no such element."""
    script = "return document.querySelector(arguments[0])?.textContent ?? ''"
    return str(run_js(browser, script, selector))


def attribute_of(browser: Chrome, selector: str, name: str) -> str | None:
    script = "return document.querySelector(arguments[0])?.getAttribute(arguments[1])"
    value: str | None = run_js(browser, script, selector, name)
    return value


def is_visible(browser: Chrome, selector: str) -> bool:
    script = (
        "return document.querySelector(arguments[0]).checkVisibility({ visibilityProperty: true })"
    )
    return bool(run_js(browser, script, selector))


def count(browser: Chrome, selector: str) -> int:
    return int(run_js(browser, "return document.querySelectorAll(arguments[0]).length", selector))


def texts_of(browser: Chrome, selector: str) -> list[str]:
    """The words of all such elements that are shown."""
    script = """return [...document.querySelectorAll(arguments[0])]
        .filter((each) => each.checkVisibility()).map((each) => each.innerText)"""
    found: list[str] = run_js(browser, script, selector)
    return found


def press(browser: Chrome, selector: str) -> None:
    """Click it, wherever it is on a page that still moves."""
    run_js(browser, "document.querySelector(arguments[0]).click()", selector)


def with_element(browser: Chrome, selector: str, use: Callable[[WebElement], object]) -> None:
    """Use an element as a person would; again, if the page replaces it before the end."""

    def used(_: Chrome) -> bool:
        element = browser.find_element(By.CSS_SELECTOR, selector)
        use(element)
        return element.is_enabled()  # raises an error if it was replaced

    ignored = [StaleElementReferenceException]
    WebDriverWait(browser, DEADLINE_S, ignored_exceptions=ignored).until(used)


def choose(browser: Chrome, selector: str, choice: str) -> None:
    """Choose the option that has this text or value."""
    option = f"./option[. = '{choice}' or @value = '{choice}']"
    with_element(browser, selector, lambda element: element.find_element(By.XPATH, option).click())


def type_keys(browser: Chrome, selector: str, *keys: str) -> None:
    with_element(browser, selector, lambda element: element.send_keys(*keys))


def resize(browser: Chrome, width: int) -> None:
    """Give the page so many pixels, on a phone if they are few, and have it drawn anew."""
    size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width <= 400}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    drawn = """const done = arguments[0];
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))"""
    browser.execute_async_script(drawn)
    assert run_js(browser, "return innerWidth") == width


def is_as_wide_as(browser: Chrome, width: int) -> bool:
    return bool(run_js(browser, "return document.documentElement.scrollWidth") == width)


def figure(browser: Chrome, name: str) -> str:
    return text_of(browser, f"#figures [data-name='{name}'] dd")


def step_on(browser: Chrome) -> int:
    """The step that the page shows; -1 when it shows none."""
    text = figure(browser, "step").replace(",", "")
    return int(text) if text.isdigit() else -1


def complaints(browser: Chrome) -> list[str]:
    """What the browser did not like, such as scripts that the page's policy forbids."""
    logged = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in logged if entry["level"] == "SEVERE"]


def started_run(processes: Processes) -> RunPaths:
    """A run with two workers that goes on for long, at work."""
    port = f"port={free_port()}"
    processes.server("--local", "--workers", "2", "--override", port, "num_epochs=100000")
    for rank, node in enumerate(("worker1", "win")):
        processes.worker(rank + 1, node, "--local", "--override", port, "threads=1")
    status = processes.runs / "latest" / "status.json"
    eventually(lambda: status.is_file() and len(read_status(status).workers) == 2)
    eventually(lambda: read_status(status).step > 20)
    return find_run(processes.runs)


def test_a_run_that_goes_on_is_shown_as_it_is(processes: Processes, browser: Chrome) -> None:
    paths = started_run(processes)
    child, address = dashboard(processes)
    browser.get(address)
    eventually(lambda: text_of(browser, "#state") == "training")
    assert browser.title == f"{paths.run_id} · smolcluster"
    assert "token" not in browser.current_url

    before = read_status(paths.status).step
    eventually(lambda: step_on(browser) > before)
    assert step_on(browser) <= read_status(paths.status).step + 1
    eventually(lambda: text_of(browser, "#fresh") == "live")
    rows = [row.split() for row in texts_of(browser, "#workers tbody th")]
    assert rows == [["worker", "1"], ["worker", "2", "(win)"]]
    label = attribute_of(browser, "#cluster svg", "aria-label")
    assert label is not None
    assert "server mini1 and 2 workers" in label

    eventually(lambda: count(browser, "#curves canvas") >= 4)
    script = (
        "const done = arguments[1];"
        "import('/static/ask.js').then(({ ask }) => ask(arguments[0])).then((it) => it.json()).then(done)"
    )
    points: list[tuple[int, float]] = []

    def are_read() -> bool:
        series = browser.execute_async_script(script, f"/api/runs/{paths.run_id}/series")
        points[:] = zip(series["steps"]["step"], series["steps"]["loss"], strict=True)
        return len(points) > 20

    eventually(are_read)
    written = {line.record.step: line.record.values["loss"] for line in steps_in(paths.metrics)}
    for (before, _), (step, loss), (after, _) in zip(points, points[1:], points[2:], strict=False):
        near = [
            written[each] for each in range(before + 1, after)
        ]  # a long run's point is of several
        assert 0.9999 * min(near) <= loss <= 1.0001 * max(near), step

    resources = "return performance.getEntriesByType('resource').map((each) => each.name)"
    origin = address.partition("/#")[0]
    assert all(name.startswith(f"{origin}/") for name in run_js(browser, resources))
    assert complaints(browser) == []

    server = processes.children[0]
    server.kill()
    server.wait()
    eventually(lambda: text_of(browser, "#state") == "broken off")

    child.kill(signal.SIGINT)
    assert child.wait() == 0
    eventually(lambda: "no word from the dashboard" in text_of(browser, "#fresh"))


def made_runs(processes: Processes) -> None:
    """Two runs that are over, and one that begins; in the second is what could do harm."""
    killed_run(processes.runs, "edp-first")
    MadeRun(processes.runs, "single-third").started(algorithm="single", num_workers=0)
    run = killed_run(processes.runs, "edp-second")
    run.metric(*(MetricRecord("step", step, 1, {"loss": 0.0}) for step in range(101, 401)))
    process_stats = {"sent_bytes_per_s": 1e6}
    run.status(
        "ended", None, *(worker_status(rank, process_stats=process_stats) for rank in range(3))
    )
    run.says("worker", "pi5", 0, ("ERROR", EVIL), ("INFO", "z" * 1_000_000))


def open_made(processes: Processes, browser: Chrome) -> None:
    made_runs(processes)
    _, address = dashboard(processes, "edp-second")
    browser.get(address)
    eventually(lambda: text_of(browser, "#state") == "ended")
    eventually(lambda: count(browser, "#log-lines .line") > 5)


def test_a_run_that_is_over_is_shown_with_its_curves_events_and_numbers(
    processes: Processes, browser: Chrome
) -> None:
    open_made(processes, browser)
    status = read_status(processes.runs / "edp-second" / "status.json")
    assert step_on(browser) == status.step
    assert figure(browser, "training loss") == f"{status.loss:g}"
    assert figure(browser, "accuracy") == "90.0%"
    assert text_of(browser, "#workers tbody").count("joined") == 3

    eventually(lambda: count(browser, "#timeline .mark") == 7)
    assert count(browser, "#cluster .flow-label") == 0
    lost = "#kinds [data-kind='worker_lost']"
    press(browser, lost)
    assert attribute_of(browser, lost, "aria-pressed") == "false"
    assert count(browser, "#timeline .mark") == 6
    press(browser, lost)
    type_keys(browser, "#timeline svg", *[Keys.ARROW_RIGHT] * 5)
    assert "worker lost – worker 2 (win) is lost: it was cut" in text_of(browser, "#event")

    panels = "return uPlot.sync('run').plots.map(({ scales: { x } }) => `${x.min} to ${x.max}`)"
    assert len(run_js(browser, panels)) > 2
    assert len(set(run_js(browser, panels))) == 1, "panels lie over one another"
    press(browser, "[data-x='t']")
    press(browser, "#log-scale")
    assert attribute_of(browser, "#curves .uplot", "aria-label") == "Loss over time"
    assert complaints(browser) == []


def test_the_best_step_is_marked_and_losses_over_a_decade_are_logarithmic(
    processes: Processes, browser: Chrome
) -> None:
    open_made(processes, browser)
    eventually(lambda: "best, at step 100" in text_of(browser, "#curves"))
    script = """const [losses, done] = arguments;
        import('/static/charts.js').then(({ spansDecade }) => done(
          losses.map((loss) => spansDecade({ smoothed: { loss }, evaluations: {} }))))"""
    losses = [[1, 9], [1, 11], [None, 0.1, 2], [0, 11], []]
    found = browser.execute_async_script(script, losses)
    assert found == [False, True, True, False, False]
    assert attribute_of(browser, "#log-scale", "aria-pressed") == "true"
    assert complaints(browser) == []


def test_gpus_have_columns_and_curves_where_a_worker_tells_of_one(
    processes: Processes, browser: Chrome
) -> None:
    open_made(processes, browser)

    def headings() -> list[str]:
        return [each.lower() for each in texts_of(browser, "#workers thead th")]

    assert "device" in headings()
    assert not any("gpu" in name for name in headings())
    run, gpu = MadeRun(processes.runs, "edp-second"), {f"gpu/{name}": GPU[name] for name in GPU}
    gpu["memory_bytes"] = 1e9
    run.metric(*(MetricRecord("worker", n, 1, gpu, rank=0, node="pi5") for n in (398, 399, 400)))
    run.status("ended", None, worker_status(0, process_stats=gpu), worker_status(1))
    run.joined(1, "its successor")
    browser.refresh()
    eventually(lambda: "gpu w" in headings())
    found = [name for name in headings() if "gpu" in name]
    assert found == ["gpu", "gpu memory", "gpu °c", "gpu w"]
    row = text_of(browser, "#workers tbody tr")
    assert [word in row for word in ("88%", "13 GB", "61", "241")] == [True] * 4, row
    eventually(lambda: "GPU power" in text_of(browser, "#curves"))
    assert "4 workers" in text_of(browser, "#about")
    assert complaints(browser) == []


def test_logs_are_filtered_and_what_is_in_them_is_text(
    processes: Processes, browser: Chrome
) -> None:
    open_made(processes, browser)
    assert EVIL in text_of(browser, "#log-lines")
    assert count(browser, "#evil, #log-lines script") == 0
    assert "taken" not in browser.title

    press(browser, "#log-lines .more")
    eventually(lambda: "z" * 1_000_000 in text_of(browser, "#log-lines"))

    choose(browser, "#log-filter [name='level']", "ERROR")
    eventually(lambda: texts_of(browser, "#log-lines .level") == ["ERROR"])
    choose(browser, "#log-filter [name='level']", "all levels")
    choose(browser, "#log-filter [name='node']", "win")
    eventually(lambda: texts_of(browser, "#log-lines .who") == ["worker 2 (win)"])
    choose(browser, "#log-filter [name='node']", "all nodes")
    type_keys(browser, "#log-filter [name='text']", "IS LOST")
    eventually(lambda: texts_of(browser, "#log-lines .who") == ["server mini1"])
    assert complaints(browser) == []


def test_log_lines_are_shown_that_the_stream_did_not_bring(
    processes: Processes, browser: Chrome
) -> None:
    run = killed_run(processes.runs, "edp-first")
    _, address = dashboard(processes, "edp-first")
    port = urlsplit(address).port
    assert port is not None
    proxy = Proxy(port)
    browser.get(address.replace(f":{port}/", f":{proxy.port}/"))
    eventually(lambda: "is lost" in text_of(browser, "#log-lines"))

    two_lines = "two\N{LINE SEPARATOR}lines"
    run.says("server", "mini1", None, ("INFO", two_lines))
    eventually(lambda: two_lines in text_of(browser, "#log-lines"))

    proxy.cut()
    run.says("server", "mini1", None, ("INFO", "said meanwhile"))
    eventually(lambda: "said meanwhile" in text_of(browser, "#log-lines"))
    run.says("server", "mini1", None, *(("INFO", f"line {number}.") for number in range(900)))
    eventually(lambda: "line 899." in text_of(browser, "#log-lines"))
    eventually(lambda: "line 0." in text_of(browser, "#log-lines"))
    proxy.close()


@pytest.mark.parametrize(("algorithm", "has_staleness"), [("edp", True), ("syncps", False)])
def test_staleness_is_shown_of_algorithms_that_have_any(
    processes: Processes, browser: Chrome, algorithm: str, *, has_staleness: bool
) -> None:
    run = MadeRun(processes.runs, "made")
    run.started(algorithm=algorithm)
    run.status("ended", None, worker_status(0, staleness=[5, 0, 0, 0, 0, 0, 0, 0]))
    _, address = dashboard(processes, "made")
    browser.get(address)
    places = ("#staleness", "#staleness-title", "#workers [data-label='staleness']")
    eventually(lambda: text_of(browser, "#state") == "ended")
    eventually(lambda: is_visible(browser, "#pushes"))
    eventually(lambda: {is_visible(browser, place) for place in places} == {has_staleness})


def test_what_a_link_was_measured_to_carry_stands_beside_what_it_does(
    processes: Processes, browser: Chrome
) -> None:
    run = MadeRun(processes.runs, "edp-made")
    run.started()
    used = {"sent_bytes_per_s": 2e6, "received_bytes_per_s": 1e6}
    link = LinkSpeed(up_bytes_s=12e6, down_bytes_s=90e6)
    prediction = {"algorithm": "edp", "settings": {}, "alone": "mini1", "links": {"pi5": link}}
    numbers = ("samples_per_s", "lost", "received_bytes_s", "sent_bytes_s", "alone_samples_per_s")
    values = prediction | dict.fromkeys(numbers, 1.0)
    ADVICE.write(run.paths.advice, Prediction.model_validate(values))
    with run_lock(run.paths.lock):
        run.status("training", None, *(worker_status(n, process_stats=used) for n in range(2)))
        _, address = dashboard(processes, "edp-made")
        browser.get(address)
        cell = "#workers tbody tr:nth-child({}) [data-label='{}']"
        eventually(lambda: text_of(browser, cell.format(1, "up")) == "2 MB/slink 12 MB/s")
        assert text_of(browser, cell.format(1, "down")) == "1 MB/slink 90 MB/s"
        assert text_of(browser, cell.format(2, "up")) == "2 MB/s"
        assert complaints(browser) == []


def test_frequent_events_are_thinned_to_what_fits(processes: Processes, browser: Chrome) -> None:
    run = killed_run(processes.runs, "edp-first")
    for step in range(400):
        run.now += 0.02
        run.event(CheckpointSaved(step=step))
    _, address = dashboard(processes, "edp-first")
    browser.get(address)
    eventually(lambda: count(browser, "#timeline circle") == 7)
    places = (
        "return [...document.querySelectorAll('#timeline rect')].map((it) => it.x.baseVal.value)"
    )
    shown = run_js(browser, places)
    assert 50 < len(shown) < 400
    assert min(right - left for left, right in pairwise(shown)) >= 4
    type_keys(browser, "#timeline svg", Keys.ARROW_LEFT)
    assert "checkpoint saved – checkpoint of step 399 saved" in text_of(browser, "#event")


def test_another_run_is_chosen_the_theme_is_changed_and_it_fits_a_telephone(
    processes: Processes, browser: Chrome
) -> None:
    open_made(processes, browser)
    choose(browser, "#run", "edp-first")
    eventually(lambda: browser.title.startswith("edp-first"))
    eventually(lambda: text_of(browser, "#run option:checked") == "edp-first · ended")
    eventually(lambda: EVIL not in text_of(browser, "#log-lines"))
    browser.back()
    eventually(lambda: browser.title.startswith("edp-second"))
    eventually(lambda: EVIL in text_of(browser, "#log-lines"))

    background = "return getComputedStyle(document.body).backgroundColor"
    markers = """return [...document.querySelectorAll('#curves .u-marker')]
        .map((each) => getComputedStyle(each).borderBottomColor)"""
    eventually(lambda: len(run_js(browser, markers)) > 4)
    press(browser, "#theme")
    light, light_markers = run_js(browser, background), run_js(browser, markers)
    press(browser, "#theme")
    assert run_js(browser, background) != light
    pairs = zip(run_js(browser, markers), light_markers, strict=True)
    assert all(now != then for now, then in pairs), "legends follow the theme"
    assert text_of(browser, "#theme") == "Theme: dark"
    browser.refresh()
    assert text_of(browser, "#theme") == "Theme: dark"

    resize(browser, 400)
    eventually(lambda: count(browser, "#curves canvas") >= 4)
    eventually(lambda: is_as_wide_as(browser, 400))

    choose(browser, "#run", "single-third")
    eventually(lambda: text_of(browser, "#cluster .rank") == "trainer")
    assert not is_visible(browser, "#workers")
    assert complaints(browser) == []

    shutil.rmtree(processes.runs / "edp-first")
    choose(browser, "#run", "edp-first")
    assert not is_visible(browser, "#figures")
    eventually(lambda: "there is no run 'edp-first'" in text_of(browser, "#problems"))
    assert not is_visible(browser, "#figures")


def test_a_language_model_goes_on_from_what_is_typed(
    processes: Processes, browser: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text.txt")
    train_alone(tiny_settings(text, processes.runs, algorithm="single"), "writes")
    killed_run(processes.runs, "edp-first").config()
    _, address = dashboard(processes, "edp-first")
    browser.get(address)
    eventually(lambda: text_of(browser, "#state") == "ended")
    assert not is_visible(browser, "#chat")
    choose(browser, "#run", "writes")
    eventually(lambda: is_visible(browser, "#chat"))
    press(browser, "#chat")
    eventually(lambda: browser.title == "Chat · writes · smolcluster")

    prompt, said = "#prompt [name='text']", "#said"
    type_keys(browser, prompt, EVIL, Keys.SHIFT + Keys.ENTER + Keys.NULL, "the cat", Keys.ENTER)
    typed = f"{EVIL}\nthe cat\n"
    eventually(lambda: len(text_of(browser, said)) > len(typed) and is_visible(browser, "#send"))
    first = text_of(browser, said)
    assert first.startswith(typed)
    assert count(browser, "#evil") == 0
    assert "taken" not in browser.title
    assert re.fullmatch(r"step \d+", text_of(browser, "#step"))
    type_keys(browser, prompt, "a dog", Keys.ENTER)
    eventually(lambda: len(text_of(browser, said)) > len(f"{first}a dog\n"))
    eventually(lambda: is_visible(browser, "#send"))
    assert text_of(browser, said).startswith(f"{first}a dog\n")
    for width in (400, 640, 1280):
        resize(browser, width)
        assert is_as_wide_as(browser, width)
    assert complaints(browser) == []

    browser.get(browser.current_url.replace("run=writes", "run=edp-first"))
    type_keys(browser, prompt, "the cat", Keys.ENTER)
    eventually(lambda: "run edp-first has no good checkpoint" in text_of(browser, "#problems"))
    assert run_js(browser, "return document.querySelector(arguments[0]).value", prompt) == "the cat"
    assert text_of(browser, said) == ""


def test_without_the_token_the_browser_shows_what_to_do(
    processes: Processes, browser: Chrome
) -> None:
    made_runs(processes)
    _, address = dashboard(processes, "edp-first")
    browser.get(address.partition("#")[0])
    eventually(lambda: "open the whole address" in text_of(browser, "#problems"))
    assert "edp-first" not in text_of(browser, "body")


def test_a_browser_that_keeps_nothing_has_the_token_from_the_address(
    processes: Processes, browser: Chrome
) -> None:
    made_runs(processes)
    _, address = dashboard(processes, "edp-first")
    refused = "Object.defineProperty(window, 'localStorage', { get() { throw new Error(); } })"
    on_each_page = "ScriptToEvaluateOnNewDocument"
    added = browser.execute_cdp_cmd(f"Page.add{on_each_page}", {"source": refused})
    browser.get(address)
    eventually(lambda: "edp-first" in text_of(browser, "body"))
    browser.execute_cdp_cmd(f"Page.remove{on_each_page}", added)


def test_stages_of_a_pipeline_have_columns_and_links_between_them(
    processes: Processes, browser: Chrome
) -> None:
    run = MadeRun(processes.runs, "pipeline-made")
    run.started(algorithm="pipeline", num_workers=2)
    op_s, sends, capacities = {"forward": 0.02, "backward": 0.05}, {1: 2e6}, {1: 12e6}
    first = numbers_of({0: (0, 4), 3: (10, 12)}, op_s, 0.3, sends, capacities)
    second = numbers_of({1: (4, 10)}, {"forward": 0.01, "backward": 0.02}, 0.6, {0: 1e6})
    workers = (worker_status(0, process_stats=first), worker_status(1, process_stats=second))
    with run_lock(run.paths.lock):
        run.status("training", None, *workers)
        _, address = dashboard(processes, "pipeline-made")
        browser.get(address)
        eventually(lambda: "0–3, 10–11" in text_of(browser, "#workers tbody"))
        row = text_of(browser, "#workers tbody tr")
        told = ("20 ms", "50 ms", "30%", "2 of 12 MB/s to 2")
        assert [word in row for word in told] == [True] * 4, row
        assert text_of(browser, "#cluster .flow-label") == "3 MB/s"
        of_pushes = ("//h2[text()='Pushes']/..", "//th[text()='staleness']")
        hidden = [browser.find_element("xpath", each).get_property("hidden") for each in of_pushes]
        assert hidden == [True, True]
        assert "sets the pace: it computes 70% of a step" in text_of(browser, "#insight")
        overlaps = """const [label, ...circles] = [document.querySelector('#cluster .flow-label'),
            ...document.querySelectorAll('#cluster .body')].map((it) => it.getBoundingClientRect());
            return circles.filter((it) => it.left < label.right && label.left < it.right
              && it.top < label.bottom && label.top < it.bottom).length"""
        for width in (400, 800, 1280):
            resize(browser, width)
            assert run_js(browser, overlaps) == 0, width
        assert complaints(browser) == []


def test_the_page_of_a_mesh_shows_ranks_grid_and_tokens(
    processes: Processes, browser: Chrome
) -> None:
    run = MadeRun(processes.runs, "mesh-made")
    grid = "dp 1 x fsdp 1 x tp 1 x pp 2"
    run.started(algorithm="single", mesh=grid, num_ranks=2, tokens_per_sample=128, node="a")
    for rank in (None, 1):
        run.says("rank", "a", rank, ("INFO", f"of rank {rank or 0}"))
    ranks = [rank_status(rank, cpu=0.5, samples_per_s=10.0) for rank in range(2)]
    with run_lock(run.paths.lock):
        run.status("training", None, ranks=ranks)
        _, address = dashboard(processes, "mesh-made")
        browser.get(address)
        eventually(lambda: "rank 1 (a)" in text_of(browser, "#workers tbody"))
        assert "rank 0 (a)" in text_of(browser, "#workers tbody")
        assert f"2 ranks: {grid}" in text_of(browser, "#about")
        assert text_of(browser, "#workers-title") == "Ranks"
        assert text_of(browser, "#workers thead th") == "rank"
        headings = {each.lower() for each in texts_of(browser, "#workers thead th")}
        assert not {"loss", "samples", "step"} & headings
        assert "worker" not in text_of(browser, "main").lower()
        choose(browser, "#log-filter [name='rank']", "rank 0 (a)")
        eventually(lambda: count(browser, "#log-lines .line") == 1)
        assert text_of(browser, "#log-lines .message") == "of rank 0"
        assert is_visible(browser, "#figures [data-name='tokens/s']")
        resize(browser, 400)
        eventually(lambda: is_as_wide_as(browser, 400))
        assert complaints(browser) == []


def test_all_kinds_of_events_are_drawn_and_one_that_the_page_does_not_know(
    processes: Processes, browser: Chrome
) -> None:
    open_made(processes, browser)
    kinds = [*(kind_of(model) for model in get_args(Event)), "unheard_of"]
    script = """const [kinds, done] = arguments;
        const events = kinds.map((kind, index) => ({ t: 10 * index, kind, text: kind }));
        const counts = Object.fromEntries(kinds.map((kind) => [kind, 1]));
        import('/static/timeline.js').then(({ drawTimeline }) => drawTimeline({ events, counts }))
          .then(() => done([...document.querySelectorAll('#kinds .chip')].map((it) => it.dataset.kind)))"""
    assert sorted(browser.execute_async_script(script, kinds)) == sorted(kinds)
    assert count(browser, "#timeline .mark") == len(kinds)
    assert "other" in text_of(browser, "#timeline")


def test_the_workers_fit_into_pages_of_any_width(processes: Processes, browser: Chrome) -> None:
    open_made(processes, browser)
    room = "const place = document.querySelector('.wide'); return place.scrollWidth - place.clientWidth"
    for width in (400, 640, 660, 800, 1000, 1340, 1400):
        resize(browser, width)
        eventually(lambda: int(run_js(browser, room)) <= 0)
        assert is_visible(browser, "#workers tbody tr")


@pytest.mark.usefixtures("with_curves")
def test_the_tables_and_curves_of_a_report_fit_into_pages_of_any_width(
    processes: Processes, browser: Chrome
) -> None:
    run = killed_run(processes.runs, "edp-first")
    stats = {"share/forward": 0.5, "sent_bytes_per_s": 1e6, "rtt_s": 0.01, "step_s": 0.1}
    stats["memory_bytes"] = 1e9
    run.metric(
        *(MetricRecord("worker", 100, 1, stats, rank=rank, node=NODES[rank]) for rank in range(3))
    )
    linked = {"sent_bytes": 10**8, "address": "192.168.50.2"}
    run.status("ended", None, *(worker_status(rank, **linked) for rank in range(3)))
    browser.get(write_report(run.paths).as_uri())
    wider = """return [...document.querySelectorAll('.scroll, .curves, html')]
        .filter((it) => it.scrollWidth > it.clientWidth + 1).map((it) => it.innerText.slice(0, 40))"""
    for width in (400, 640, 660, 800, 1000, 1400):
        resize(browser, width)
        assert run_js(browser, wider) == []
    assert count(browser, "#links tbody tr") == 3
