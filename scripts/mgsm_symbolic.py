"""Write questions of Multilingual GSM-Symbolic (arXiv:2610.03367) in MGSM's form, to choose configurations on.

    pip install multilingual-gsm-symbolic                # Python 3.12 or newer; any environment
    python scripts/mgsm_symbolic.py ~/mgsm-symbolic      # mgsm_bn.tsv … mgsm_zh.tsv: 246 questions each
    export MGSM_SYMBOLIC_PATH=~/mgsm-symbolic            # then the tasks mgsm_symbolic_native_cot_sw, …

The package has 100 templates of questions of GSM8K's test set, in all of MGSM's languages. MGSM is the first 250
questions of that set: templates of these are left out, so that no question of MGSM is seen in another guise. Each
of the others is drawn `--variants` times, with other names and numbers. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from random import Random
from typing import Any

CODES = {
    "bn": "ben", "de": "deu", "en": "eng", "es": "spa", "fr": "fra", "ja": "jpn", "ru": "rus", "sw": "swh", "te": "tel",
    "th": "tha", "zh": "zho",  # codespell:ignore
}  # fmt: skip
MGSM = 250


def rows(templates: list[Any], variants: int, seed: int) -> list[str]:
    """A line for each question: the question, a tab, a whole number."""
    lines = []
    for template in sorted(templates, key=lambda template: template.id_orig):
        if template.id_orig < MGSM:
            continue
        drawn = template.generate_questions(variants, rng=Random(f"{seed} {template.id_orig}"), verbose=False)
        for question in drawn:
            number = re.search(r"####\s*(-?[0-9,]+)\s*$", question.answer)
            if number is None:
                raise SystemExit(f"Template {template.id_orig}: {question.answer!r} does not end with a whole number")
            lines.append(f"{' '.join(question.question.split())}\t{number[1].replace(',', '')}\n")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--languages", default=",".join(CODES))
    parser.add_argument("--variants", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from multilingual_gsm_symbolic import load_data

    options.folder.mkdir(parents=True, exist_ok=True)
    for code in options.languages.split(","):
        lines = rows(load_data(CODES[code]), options.variants, options.seed)
        (options.folder / f"mgsm_{code}.tsv").write_text("".join(lines), encoding="utf-8")
        print(f"{code}: {len(lines)} questions")


if __name__ == "__main__":
    main()
