"""A port that another process takes between the search for a free one and the page's start."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from refusals import refused

from adapterswap.experiments.studio.workspace import Workspace
from adapterswap.kit.errors import RunError

pytest.importorskip("gradio")
from adapterswap.experiments.studio import server

# Gradio leaves the socket open with which it has tried a port in vain.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def test_the_next_port_is_used(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    search, taken = server._free_ports, []

    def one_is_taken_late(host: str) -> Iterator[int]:
        for port in search(host):
            if not taken:
                taken.append(socket.create_server((host, port)))
            yield port

    monkeypatch.setattr(server, "_free_ports", one_is_taken_late)
    urls: list[str] = []
    stop = server.serve_page(workspace, on_ready=urls.append, wait=False)
    try:
        assert not urls[0].rstrip("/").endswith(f":{taken[0].getsockname()[1]}")
        assert urllib.request.urlopen(urls[0]).status == 200
    finally:
        stop()
        taken[0].close()


def test_a_port_of_ones_own_that_is_taken_is_refused(workspace: Workspace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, refused(RunError, "port"):
        server.serve_page(workspace, port=taken.getsockname()[1], wait=False)
