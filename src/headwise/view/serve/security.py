"""Who may send requests: the server's own page and whoever knows its token; others are refused before a body is read.

Each check stops an attack that the others do not stop:

    Host      a page of an attacker whose domain resolves to 127.0.0.1 (DNS rebinding) sends its own domain here
    Origin    another page in the same browser, also one on another port of this computer, sends its own origin
    token     other users of this computer and other programs do not know it

The token is in the fragment of the printed address, which browsers never send. The page keeps it for its tab and
sends it in a header, which another page could not set without a preflight request, and those are not answered. There is
no cookie: browsers send the cookies of one port of 127.0.0.1 to all others. The page itself holds nothing secret, so
its files need no token.
"""

import dataclasses
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwise.view.serve.requests import Refusal

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text can never become a script, even if we make a mistake
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


@dataclasses.dataclass(frozen=True)
class Door:
    """The address of a server, and the token that opens it.

    Args:
        port: the port it listens on.
        token: the secret.
        names: host names it may be reached by, besides those of this computer.
    """

    port: int
    token: str
    names: tuple[str, ...] = ()

    @property
    def hosts(self) -> set[str]:
        """The accepted values of the Host header."""
        names = {name.lower() for name in (*LOOPBACK, *self.names)}
        return {f"{name}:{self.port}" for name in names} | (names if self.port == 80 else set())

    def opens(self, authorization: str) -> bool:
        """Whether this value of the Authorization header holds the token; compared in constant time."""
        kind, _, token = authorization.partition(" ")
        return kind.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), self.token.encode())


class Guard:
    """Admits or refuses requests, and adds the same headers to every response."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except Refusal as refusal:
            await refusal.response()(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise unless the request may be answered. A link from anywhere may open the page."""
        self._check_host(headers)
        if path == "/" and headers.get("sec-fetch-mode", "navigate") == "navigate":
            return
        self._check_origin(headers)
        if path != "/" and not path.startswith("/static/") and not self.door.opens(headers.get("authorization", "")):
            raise Refusal(
                401, "the token is missing or from an earlier start. Open the address that headwise serve printed."
            )

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        if len(given) != 1 or given[0].lower() not in self.door.hosts:
            raise Refusal(
                403,
                f"the Host header does not name this server; expected {', '.join(sorted(self.door.hosts))}. To use "
                f"another name, start the server with --allow-host NAME.",
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.door.hosts}:
            raise Refusal(
                403, "the request comes from a page of another origin; only this server's own page is allowed."
            )
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refusal(403, "the request comes from a page of another site; only this server's own page is allowed.")
