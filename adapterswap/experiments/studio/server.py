"""Serve the page: to this machine only, unless another host is chosen.

Gradio's analytics are off and fonts are the system's. `guards` refuses what does not come from the page itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from adapterswap.core.writing.outputs import torch_threads
from adapterswap.experiments.studio.workspace import Workspace
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, RunError
from adapterswap.kit.files.folders import scratch_folder

_Result = TypeVar("_Result")
_FIRST_PORT = 7860
_QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_CACHE_FREQUENCY": str(10**9),  # otherwise pandas computes event statistics often
    "GRADIO_ANALYTICS_MAX_EVENTS": "1",
}


def serve_page(
    workspace: Workspace,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
    framed_by: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
    wait: bool = True,
) -> Callable[[], None]:
    """Serve the page of a workspace.

    Args:
        port: the port; by default the first free one from 7860.
        framed_by: the address of another site, whose pages may show this page in a frame.
        on_ready: called with the page's address once it can be visited.
        wait: serve until interrupted; otherwise return at once.

    Returns:
        A function that stops serving.
    """
    require("studio")
    if port is not None and not 1 <= port <= 65535:
        raise ArgumentError(f"`port` is {port}", "Pass a number from 1 to 65535", parameter="port")
    with ExitStack() as stack:
        stack.enter_context(torch_threads())  # torch's idle threads spin, and the page would wait for a core
        folder = stack.enter_context(scratch_folder("studio"))
        page, url = _inside_a_loop(lambda: _launch(workspace, host, port, open_browser, folder, framed_by))
        stack.callback(page.close, verbose=False)
        on_ready(url)
        if wait:
            page.block_thread()
            stack.close()
        return stack.pop_all().close


def _launch(
    workspace: Workspace, host: str, port: int | None, open_browser: bool, folder: Path, framed_by: str | None
) -> tuple[Any, str]:
    """The page of a workspace, already served, and its address; Gradio's copies of files are in `folder`."""
    os.environ.update(_QUIET)  # Gradio reads these at import and at launch
    import gradio as gr

    from adapterswap.experiments.studio.guards import guards
    from adapterswap.experiments.studio.page import make_page, page_css

    page = make_page(workspace).queue(default_concurrency_limit=None, max_size=200)
    for block in page.blocks.values():
        block.GRADIO_CACHE = str(folder)
    system = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    theme = gr.themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        radius_size="sm",
        spacing_size="sm",
        font=system,
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
    ).set(
        body_text_color_subdued="*neutral_600",
        block_info_text_color="*neutral_600",
        block_label_text_color="*neutral_700",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
    )

    # Another process may take a free port before the page has begun: then the next one serves.
    ports = _free_ports(host)
    if port is not None:
        ports = iter([port])
    for chosen in ports:
        try:
            _, url, _ = page.launch(
                server_name=host, server_port=chosen, share=False, inbrowser=open_browser, inline=False, quiet=True,
                prevent_thread_lock=True, footer_links=[], theme=theme, css=page_css(), ssr_mode=False, pwa=False,
                mcp_server=False, enable_monitoring=False, run_history=False, allowed_paths=[str(folder)],
                show_error=False, max_threads=64,
                app_kwargs={"middleware": guards(host, framed_by), "routes": page.studio_routes},
            )  # fmt: skip
        except OSError:  # Gradio's message names its own settings
            continue
        return page, url

    if port is None:
        raise RunError(
            f"Ports {_FIRST_PORT} to {_FIRST_PORT + 99} are all taken on {host}",
            "Pass another `port`",
            parameter="port",
        )
    raise RunError(
        f"Cannot serve the page on {host}, port {port}: the port is taken, or the address is not local",
        "Pass another `port` or `host`",
        parameter="port",
    )


def _inside_a_loop(function: Callable[[], _Result]) -> _Result:
    """Call a function while an event loop runs: otherwise Gradio creates several for each page and closes none."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
    else:
        return function()

    async def called() -> _Result:
        return function()

    try:
        return loop.run_until_complete(called())
    finally:
        loop.close()


def _free_ports(host: str) -> Iterator[int]:
    """The ports that are free. Gradio's own search leaves sockets open."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(_FIRST_PORT, _FIRST_PORT + 100):
        with socket.socket(family) as tried:
            try:
                tried.bind((host, port))
            except OSError:
                continue
        yield port
