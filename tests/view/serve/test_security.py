"""Who may ask, and who may not: each attack is refused for the reason that is meant for it."""

import pytest

from headwise.view.serve.security import HEADERS, Door
from serving import OWN, PORT, TOKEN, refused


@pytest.fixture
def stranger(client_of):
    """A client that sends nothing by itself."""
    return client_of(headers={})


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}", ""]
)
def test_a_host_that_is_not_ours_is_refused_even_with_the_token(stranger, host):
    assert refused(stranger.get("/api/models", headers={**OWN, "host": host}), 403, "does not name this server")
    assert refused(stranger.get("/", headers={"host": host}), 403, "--allow-host NAME")


@pytest.mark.parametrize("host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"LOCALHOST:{PORT}", f"[::1]:{PORT}"])
def test_the_names_of_this_computer_are_ours(stranger, host):
    assert stranger.get("/api/models", headers={**OWN, "host": host}).status_code == 200


def test_other_names_are_ours_where_they_are_allowed():
    assert "lab.example:80" in Door(80, TOKEN, ("Lab.example",)).hosts
    assert "lab.example" in Door(80, TOKEN, ("Lab.example",)).hosts  # browsers leave out the usual port
    assert "lab.example" not in Door(PORT, TOKEN, ("lab.example",)).hosts


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:3000", "https://127.0.0.1:8765", "null", "http://localhost"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_a_page_of_another_origin_is_refused(stranger, origin, method):
    answer = stranger.request(method, "/api/runs", headers={**OWN, "origin": origin})
    assert refused(answer, 403, "another origin")
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_is_refused_also_where_browsers_send_no_origin(stranger, site):
    assert refused(stranger.get("/api/models", headers={**OWN, "sec-fetch-site": site}), 403, "another site")
    reading = {**OWN, "sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    assert refused(stranger.get("/", headers=reading), 403, "another site")


def test_a_link_opens_the_page_from_anywhere_and_the_page_holds_no_secret(stranger):
    answer = stranger.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"})
    assert answer.status_code == 200
    assert TOKEN not in answer.text
    assert TOKEN not in stranger.get("/static/page.js").text


@pytest.mark.parametrize("path", ["/api/models", "/api/runs/x", "/nowhere", f"/api/models?token={TOKEN}"])
def test_without_the_token_nothing_is_told(stranger, path):
    assert refused(stranger.get(path), 401, "token is missing or from an earlier start")


@pytest.mark.parametrize(
    "headers",
    [
        {"cookie": f"headwise-{PORT}={TOKEN}"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
    ],
    ids=str,
)
def test_a_wrong_token_opens_nothing(stranger, headers):
    assert stranger.get("/api/models", headers=headers).status_code == 401


def test_no_cookie_is_set_and_odd_ones_of_other_programs_do_no_harm(stranger):
    answer = stranger.get("/api/models", headers={**OWN, "cookie": "a;;b=;;=\x7f; headwise-8765=wrong"})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    assert "set-cookie" not in stranger.get("/").headers


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/api/models", "/nowhere"])
def test_every_answer_carries_the_headers(stranger, path):
    answer = stranger.get(path, headers=OWN)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value


def test_the_policy_lets_no_inline_script_run():
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/%2e%2e/runs.py", "/static//etc/passwd",
        "/static/..\\app.py", "/static/page.js%00", "/static/", "/static/PAGE.JS", "/static/.",
    ],
)  # fmt: skip
def test_only_the_files_of_the_page_can_be_asked_for(stranger, path):
    assert stranger.get(path, headers=OWN).status_code == 404


def test_a_method_there_is_not_is_refused_in_words(client):
    assert refused(client.put("/api/runs", json={}), 405, "does not accept this method")
    assert refused(client.get("/nowhere"), 404, "this URL does not exist")


def test_no_socket_but_http_is_opened(client):
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/runs", headers=OWN):
        pass


def test_cookies_of_other_applications_are_ignored(stranger):
    cookie = {"cookie": 'prefs={"a": 1}; token=guessed'}
    assert stranger.get("/api/models", headers={**OWN, **cookie}).status_code == 200
    assert refused(stranger.get("/api/models", headers={**OWN, **cookie, "authorization": ""}), 401, "token")
