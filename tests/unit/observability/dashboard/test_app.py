"""What the page's server answers."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from made_runs import MadeRun, killed_run, worker_status
from smolcluster.errors import CheckpointError, NonFiniteLoss
from smolcluster.observability.dashboard import app as app_module
from smolcluster.observability.dashboard import serve as serving
from smolcluster.observability.dashboard.app import (
    MAX_PROMPT_CHARS,
    MAX_SEARCHES,
    MAX_STREAMS,
    MAX_TOKENS,
    MAX_VIEWS,
    STATIC,
    Views,
    make_app,
)
from smolcluster.observability.dashboard.guard import Guard, access_for
from smolcluster.observability.dashboard.serve import bound, server_config
from smolcluster.observability.view import lines
from smolcluster.observability.view.lines import Found, Wanted
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.events import Event, kind_of
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths
from waiting import eventually

TOKEN = "a-secret-that-nobody-knows"
DEADLINE_S = 90.0


def write(
    view: View, prompt: str, max_tokens: int, temperature: float
) -> tuple[int, Generator[str]]:
    """A model that says what it was asked."""
    if "?" in prompt:
        raise CheckpointError(f"run {view.paths.run_id} has no good checkpoint")
    text = " ".join((view.paths.run_id, prompt, str(max_tokens), str(temperature)))
    return 120, (text[start : start + 500] for start in range(0, len(text), 500))


def client_of(root: Path) -> TestClient:
    """A browser that has not been here."""
    app = Guard(make_app(Views(root), write, "edp-1"), access_for("127.0.0.1", "lab", TOKEN))
    return TestClient(app, base_url="http://127.0.0.1:8265", follow_redirects=False)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """A browser that has opened the printed address, for a folder with one run."""
    killed_run(tmp_path)
    client = client_of(tmp_path)
    client.headers["Authorization"] = f"Bearer {TOKEN}"
    return client


def get(client: TestClient, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_page_sets_no_cookie_and_holds_no_token(client: TestClient) -> None:
    """A browser would send a cookie to every other program that listens on this machine."""
    page = client.get("/")
    assert "<title>smolcluster</title>" in page.text
    assert "set-cookie" not in page.headers
    assert "set-cookie" not in client.get("/api/runs").headers
    assert TOKEN not in page.text


CHAT = "/api/runs/edp-1/chat?prompt=a&max_tokens=9&temperature=0.5"


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/edp-1/state", CHAT, "/x"])
def test_without_the_token_nothing_of_a_run_is_told(tmp_path: Path, path: str) -> None:
    killed_run(tmp_path)
    answer = client_of(tmp_path).get(path)
    assert answer.status_code == 401
    assert "open the whole address that `smolcluster dashboard` prints" in answer.text
    assert "edp-1" not in answer.text


@pytest.mark.parametrize("path", ["/?token=", "/api/runs?token="])
def test_a_token_in_the_address_opens_nothing(tmp_path: Path, path: str) -> None:
    client = client_of(tmp_path)
    client.get(path + TOKEN)
    assert client.get("/api/runs").status_code == 401


def test_other_names_and_other_pages_get_nothing(client: TestClient) -> None:
    strangers = ({"host": "evil.org:8265"}, {"origin": "http://evil.org"})
    for path, headers in product(("/api/runs", CHAT), strangers):
        answer = client.get(path, headers=headers)
        assert answer.status_code == 403
        assert answer.text.count("\n") == 1
        assert "access-control-allow-origin" not in answer.headers


def test_every_answer_forbids_foreign_scripts_and_guessing_of_types(client: TestClient) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/api/runs/none/state", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    for name in ("index.html", "chat.html"):
        page = (STATIC / name).read_text()
        assert "style=" not in page
        assert "<script>" not in page
        assert "http://" not in page
        assert "https://" not in page


@pytest.mark.parametrize("path", ["/api/runs/edp-1/state", CHAT])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str, path: str) -> None:
    assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("edp-none", 404),
        ("..%2f..%2fetc", 404),
        ("%2e%2e", 400),
        ("..%5c..", 400),
        ("a%00b", 400),
        ("-rf", 400),
        ("x" * 200, 400),
        ("%3Cscript%3E", 400),
    ],
)
def test_a_run_that_is_not_there_is_a_sentence(client: TestClient, name: str, code: int) -> None:
    answer = client.get(f"/api/runs/{name}/state")
    assert answer.status_code == code
    assert answer.headers["content-type"].startswith(("text/plain", "text/html")) is True
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fguard.py", "/%2e%2e/status.json"],
)
def test_no_file_outside_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


def test_state_events_and_series(client: TestClient) -> None:
    runs = get(client, "/api/runs")
    assert runs["chosen"] == "edp-1"
    assert [run["run_id"] for run in runs["runs"]] == ["edp-1"]
    assert get(client, "/api/runs/edp-1/state")["state"] == "ended"
    assert get(client, "/api/runs/latest/state")["run_id"] == "edp-1"
    assert len(get(client, "/api/runs/edp-1/series")["steps"]["loss"]) == 100
    assert get(client, "/api/runs/edp-1/events")["counts"]["worker_lost"] == 1


def test_hostile_log_lines_are_plain_text_in_json(tmp_path: Path, client: TestClient) -> None:
    run = MadeRun(tmp_path, "edp-2")
    evil = "<script>alert(1)</script>\x1b[2J\u202e" + "y" * 1_000_000
    run.says("server", "mini1", None, ("ERROR", evil))
    [entry] = get(client, "/api/runs/edp-2/logs?level=ERROR&text=script")["entries"]
    assert entry["message"] == evil[:2000]
    whole = get(client, f"/api/runs/edp-2/line?file={entry['file']}&offset={entry['offset']}")
    assert whole["message"] == evil


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("logs?rank=x", 400),
        ("logs?level=LOUDER-THAN-LOUD", 400),
        ("line?file=server-mini1.log&offset=-1", 400),
        ("line?file=../status.json&offset=0", 404),
        ("line?file=server-mini1.log&offset=3", 404),
        ("chat?max_tokens=9&temperature=1", 400),
        (f"chat?max_tokens=9&temperature=1&prompt={'x' * (MAX_PROMPT_CHARS + 1)}", 400),
        (f"chat?max_tokens={MAX_TOKENS + 1}&temperature=1&prompt=x", 400),
        ("chat?max_tokens=0&temperature=1&prompt=x", 400),
        ("chat?max_tokens=9&temperature=-1&prompt=x", 400),
        ("chat?max_tokens=9&temperature=inf&prompt=x", 400),
    ],
)
def test_values_that_make_no_sense_are_refused_in_a_line(
    client: TestClient, query: str, code: int
) -> None:
    answer = client.get(f"/api/runs/edp-1/{query}")
    assert answer.status_code == code
    assert answer.text.count("\n") == 1


class ToldWhenClosed(Folder):
    """Says the run's id when it is closed."""

    def __init__(self, paths: RunPaths, tell: Callable[[str], None]) -> None:
        super().__init__(paths)
        self._tell = tell

    def close(self) -> None:
        self._tell(self.own.run_id)


def test_a_run_that_is_streamed_is_not_closed_however_many_are_read(tmp_path: Path) -> None:
    closed: list[str] = []

    def close(run_id: str) -> None:
        assert not read._lock.locked(), "who asks for another run need not wait"
        closed.append(run_id)

    read = Views(tmp_path, lambda paths: ToldWhenClosed(paths, close))
    names = [MadeRun(tmp_path, f"edp-{number}").paths.run_id for number in range(MAX_VIEWS + 2)]
    with ExitStack() as stack:
        streamed = {
            name: stack.enter_context(read.streamed(name)) for name in names[: MAX_VIEWS + 1]
        }
        again = stack.enter_context(read.streamed(names[0]))
        assert again is streamed[names[0]]
        assert read.get(names[-1]) is read.get(names[-1])
        assert all(read.get(name) is view for name, view in streamed.items())
        assert not streamed.keys() & set(closed)
    assert len(streamed.keys() & set(closed)) == 1


def test_few_runs_are_read_at_a_time_and_the_others_closed(tmp_path: Path) -> None:
    closed: list[str] = []
    views = Views(tmp_path, lambda paths: ToldWhenClosed(paths, closed.append))
    names = [MadeRun(tmp_path, f"edp-{number}").paths.run_id for number in range(MAX_VIEWS + 1)]
    for name in names:
        views.get(name)
    assert closed == names[:1]
    assert views.get(names[-1]) is views.get(names[-1])
    views.close()
    assert sorted(closed) == names


@pytest.fixture
def views(tmp_path: Path) -> Views:
    return Views(tmp_path)


@pytest.fixture
def app(views: Views) -> FastAPI:
    return make_app(views, write)


@pytest.fixture
def served(tmp_path: Path, app: FastAPI) -> Iterator[str]:
    """A real server for the run edp-2; its address."""
    run = MadeRun(tmp_path, "edp-2")
    run.status("training", None, worker_status(0))
    with run_lock(run.paths.lock), bound("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_the_stream_tells_how_it_stands_and_what_is_logged(served: str, tmp_path: Path) -> None:
    url = f"{served}/api/runs/edp-2/stream"
    with httpx.stream("GET", url, timeout=DEADLINE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = streamed(answer)
        name, state = next(events)
        assert (name, state["state"], state["step"]) == ("state", "training", 120)
        MadeRun(tmp_path, "edp-2").says("worker", "pi5", 0, ("INFO", "here I am"))
        entries = next(value for name, value in events if name == "lines")["entries"]
        assert [entry["message"] for entry in entries] == ["here I am"]


def test_a_stream_ends_when_the_run_has_to_be_opened_anew(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.stream("GET", f"{served}/api/runs/edp-2/stream", timeout=DEADLINE_S) as answer:
        events = streamed(answer)
        assert next(events)[0] == "state"
        monkeypatch.setattr(Folder, "is_outdated", True)
        assert all(name in ("state", "lines") for name, _ in events), "it goes on to its end"


def test_a_run_is_kept_open_as_long_as_its_stream(
    served: str, tmp_path: Path, views: Views
) -> None:
    others = [MadeRun(tmp_path, f"other-{number}").paths.run_id for number in range(MAX_VIEWS + 1)]

    def is_kept() -> bool:
        view = views.get("edp-2")
        for name in others:
            views.get(name)
        return views.get("edp-2") is view

    with httpx.stream("GET", f"{served}/api/runs/edp-2/stream", timeout=DEADLINE_S) as answer:
        events = streamed(answer)
        next(events)
        assert is_kept()
    eventually(lambda: not is_kept())


def test_a_search_ends_when_its_browser_has_gone(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edp-2" / "logs" / "server-mini1.log").write_text("y\n")
    begun, found = threading.Event(), list[Found]()
    search = lines.search

    def search_when_it_has_gone(
        files: dict[str, Path], wanted: Wanted, at_most: int, goes_on: Callable[[], bool]
    ) -> Found:
        begun.set()
        eventually(lambda: not goes_on())
        found.append(search(files, wanted, at_most, goes_on))
        return found[0]

    monkeypatch.setattr(lines, "search", search_when_it_has_gone)
    address = urlsplit(served)
    with socket.create_connection((address.hostname, address.port)) as browser:
        request = f"GET /api/runs/edp-2/logs?text=y HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n"
        browser.sendall(request.encode())
        assert begun.wait(DEADLINE_S)
    eventually(lambda: found)
    assert found == [Found([], is_all=False)]
    monkeypatch.undo()
    answer = httpx.get(f"{served}/api/runs/edp-2/logs?text=y", timeout=DEADLINE_S)
    assert len(answer.json()["entries"]) == 1


def test_more_pages_than_there_may_be_are_refused_and_leave_no_threads(
    served: str, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "EVERY_S", 0.1)
    url = f"{served}/api/runs/edp-2/stream"
    with httpx.Client(timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None)) as client:
        for _ in range(2):
            with ExitStack() as stack:
                answers = [
                    stack.enter_context(client.stream("GET", url)) for _ in range(MAX_STREAMS + 20)
                ]
                codes = Counter(answer.status_code for answer in answers)
            assert codes == {200: MAX_STREAMS, 503: 20}
            eventually(lambda: client.get(f"{served}/api/runs/edp-2/state").status_code == 200)
            eventually(lambda: app.state.streams.borrowed_tokens == 0)
    named = [thread for thread in threading.enumerate() if "AnyIO" in thread.name]
    assert len(named) <= 41


def test_searches_that_wait_hold_up_nobody_and_are_not_without_number(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, searching = threading.Event(), Counter[bool]()

    def search(*_: object) -> Found:
        searching[True] += 1
        assert may.wait(DEADLINE_S)
        return Found([], is_all=True)

    monkeypatch.setattr(lines, "search", search)
    codes: Counter[int] = Counter()

    with httpx.Client(timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None)) as client:

        def ask() -> None:
            codes[client.get(f"{served}/api/runs/edp-2/logs").status_code] += 1

        threads = [threading.Thread(target=ask) for _ in range(MAX_SEARCHES + 10)]
        for thread in threads:
            thread.start()
        eventually(lambda: codes[503] == 10)
        assert searching[True] == 1
        assert client.get(f"{served}/api/runs/edp-2/state").status_code == 200
        may.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert codes == {503: 10, 200: MAX_SEARCHES}


# Writing


def test_a_model_goes_on_from_what_is_sent(client: TestClient) -> None:
    prompt = "<b>x</b> naïve ☃\n" + "☃" * 3900
    wish = {"prompt": prompt, "max_tokens": "9", "temperature": "0.5"}
    answer = client.get("/api/runs/edp-1/chat", params=wish)
    assert answer.status_code == 200
    assert answer.text == f"edp-1 {prompt} 9 0.5"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["checkpoint-step"] == "120"


def test_a_run_that_cannot_write_is_told_in_a_sentence(client: TestClient) -> None:
    answer = client.get(CHAT.replace("prompt=a", "prompt=?"))
    assert answer.status_code == 409
    assert answer.text == "run edp-1 has no good checkpoint\n"
    answer = client.get(CHAT.replace("edp-1", "edp-none"))
    assert answer.status_code == 404


@dataclass
class Slow:
    """A model that says a word whenever it is let, without end."""

    may: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    happened: list[str] = field(default_factory=list)

    def write(self, *_: object) -> tuple[int, Generator[str]]:
        return 1, self._words()

    def goes_on_until(self, happened: list[str]) -> bool:
        """Lets it say one more word: that a browser has gone may be noticed after the next one."""
        self.may.release()
        return self.happened == happened

    def _words(self) -> Generator[str]:
        self.happened.append("began")
        try:
            for number in count():
                assert self.may.acquire(timeout=DEADLINE_S)
                yield f"{number} "
        finally:
            self.happened.append("ended")


@pytest.fixture
def slow(app: FastAPI) -> Slow:
    app.state.write = (slow := Slow()).write
    return slow


SLOW = "/api/runs/edp-2/chat?prompt=a&max_tokens=9&temperature=0.5"


def test_text_comes_as_it_is_written_and_holds_up_nobody(served: str, slow: Slow) -> None:
    slow.may.release()
    with httpx.stream("GET", served + SLOW, timeout=DEADLINE_S) as answer:
        pieces = answer.iter_text()
        assert next(pieces) == "0 "
        slow.may.release()
        assert next(pieces) == "1 "
        assert httpx.get(f"{served}/api/runs", timeout=DEADLINE_S).status_code == 200
    eventually(lambda: slow.goes_on_until(["began", "ended"]))


def test_one_at_a_time_is_written_for_until_its_browser_has_gone(
    served: str, app: FastAPI, slow: Slow
) -> None:
    request = f"GET {SLOW} HTTP/1.1\r\nHost: {urlsplit(served).netloc}\r\n\r\n".encode()
    with connected(served) as second:
        with connected(served) as first:
            first.sendall(request)
            eventually(lambda: slow.happened == ["began"])
            second.sendall(request)
            eventually(lambda: app.state.streams.borrowed_tokens == 2)
        eventually(lambda: slow.goes_on_until(["began", "ended", "began"]))
    eventually(lambda: slow.goes_on_until(["began", "ended"] * 2))
    eventually(lambda: app.state.streams.borrowed_tokens == 0)


def test_a_model_that_fails_later_ends_the_answer_and_the_next_is_heard(
    served: str, app: FastAPI
) -> None:
    def write(*_: object) -> tuple[int, Generator[str]]:
        return 1, failing()

    def failing() -> Generator[str]:
        yield "a"
        raise NonFiniteLoss("the model's logits are NaN")

    app.state.write = write
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(served + SLOW, timeout=DEADLINE_S)


def connected(served: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(served).port or 0), DEADLINE_S)


def test_half_a_request_is_cut(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STALL_S", 0.1)
    with ExitStack() as stack:
        for said in (b"", b"GET /api/runs HTTP/1.1\r\nHost: x", b"GET / HTTP/1.1\r\n"):
            half = stack.enter_context(connected(served))
            half.sendall(said)
            with suppress(ConnectionResetError):
                assert half.recv(1) == b""


def test_many_connections_that_say_nothing_keep_nobody_out(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 5)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(served)) for _ in range(20)]
        assert httpx.get(f"{served}/api/runs", timeout=DEADLINE_S).status_code == 200
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""


def test_a_stream_that_nobody_reads_is_cut(
    served: str, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, state = threading.Event(), View.state

    def note_state(view: View) -> dict[str, Any]:
        begun.set()
        return state(view)

    monkeypatch.setattr(app_module, "EVERY_S", 0.001)
    monkeypatch.setattr(serving, "STALL_S", 0.5)
    monkeypatch.setattr(View, "state", note_state)
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", urlsplit(served).port or 0))
        unread.sendall(b"GET /api/runs/edp-2/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert begun.wait(DEADLINE_S)
        eventually(lambda: not +views._streams)


def streamed(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    """The events of a stream."""
    name = ""
    for line in answer.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_every_kind_of_event_has_a_lane_and_a_colour_on_the_page() -> None:
    lanes, style = ((STATIC / name).read_text() for name in ("timeline.js", "style.css"))
    kinds = [kind_of(model) for model in get_args(Event)]
    assert [kind for kind in kinds if f'"{kind}"' not in lanes] == []
    assert [kind for kind in kinds if f".kind-{kind}" not in style] == []
