"""Servers in this process, opened and closed."""

import pytest
from starlette.testclient import TestClient

from serving import OWN, PORT, listening, server_of, small_model


@pytest.fixture
def client_of():
    """Opens clients of servers with given limits and models, and closes them."""
    opened = []

    def make(limits=None, headers=None, **models):
        server = server_of(limits, **(models or {"small": small_model()}))
        client = TestClient(server.app(), f"http://127.0.0.1:{PORT}", headers=OWN if headers is None else headers)
        client.__enter__()
        client.server = server
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def client(client_of):
    return client_of()


@pytest.fixture(scope="module")
def live():
    """A server over a real socket, in a thread of this process."""
    with listening() as server:
        yield server
