"""Write the rows and the test problems of the example to data/, which is in the repository.

    python examples/smollm2/make_data.py

The French rows are pairs of sentences from data/tatoeba_english_french.tsv.gz (Tatoeba, CC BY 2.0 FR), without digits
and with at most one number word, so that they teach no arithmetic. `french_more.jsonl` has pairs with words of the
problems, up to 100 for each word, shorter sentences with more such words first; `french_random.jsonl` has as many,
drawn at random from all.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random

from adapterswap.experiments.lab.word_problems import (
    WordProblem,
    draw_problem,
    draw_problems,
    questions_of,
    templates,
    training_rows,
)

DATA = Path(__file__).parent / "data"
SEEDS = 5
LANGUAGES = ("fr", "en", "es")
MATH_ROWS = 2100  # of each seed, 50 of each template
FURTHER, TRIES = 10, 5000  # further test problems of each template, and how many are drawn to find them
RANDOM_PAIRS = 5680  # 130 thousand tokens
PAIRS_FOR_A_WORD = 100
WORDS = r"""
achèt\w*|achet\w* ensemble\b pos(?:e|er|é|ez)\b donn(?:e|er|é|ez|a)\b vend\w* per(?:d|ds|du|dre|dent)\b
moins chaque\b chacun\w* jours?\b partag\w* enfants?\b met(?:s|tre|tez)?\b paniers?\b boîtes?\b
trouv(?:e|er|é|ez)\b matin\b soir\b ans\b âge\b li(?:t|re|s|sez)\b lu\b pages?\b lundi\b mardi\b personnes\b bus\b
mont(?:e|er|é|ez)\b ramass\w* sœurs?\b pa(?:ie|yer|ye|yé)\b sacs?\b tasses?\b mère\b apport\w*
garçons?\b filles?\b école\b gâteaux?\b mang(?:e|er|é|ez)\b œufs?\b cass\w* train\s+(?!de) descend\w* reste\w* déjà
livres?\b oiseaux?\b arbres?\b envol\w* manteau\w* coût\w* seulement\b manqu\w* jet(?:te|er|é|ez)\b encore\b invit\w*
amis?\b fête\b vien(?:t|nent)\b chemises?\b cour(?:s|t|ir)\b kilomètres?\b voitures?\b places?\b écri(?:t|re|s|ts)\b
lettres?\b gagn\w* heures?\b rangées?\b jardins?\b coup(?:e|er|é|ez)\b cordes?\b mètres?\b morceaux?\b mesur\w*
élèves?\b équipes?\b billets?\b même\snombre reçoi\w*|reçu\w*|recev\w* combien maintenant\b table\b pommes?\b stylos?\b
oranges?\b fleurs?\b photos?\b chapeaux?\b clés?\b jouets?\b bouteilles?\b euros?\b égal\w* quel\sâge plus\s(?:de|que)
moins\s(?:de|que) avoir\b il\sy\sa a-t-(?:il|elle) lui\b
""".split()  # noqa: SIM905
"""Words of the problems' templates, as patterns."""
NUMBER = re.compile(
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|"
    r"seventy|eighty|ninety|hundred|thousand|million|dozen)\b",
    re.IGNORECASE,
)

Pair = tuple[str, str]


def read_pairs() -> list[Pair]:
    """(French, English), each French sentence once."""
    pairs: dict[str, str] = {}
    with gzip.open(DATA / "tatoeba_english_french.tsv.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            english, french = line.rstrip("\n").split("\t")[:2]
            if not re.search(r"\d", line) and len(NUMBER.findall(english)) <= 1:
                pairs.setdefault(french.replace("\u202f", " ").replace("\xa0", " "), english)
    return list(pairs.items())


def with_words(pairs: list[Pair], each: int) -> list[Pair]:
    """Pairs with at least one of `WORDS`, until each word has its number, in random order."""
    patterns = [re.compile(rf"(?<!\w)(?:{word})", re.IGNORECASE) for word in WORDS]
    found = [[place for place, pattern in enumerate(patterns) if pattern.search(french)] for french, _ in pairs]
    density = [len(places) / (4 + len(french.split())) for places, (french, _) in zip(found, pairs, strict=True)]
    candidates = (i for i, (french, _) in enumerate(pairs) if found[i] and 3 <= len(french.split()) <= 12)
    count, taken = [0] * len(WORDS), []
    for i in sorted(candidates, key=lambda i: (-density[i], i)):
        if any(count[place] < each for place in found[i]):
            taken.append(pairs[i])
            for place in found[i]:
                count[place] += 1
    Random(0).shuffle(taken)
    return taken


def write_pairs(name: str, pairs: Iterable[Pair]) -> None:
    write(f"{name}.jsonl", ({"text": f"French: {french}\nEnglish: {english}"} for french, english in pairs))


def write(name: str, rows: Iterable[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (DATA / name).write_text(text, encoding="utf-8")


def further_problems(number: int, exclude: Iterable[str]) -> list[WordProblem]:
    """Problems of every test template whose English questions are not excluded.

    Three templates have only 64 problems, all of which are in rows or in the test. These keep their test problems.
    """
    seen = set(exclude)
    problems: list[WordProblem] = []
    tests = draw_problems("test")
    for template in (template for template in templates() if template.part == "test"):
        rng = Random(f"further {template.name}")
        drawn = (draw_problem(template, rng) for _ in range(TRIES))
        different = {problem.questions["en"]: problem for problem in drawn if problem.questions["en"] not in seen}
        left = list(different.values())[:number]
        problems += left if len(left) == number else [one for one in tests if one.template == template.name]
    return problems


def main() -> None:
    pairs = read_pairs()
    write_pairs("french_more", with_words(pairs, PAIRS_FOR_A_WORD))
    write_pairs("french_random", Random(1).sample(pairs, RANDOM_PAIRS))
    problems = {part: draw_problems(part) for part in ("test", "development")}
    asked = [question for part in problems.values() for question in questions_of(part, "en")]
    known = set(asked)
    for seed in range(SEEDS):
        rows = training_rows(MATH_ROWS, 200 + seed, exclude=asked)
        known |= {row["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:") for row in rows}
        write(f"math-{seed}.jsonl", rows)
    for part, drawn_problems in {**problems, "further": further_problems(FURTHER, known)}.items():
        for language in LANGUAGES:
            write(f"{part}_{language}.jsonl", (problem.as_row(language) for problem in drawn_problems))


if __name__ == "__main__":
    main()
