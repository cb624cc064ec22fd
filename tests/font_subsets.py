"""Parts of fonts that figures embed, kept: many tests draw the same figures.

matplotlib has fontTools read the whole font for every PDF, which is a third of the time of a report.
"""

from __future__ import annotations

import io
import sys
from contextlib import AbstractContextManager
from typing import Any

KEPT: dict[Any, tuple[bytes, Any]] = {}
"""The parts as files, with the new numbers of their glyphs, by font and glyphs; a test may clear it."""


def keep() -> None:
    """Have matplotlib use parts that were cut out before, if this process has drawn a PDF."""
    module: Any = sys.modules.get("matplotlib.backends._backend_pdf_ps")
    if module is None or hasattr(module.get_glyphs_subset, "cut"):
        return
    from fontTools.ttLib import TTFont

    cut = module.get_glyphs_subset

    def kept(fontfile: Any, glyphs: Any) -> AbstractContextManager[Any]:
        key = str(fontfile), fontfile.face_index, frozenset(glyphs)
        if key not in KEPT:
            with cut(fontfile, set(glyphs)) as part:
                KEPT[key] = module.font_as_file(part.font).getvalue(), part.glyph_index_map
        content, numbers = KEPT[key]
        font = TTFont(io.BytesIO(content), recalcBBoxes=False, recalcTimestamp=False)
        return module.SubsetResults(font, numbers)._as_cm()

    kept.cut = cut
    module.get_glyphs_subset = kept
