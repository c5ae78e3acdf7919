"""The page's web application: static files, and what `view` says of runs as JSON and as a stream."""

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from anyio import CancelScope, CapacityLimiter, WouldBlock, from_thread, to_thread
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as AnyHTTPException

from smolcluster.errors import ConfigError, SmolclusterError
from smolcluster.observability.view import lines
from smolcluster.observability.view.listing import listed, run_of
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.files import json_line
from smolcluster.runs.paths import RunPaths

STATIC = Path(__file__).parent / "static"
MAX_VIEWS = 4
"""Runs that are read at the same time, or as many as are streamed; of others what was read is forgotten."""
EVERY_S = 1.0
MAX_LINES = 1000
MAX_STREAMS = 32
MAX_SEARCHES = 32
"""That wait: one at a time searches, so that training keeps its cores."""
MAX_PROMPT_CHARS = 4000
MAX_TOKENS = 1000
Write = Callable[[View, str, int, float], tuple[int, Generator[str]]]
"""Goes on from a text by at most so many tokens, at a temperature: the step of a run's weights, and what they
write, in pieces. Both may raise a SmolclusterError. One at a time calls it and takes its pieces."""


@contextmanager
def _place(limiter: CapacityLimiter, what: str) -> Iterator[None]:
    """Take a place of so many.

    Raises:
        HTTPException: there is none.
    """
    taker = object()
    try:
        limiter.acquire_on_behalf_of_nowait(taker)
    except WouldBlock as error:
        raise HTTPException(503, f"too many {what} at a time", {"Retry-After": "2"}) from error
    try:
        yield
    finally:
        limiter.release_on_behalf_of(taker)


class Views:
    """The runs of a folder that are looked at."""

    def __init__(self, root: Path, opened: Callable[[RunPaths], Folder] = Folder) -> None:
        """`opened` is a run's folder, or its mirror."""
        self.root = root
        self._opened = opened
        self._lock = threading.Lock()
        self._views: OrderedDict[str, View] = OrderedDict()
        self._streams: Counter[View] = Counter()

    def get(self, name: str) -> View:
        """The run of that name, or the newest for `latest`.

        Raises:
            ConfigError: the name cannot be a run's.
            KeyError: there is none.
        """
        with self.streamed(name) as view:
            return view

    @contextmanager
    def streamed(self, name: str) -> Iterator[View]:
        """The same, which is not forgotten meanwhile."""
        paths = run_of(self.root, name)
        if paths is None:
            raise KeyError(name)
        with self._lock:
            view = self._views.pop(paths.run_id, None)
            if view is None or view.folder.is_outdated:
                view = View(self._opened(paths))
            self._views[paths.run_id] = view
            self._streams[view] += 1
        try:
            yield view
        finally:
            with self._lock:
                self._streams[view] -= 1
                surplus = self._surplus()
            _close(surplus)

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            views = list(self._views.values())
            self._views.clear()
        _close(views)

    def _surplus(self) -> list[View]:
        """Takes out those that are too many: the longest unused, but none that is streamed."""
        self._streams = +self._streams
        older = list(self._views)[:-1]
        idle = [run_id for run_id in older if self._views[run_id] not in self._streams]
        num_surplus = max(0, len(self._views) - MAX_VIEWS)
        return [self._views.pop(run_id) for run_id in idle[:num_surplus]]


def _close(views: Iterable[View]) -> None:
    """Takes seconds where copies end: nobody else should wait for it."""
    for view in views:
        view.folder.close()


def make_app(views: Views, write: Write, chosen: str = "latest") -> FastAPI:
    """The application; `chosen` is the run that is shown first. Whoever asks has passed the guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(views.close)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.views, app.state.chosen = views, chosen
    app.state.streams = CapacityLimiter(MAX_STREAMS)
    app.state.searches = CapacityLimiter(MAX_SEARCHES)
    app.state.searching = CapacityLimiter(1)
    app.state.write, app.state.writing = write, asyncio.Lock()
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(AnyHTTPException, _in_one_line)
    app.add_exception_handler(RequestValidationError, _in_one_line)
    return app


router = APIRouter()


def _view_of(request: Request, run: str) -> View:
    views: Views = request.app.state.views
    with _in_words(views, run):
        return views.get(run)


async def _streamed_view(request: Request, run: str) -> AsyncIterator[View]:
    """The same for a stream. FastAPI would end each in a thread of its own if it were not asynchronous."""
    views: Views = request.app.state.views
    with _place(request.app.state.streams, "pages are open"):
        streamed = views.streamed(run)
        with _in_words(views, run):
            view = await run_in_threadpool(streamed.__enter__)
        try:
            yield view
        finally:
            with CancelScope(shield=True):
                await run_in_threadpool(streamed.__exit__, None, None, None)


@contextmanager
def _in_words(views: Views, run: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error
    except KeyError as error:
        raise HTTPException(404, f"there is no run {run[:100]!r} in {views.root}") from error


OneView = Annotated[View, Depends(_view_of)]
StreamedView = Annotated[View, Depends(_streamed_view)]


async def _turn(request: Request) -> AsyncIterator[ExitStack]:
    """Leave to write, for one at a time; what is put on the stack is closed when the answer has ended."""
    async with request.app.state.writing:
        with ExitStack() as until_then:
            yield until_then


@router.get("/")
def _page() -> FileResponse:
    return FileResponse(STATIC / "index.html")


@router.get("/api/runs")
def _runs(request: Request) -> Response:
    views: Views = request.app.state.views
    return _json({"chosen": request.app.state.chosen, "runs": listed(views.root)})


@router.get("/api/runs/{run}/state")
def _state(view: OneView) -> Response:
    return _json(view.state())


@router.get("/api/runs/{run}/series")
def _series(view: OneView) -> Response:
    return _json(view.columns())


@router.get("/api/runs/{run}/events")
def _events(view: OneView) -> Response:
    return _json(view.events())


@router.get("/api/runs/{run}/logs")
async def _logs(
    request: Request,
    view: OneView,
    *,
    node: str | None = None,
    rank: int | None = None,
    level: Annotated[str, Query(max_length=8)] = "",
    text: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    lowest = lines.level_number(level) if level else 0
    wanted = lines.Wanted(node, rank, lowest, text)

    def search() -> lines.Found:
        def goes_on() -> bool:
            return not from_thread.run(request.is_disconnected)

        return lines.search(view.log_files(), wanted, MAX_LINES, goes_on)

    with _place(request.app.state.searches, "searches"):
        found = await to_thread.run_sync(search, limiter=request.app.state.searching)
    return _json({"entries": found.entries, "is_all": found.is_all})


@router.get("/api/runs/{run}/line")
def _line(view: OneView, file: str, offset: Annotated[int, Query(ge=0, lt=1 << 60)]) -> Response:
    path = lines.file_of(view.log_files(), file)
    entry = lines.line_at(path, offset) if path else None
    if entry is None:
        raise HTTPException(404, "there is no such line (any more)")
    return _json(entry)


@router.get("/api/runs/{run}/stream", response_class=EventSourceResponse)
async def _stream(view: StreamedView) -> AsyncIterator[ServerSentEvent]:
    """How the run stands every second, and the log lines that have come; a page asks again at its end."""
    new_lines = await run_in_threadpool(lambda: lines.NewLines(view.log_files()))
    while not await run_in_threadpool(lambda: view.folder.is_outdated):
        yield _event("state", await run_in_threadpool(view.state))
        come = await run_in_threadpool(lambda: new_lines.poll(view.log_files()))
        if come.entries:
            yield _event("lines", {"entries": come.entries, "is_all": come.is_all})
        await asyncio.sleep(EVERY_S)


@router.get("/api/runs/{run}/chat")
async def _chat(
    request: Request,
    view: StreamedView,
    turn: Annotated[ExitStack, Depends(_turn)],
    *,
    prompt: Annotated[str, Query(max_length=MAX_PROMPT_CHARS)],
    max_tokens: Annotated[int, Query(ge=1, le=MAX_TOKENS)],
    temperature: Annotated[float, Query(ge=0, allow_inf_nan=False)],
) -> StreamingResponse:
    """What the run's language model writes behind the prompt, as it comes."""

    def begin() -> tuple[int, Iterator[str]]:
        step, pieces = request.app.state.write(view, prompt, max_tokens, temperature)
        turn.enter_context(closing(pieces))
        return step, chain([next(pieces, "")], pieces)

    try:
        step, pieces = await run_in_threadpool(begin)
    except SmolclusterError as error:
        raise HTTPException(409, str(error)) from error
    headers = {"Checkpoint-Step": str(step)}
    return StreamingResponse(pieces, headers=headers, media_type="text/plain")


def _json(value: dict[str, Any]) -> Response:
    """JSON, in which what is no finite number is null."""
    return Response(json_line(value), media_type="application/json")


def _event(name: str, value: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(event=name, raw_data=json_line(value).decode().rstrip("\n"), retry=1000)


async def _in_one_line(_: Request, error: Exception) -> Response:
    if isinstance(error, AnyHTTPException):
        return PlainTextResponse(f"{error.detail}\n", error.status_code)
    return PlainTextResponse("a value in the address is not what it should be\n", 400)
