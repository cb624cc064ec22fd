"""The studio: a page on which a composition is seen, tried, judged and taken home.

A thin layer over the public functions: what the page can do, a script can. `open_workspace` opens what the page works
on, `make_page` makes the page, and `serve_page` serves it. Imports Gradio only when a page is made.
"""

from adapterswap.studio.workspace import Workspace, open_workspace

__all__ = ["Workspace", "open_workspace"]
