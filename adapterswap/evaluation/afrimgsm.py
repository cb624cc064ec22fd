"""AfriMGSM, which lm-evaluation-harness loads and asks itself: the language in a task's name, and which get our score.

AfriMGSM (Adelani et al. 2024, IrokoBench, arXiv 2406.03368; Apache 2.0) is `masakhane/afrimgsm` on the Hub. Knows
nothing of the harness's code or of models.
"""

from __future__ import annotations

import re

__all__ = ["AFRIMGSM", "normalized_language"]

AFRIMGSM = "masakhane/afrimgsm"
"""The data set that the harness's tasks name."""

_NAME = re.compile(r"afrimgsm(?:_cot)?_([a-z]{3})_prompt_\d")
# `extract_answer` knows the words of these; in another language it could take a number for an answer that it is not.
_READ = {"eng": "en", "fra": "fr", "swa": "sw"}


def normalized_language(name: str) -> str | None:
    """The ISO 639-1 code of a task whose answers `extract_answer` reads: afrimgsm_cot_swa_prompt_1 → sw; else None.

    Tasks with translated questions (`afrimgsm_translate_*`) are other data.
    """
    match = _NAME.fullmatch(name)
    return _READ.get(match[1]) if match else None
