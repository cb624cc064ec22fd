"""The studio: a local page to explore, try, evaluate and export compositions.

A thin layer over the public functions: a script can do everything that the page does. `Workspace.open` opens the base
and the experts, `make_page` builds the page, and `serve_page` serves it. Gradio is imported only when a page is built.
"""

from adapterswap.experiments.studio.workspace import Workspace

__all__ = ["Workspace"]
