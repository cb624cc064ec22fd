"""Twenty names with their zones (task, language, b, u, t_b, t_u), and the prompts sent to them."""

from __future__ import annotations

DEFAULT_BOTTOM, DEFAULT_TOP = 1, 0  # the paper's 5 and 2 of 32 layers, in proportion for 6

COMPOSITIONS = {
    "math": ("math", "math", 0, 0),
    "swahili": ("swahili", "swahili", 0, 0),
    "telugu": ("telugu", "telugu", 0, 0),
    "code": ("code", "code", 0, 0),
    "math+swahili": ("math", "swahili", DEFAULT_BOTTOM, DEFAULT_TOP),
    "math+telugu": ("math", "telugu", DEFAULT_BOTTOM, DEFAULT_TOP),
    "code+swahili": ("code", "swahili", DEFAULT_BOTTOM, DEFAULT_TOP),
    "swahili+math": ("swahili", "math", DEFAULT_BOTTOM, DEFAULT_TOP),
    "telugu+code": ("telugu", "code", DEFAULT_BOTTOM, DEFAULT_TOP),
    "math+base": ("math", "base", DEFAULT_BOTTOM, DEFAULT_TOP),
    "math+swahili@bottom=2,top=1": ("math", "swahili", 2, 1),
    "math+swahili@bottom=0,top=2": ("math", "swahili", 0, 2),
    "math+telugu@bottom=2,top=2": ("math", "telugu", 2, 2),
    "code+telugu@bottom=2,top=1": ("code", "telugu", 2, 1),
    "swahili+telugu@bottom=3,top=0": ("swahili", "telugu", 3, 0),
    "math+swahili@bottom=1,top=1,bottom_transition=1": ("math", "swahili", 1, 1, 1, 0),
    "math+swahili@bottom=1,top=1,top_transition=2": ("math", "swahili", 1, 1, 0, 2),
    "math+telugu@bottom=1,top=1,bottom_transition=2,top_transition=1": ("math", "telugu", 1, 1, 2, 1),
    "swahili+math@bottom=2,top=1,bottom_transition=1,top_transition=1": ("swahili", "math", 2, 1, 1, 1),
    "math+swahili@method=soup": ("math", "swahili", 0, 0, 6, 0),
}

PROMPTS = [[5, 9, 14], [40, 41, 42, 43, 44, 45], [80, 3, 77, 13], [62], [33, 20, 90, 8, 8]]
LENGTH = 8
