"""The process: it says where it is, ends when it is told to, and says what keeps it from starting."""

import contextlib
import os
import signal
import socket

import httpx
import pytest

from headwise.cli import main
from headwise.errors import install_command
from headwise.view.serve import server as server_module
from serving import OWN, TEXT, Process, begun, listening, looked, until


def test_it_says_where_it_is_and_runs_a_text_and_says_nothing_of_it():
    with Process() as server:
        with server.client() as client:
            told = looked(client)
            assert told["outcome"]["loss"] > 0
            assert client.get("/", headers={"host": "evil.example"}).status_code == 403
            page = httpx.get(server.address)
            assert page.status_code == 200
            assert "server" not in page.headers
        status, out, err = server.send(signal.SIGTERM)
    assert (status, out, err) == (0, "", "")


def test_ctrl_c_ends_it_in_the_middle_of_a_run():
    with Process() as server:
        with server.client() as client:
            id = begun(client, "The captain looked at the sea and the sea looked back. " * 300)
            until(client, id, ("running",))
        assert server.send(signal.SIGINT)[0] == 0


def test_a_server_that_was_killed_starts_again_on_the_same_port():
    with Process() as first:
        port = first.port
        assert first.send(signal.SIGKILL)[0] == -signal.SIGKILL
    with Process(port=port) as second, second.client() as client:
        assert looked(client)["error"] is None


def test_every_run_has_a_token_of_its_own_unless_the_user_sets_one(monkeypatch):
    monkeypatch.delenv("HEADWISE_TOKEN", raising=False)
    tokens = {server_module._token() for _ in range(3)}
    assert len(tokens) == 3
    assert {len(token) for token in tokens} == {32}
    monkeypatch.setenv("HEADWISE_TOKEN", "chosen-by-the-user")
    assert server_module._token() == "chosen-by-the-user"


def wrong(arguments, capsys):
    assert main(["serve", "--no-open", "--for", "0", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_busy_port_is_named_with_what_to_do(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = wrong(["--port", str(port)], capsys)
    assert f"headwise serve: port {port} is in use" in said
    assert f"--port {port + 1}, or --port 0" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "--port 70000: expected 0 (any free port) to 65535"),
        (["--port", "-1"], "--port -1: expected 0"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen there"),
        (["--host", "::", "--port", "0"], "pass the name it is reached by with --allow-host NAME"),
        (["--model", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["--max-tokens", "0"], "--max-tokens 0: expected 1 or more"),
        (["--max-bytes", "-5"], "--max-bytes -5: expected 1 or more"),
        (["--for", "-1", "--port", "0"], "--for -1: expected a non-negative number of seconds"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_keeps_it_from_starting_is_said(arguments, words, capsys):
    assert words in wrong(arguments, capsys)


def test_a_port_of_administrators_is_named():
    error = PermissionError(13, "Permission denied")
    assert "port 80 cannot be used" in server_module._why_not(error, "127.0.0.1", 80)


@pytest.mark.parametrize("token", ["short", "with spaces and more", "ümläutümläutümläut"])
def test_a_token_that_can_be_guessed_or_mangled_is_refused(token, monkeypatch, capsys):
    monkeypatch.setenv("HEADWISE_TOKEN", token)
    assert "HEADWISE_TOKEN: expected at least 16 characters" in wrong(["--port", "0"], capsys)


def test_a_missing_extra_is_named_with_its_command(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    assert install_command("serve") in wrong(["--port", "0"], capsys)


def test_the_browser_is_shown_a_file_that_only_the_user_can_read(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("threading.Timer", lambda _, run, given: type("Now", (), {"start": lambda self: run(*given)})())
    with server_module._browser("http://127.0.0.1:1/#token=x", True):
        path = opened[0].removeprefix("file://")
        assert "token=x" not in path
        assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0  # noqa: PTH116, PTH120
        with open(path) as file:  # noqa: PTH123
            assert "url=http://127.0.0.1:1/#token=x" in file.read()
    assert not os.path.exists(path)  # noqa: PTH110


def test_other_addresses_are_announced_as_such(capsys):
    assert main(["serve", "--no-open", "--for", "0", "--port", "0", "--host", "0.0.0.0", "--allow-host", "lab"]) == 0  # noqa: S104
    captured = capsys.readouterr()
    assert "http://lab:" in captured.out
    assert "not encrypted" in captured.err


def test_two_models_of_one_name_are_told_apart(tmp_path):
    from headwise.view.serve.models import Models

    folders = [tmp_path / parent / name for name in ("small", "model") for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    models = Models([*map(str, folders), "builtin", "builtin"])
    assert models.names == ["small", "small (2)", "a/model", "b/model", "builtin"]


def test_a_model_that_cannot_be_opened_is_told_when_it_is_asked_for(client_of, tmp_path):
    client = client_of()
    client.server.runs.models._paths["broken"] = str(tmp_path)
    answer = client.post("/api/runs", json={"text": TEXT, "model": "broken"})
    assert answer.status_code == 422
    assert "weights.safetensors is not in" in answer.json()["error"]


def test_connections_that_say_nothing_are_closed_and_do_not_keep_the_owner_out(monkeypatch):
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.5)
    with listening() as server, contextlib.ExitStack() as silent:
        place = ("127.0.0.1", server.door.port)
        opened = [silent.enter_context(socket.create_connection(place)) for _ in range(300)]
        for connection in opened[::2]:
            connection.sendall(b"GET /api/models HTTP/1.1\r\nHost: ")  # and no more
        with httpx.Client(headers=OWN) as owner:
            answer = owner.get(f"http://127.0.0.1:{place[1]}/api/models")
            assert answer.status_code == 200
            assert all(_is_closed(connection) for connection in opened)
            assert owner.get(f"http://127.0.0.1:{place[1]}/api/models").status_code == 200


def _is_closed(connection):
    connection.settimeout(20)  # it waits until that happens
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_header_that_stops_half_way_after_an_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.3)
    with listening() as server, socket.create_connection(("127.0.0.1", server.door.port)) as connection:
        host = f"127.0.0.1:{server.door.port}".encode()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.sendall(b"GET / HTTP/1.1\r\n")
        connection.settimeout(20)
        while connection.recv(2**16):
            pass  # ends with b"", or raises if the connection stays open
