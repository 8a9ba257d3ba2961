"""The server process: a listening socket, a clean shutdown, and clear errors if the server cannot start."""

import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwise.errors import OptionError
from headwise.view.serve.app import Server
from headwise.view.serve.models import Models
from headwise.view.serve.requests import Limits
from headwise.view.serve.security import Door

ANY = ("0.0.0.0", "::", "")  # noqa: S104 - listed to be refused without --allow-host
LOCAL = ("127.0.0.1", "::1", "localhost")
SECRET = "HEADWISE_TOKEN"  # noqa: S105 - a name, not a secret
SHORTEST = 16  # characters of a token that a user chooses
MOST_STRANGERS = 64  # connections without the token; beyond that the oldest is closed
HEADER_SECONDS = 5.0  # to send the header of a request


def serve(
    paths: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    names: Sequence[str] = (),
    limits: Limits | None = None,
    open_browser: bool = True,
    seconds: float | None = None,
    as_json: bool = False,
) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        paths: models, as `headwise serve --model` takes them.
        host: the address to listen on.
        port: 0 for any free one.
        names: other host names it may be reached by.
        limits: how much it accepts.
        open_browser: whether to open the page.
        seconds: stop after that time.
        as_json: print the address as one JSON object.
    """
    models = Models(paths)
    if seconds is not None and seconds < 0:
        raise OptionError(f"--for {seconds:g}: expected a non-negative number of seconds.")
    if host in ANY and not names:
        raise OptionError(
            f"--host {host} listens on all addresses of this computer: pass the name it is reached by with "
            f"--allow-host NAME, so that requests for other names are refused. The connection is not encrypted."
        )
    token = _token()
    with listening(host, port) as listener:
        own = names[0] if host in ANY else f"[{host}]" if ":" in host else host
        door = Door(listener.getsockname()[1], token, (own, *names))
        server = Server(models, door, limits)
        process = Process(config_of(server))
        address = f"http://{own}:{door.port}/#token={token}"
        _announce(address, host, as_json)
        with _browser(address, open_browser), _until(seconds, process):
            process.run(sockets=[listener])
    if not as_json:
        print("stopped.", flush=True)
    if not server.ended:  # a layer cannot be interrupted: exit without waiting for it
        sys.stdout.flush()
        os._exit(0)
    return 0


def config_of(server: Server) -> uvicorn.Config:
    """No access log, few connections, no waiting for silent clients, and a quick shutdown."""
    protocol = type("Connection", (Connection,), {"door": server.door, "strangers": {}})
    return uvicorn.Config(
        server.app(),
        http=protocol,
        access_log=False,
        log_level="warning",
        server_header=False,
        lifespan="on",
        limit_concurrency=256,
        timeout_graceful_shutdown=3,
    )


class Connection(H11Protocol):
    """A connection that must be quick and, if there are many, know the token; `config_of` makes a class per server.

    Other programs on this computer can open connections and send nothing. They must not keep the owner out.
    """

    door: Door
    strangers: dict["Connection", None]  # without the token so far, oldest first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin the time for a header; close the oldest stranger if there are too many."""
        super().connection_made(transport)
        self.strangers[self] = None
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)
        if len(self.strangers) > MOST_STRANGERS:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self.strangers.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a header that has begun; note whether a complete one has the token."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
            given = dict(self.headers or ()).get(b"authorization", b"").decode("latin-1")
            if self.door.opens(given):
                self.strangers.pop(self, None)
        elif self._deadline is None and self._is_between_requests():
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._is_between_requests():
            self.transport.abort()


class Process(uvicorn.Server):
    """uvicorn, except that it exits with status 0 on SIGINT and SIGTERM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like that of uvicorn, without raising the signal again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, or an error that says why there is none."""
    if not 0 <= port < 2**16:
        raise OptionError(f"--port {port}: expected 0 (any free port) to 65535.")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OptionError(_why_not(error, host, port)) from error
    # asyncio sends small responses at once only if the socket is known to be TCP; otherwise they wait 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, made.detach()) as listener:
        yield listener


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use by another program, perhaps another headwise serve. Stop it, or pass "
            f"--port {port + 1 if port < 65535 else 8765}, or --port 0 for any free one."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} cannot be used: ports below 1024 require administrator rights. Pass --port 8765."
    return f"--host {host}: cannot listen there ({error.strerror or error}). Pass --host 127.0.0.1, or omit it."


def _token() -> str:
    """HEADWISE_TOKEN if it is set, so that a page survives a restart; otherwise random."""
    given = os.environ.get(SECRET)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < SHORTEST or not given.isascii() or not given.replace("-", "").replace("_", "").isalnum():
        raise OptionError(f"{SECRET}: expected at least {SHORTEST} characters from A-Z a-z 0-9 - and _.")
    return given


def _announce(address: str, host: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"address": address, "process": os.getpid()}), flush=True)
        return
    print(f"headwise is running at\n{address}", flush=True)  # on a line of its own: in 80 columns, both would not fit
    print("Ctrl-C stops it. Texts stay on this computer and are not stored.", flush=True)
    if host not in LOCAL:
        print(f"Other computers can reach {host}, and the connection is not encrypted.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _browser(address: str, wanted: bool) -> Iterator[None]:
    """Open the page through a file that only this user can read: everyone can see the URLs in command lines."""
    has_screen = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not wanted or not has_screen:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={address}">', encoding="utf-8")
        threading.Timer(0.5, webbrowser.open, [page.as_uri()]).start()
        yield


@contextlib.contextmanager
def _until(seconds: float | None, process: uvicorn.Server) -> Iterator[None]:
    """Stop the process after some time."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, setattr, [process, "should_exit", True])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
