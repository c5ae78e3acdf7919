"""Who may see runs: whoever has the token, at the page's own address.

The page itself, which holds nothing of a run, is for everybody at that address. It takes the token from
behind the `#` of the printed address, which browsers send nobody, and puts it into a header of each request.
No cookie has it: browsers send those to every port of a machine, and so to other people's programs there.
`Host` is checked, so that no other name can be made to mean this machine (DNS rebinding), and `Origin`, so
that no other page can read what is here. Nothing here can be changed by a request.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smolcluster.utils.addresses import means_this_machine

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

UNKNOWN = "this needs the token: open the whole address that `smolcluster dashboard` prints in its terminal\n"


@dataclass(frozen=True)
class Access:
    """What a request must have.

    Attributes:
        token: the secret.
        names: what `Host` may say, without a port.
        takes_addresses: whether it may also be any number: then no name can be made to mean this machine.
    """

    token: str
    names: frozenset[str]
    takes_addresses: bool

    def verdict(
        self, path: str, headers: Mapping[str, str]
    ) -> Literal["welcome", "unknown", "stranger"]:
        """Welcome: has the token, or wants the bare page; stranger: comes from another page or name."""
        if not self._is_own_address(headers):
            return "stranger"
        if path == "/" or path.startswith("/static/"):
            return "welcome"
        given = headers.get("authorization", "").removeprefix("Bearer ")
        is_token = secrets.compare_digest(given.encode(), self.token.encode())
        return "welcome" if is_token else "unknown"

    def _is_own_address(self, headers: Mapping[str, str]) -> bool:
        host = headers.get("host", "")
        if not means_this_machine(host, self.names, takes_addresses=self.takes_addresses):
            return False
        origin = headers.get("origin")
        from_where = headers.get("sec-fetch-site", "none")
        is_shown = headers.get("sec-fetch-mode", "navigate") == "navigate"
        return origin in (None, f"http://{host}") and (
            is_shown or from_where in ("same-origin", "none")
        )


def access_for(host: str, hostname: str, token: str) -> Access:
    """What a request must have where the server listens on `host`; `hostname` is this machine's name."""
    if host in LOOPBACK:
        return Access(token, LOOPBACK, takes_addresses=False)
    own = {host, hostname, f"{hostname.partition('.')[0]}.local"}
    return Access(token, LOOPBACK | {each.lower() for each in own}, takes_addresses=True)


class Guard:
    """Lets requests through to the application, and puts the headers on all answers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, _with_headers(send))

    def _answer(self, scope: Scope) -> ASGIApp:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET is answered here\n", 405)
        match self._access.verdict(scope["path"], headers):
            case "welcome":
                return self._app
            case "unknown":
                return PlainTextResponse(UNKNOWN, 401)
        return PlainTextResponse("the request comes from another page or by another name\n", 403)


def _with_headers(send: Send) -> Send:
    own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in own}
            others = [pair for pair in message.get("headers", []) if pair[0] not in names]
            message = {**message, "headers": [*others, *own]}
        await send(message)

    return sending
