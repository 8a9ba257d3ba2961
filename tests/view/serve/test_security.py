"""Who may ask, and who may not: each attack is refused for the reason that is meant for it."""

import pytest

from headwise.view.serve.security import HEADERS, Door
from serving import OWN, PORT, TOKEN, refused

COOKIE = {"cookie": f"headwise-{PORT}={TOKEN}"}
PAGE = {"x-headwise": "1", **COOKIE}


@pytest.fixture
def stranger(client_of):
    """A client that sends nothing by itself."""
    return client_of(headers={})


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}", ""]
)
def test_a_host_that_is_not_ours_is_refused_even_with_the_token(stranger, host):
    assert refused(stranger.get("/api/models", headers={**OWN, "host": host}), 403, "does not name this server")
    assert refused(stranger.get(f"/?token={TOKEN}", headers={"host": host}), 403, "--allow-host NAME")


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
    answer = stranger.request(method, "/api/runs", headers={**PAGE, "origin": origin})
    assert refused(answer, 403, "another origin")
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_is_refused_also_where_browsers_send_no_origin(stranger, site):
    assert refused(stranger.get("/api/models", headers={**PAGE, "sec-fetch-site": site}), 403, "another site")
    assert refused(stranger.get("/", headers={**COOKIE, "sec-fetch-site": site}), 403, "another site")


def test_a_link_with_the_token_opens_the_page_from_anywhere(stranger):
    answer = stranger.get(f"/?token={TOKEN}", headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/api/models", "/api/runs/x", "/nowhere"])
def test_without_the_token_nothing_is_told(stranger, path):
    assert refused(stranger.get(path, headers={"x-headwise": "1"}), 401, "token is missing or from an earlier start")


@pytest.mark.parametrize(
    "headers",
    [
        {"cookie": f"headwise-{PORT}=wrong", "x-headwise": "1"},
        {"cookie": f"headwise-{PORT + 1}={TOKEN}", "x-headwise": "1"},
        {"cookie": "a;;b=;;=\x7f", "x-headwise": "1"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
    ],
    ids=str,
)
def test_a_wrong_token_opens_nothing(stranger, headers):
    assert stranger.get("/api/models", headers=headers).status_code == 401
    assert refused(stranger.get("/?token=wrong"), 401, "not the token of this server")


def test_a_token_in_the_address_opens_the_page_alone(stranger):
    assert stranger.get(f"/api/models?token={TOKEN}").status_code == 401
    assert stranger.post(f"/?token={TOKEN}").status_code == 401


def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites(stranger):
    cookie = stranger.get(f"/?token={TOKEN}").headers["set-cookie"]
    assert cookie == f"headwise-{PORT}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert "set-cookie" not in stranger.get("/api/models", headers=OWN).headers


def test_a_cookie_alone_is_not_enough_for_a_question(stranger):
    assert refused(stranger.get("/api/models", headers=COOKIE), 403, "must have the header x-headwise")
    assert stranger.get("/api/models", headers=PAGE).status_code == 200
    assert stranger.get("/", headers=COOKIE).status_code == 200  # a reload


@pytest.mark.parametrize("path", [f"/?token={TOKEN}", "/static/page.js", "/api/models", "/nowhere", "/?token=wrong"])
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
