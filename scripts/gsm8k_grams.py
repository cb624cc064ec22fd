"""Write gsm8k_test.grams in adapterswap/experiments/training: hashes of GSM8K's test questions, which hide the text.

    python scripts/gsm8k_grams.py test.jsonl

`test.jsonl` is grade_school_math/data/test.jsonl of https://github.com/openai/grade-school-math (MIT).
`adapterswap.experiments.training.hygiene` defines a gram; run this again when the definition changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from adapterswap.experiments.training.hygiene import Grams

TARGET = Path(__file__).parent.parent / "adapterswap" / "experiments" / "training" / "gsm8k_test.grams"

if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    grams = Grams.of(json.loads(line)["question"] for line in lines)
    TARGET.write_bytes(grams.to_bytes())
    print(f"{len(grams)} grams of {len(lines)} questions, {TARGET.stat().st_size} bytes")
