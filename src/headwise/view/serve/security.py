"""Who may send requests: the server's own page and whoever knows its token; others are refused before a body is read.

Each of the four checks stops an attack that the others do not stop:

    Host      a page of an attacker whose domain resolves to 127.0.0.1 (DNS rebinding) sends its own domain here
    Origin    another page in the same browser, also one on another port of this computer, sends its own origin
    token     other users of this computer and other programs do not know it; the page keeps it in a cookie that scripts
              cannot read and that browsers do not send with requests from other sites
    header    another page cannot set our header without a preflight request, which is not answered

The name of the cookie contains the port, because browsers share cookies between ports.
"""

import dataclasses
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwise.view.serve.requests import Refusal

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OWN = "x-headwise"  # the header that only our own page sends
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
    def cookie(self) -> str:
        """The name of the cookie."""
        return f"headwise-{self.port}"

    @property
    def hosts(self) -> set[str]:
        """The accepted values of the Host header."""
        names = {name.lower() for name in (*LOOPBACK, *self.names)}
        return {f"{name}:{self.port}" for name in names} | (names if self.port == 80 else set())

    def fits(self, token: str | None) -> bool:
        """Whether this is the token, compared in constant time."""
        return token is not None and secrets.compare_digest(token.encode(), self.token.encode())


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
        added = dict(HEADERS)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(added)
            await send(message)

        try:
            if self._admitted(scope, Headers(scope=scope)):
                added["Set-Cookie"] = f"{self.door.cookie}={self.door.token}; Path=/; HttpOnly; SameSite=Strict"
        except Refusal as refusal:
            await refusal.response()(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _admitted(self, scope: Scope, headers: Headers) -> bool:
        """Whether the token came in the URL, so that the browser should keep it; raises if the request is refused."""
        self._check_host(headers)
        in_url = parse_qs(scope["query_string"].decode("latin-1")).get("token", [None])[-1]
        if scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and in_url is not None:
            if not self.door.fits(in_url):
                raise Refusal(401, "this is not the token of this server. Open the address that it printed.")
            return True  # also from a link in another page: the token is enough
        self._check_origin(headers)
        known = self.door.fits(_bearer(headers))
        if not known and not self.door.fits(_cookie(headers, self.door.cookie)):
            raise Refusal(
                401, "the token is missing or from an earlier start. Open the address that headwise serve printed."
            )
        if not known and scope["path"].startswith("/api/") and OWN not in headers:
            raise Refusal(403, f"a request with a cookie must have the header {OWN}, like those of the page itself.")
        return False

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


def _bearer(headers: Headers) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def _cookie(headers: Headers, name: str) -> str | None:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return None
    found: Any = jar.get(name)
    return None if found is None else str(found.value)
