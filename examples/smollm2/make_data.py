"""Write the rows and the test problems of the example to data/, which is in the repository.

    python examples/smollm2/make_data.py
    python examples/smollm2/make_data.py es spa-eng.zip   # Spanish pairs, from a file of manythings.org/anki
    python examples/smollm2/make_data.py de deu-eng.zip   # German ones

The French rows are pairs of sentences from data/tatoeba_english_french.tsv.gz (Tatoeba, CC BY 2.0 FR), without digits
and with at most one number word, so that they teach no arithmetic. `french_more.jsonl` has pairs with words of the
problems, those of the test included, up to 100 for each word, shorter sentences with more such words first;
`french_random.jsonl` has as many, drawn at random from all.

The rows of the fifth plan know no problem: `drawn_rows` draws pairs at random whose foreign sentence has 4 to 10 words.
With a zip file, the pairs of that language among which it draws are written to data/ too.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from zipfile import ZipFile

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
DRAWN_PAIRS, WORDS_OF_A_SENTENCE = 5600, range(4, 11)  # of each seed of the fifth plan
KEPT_PAIRS = 40_000  # of a language whose zip file is larger
WORDS = {
    "fr": r"""
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
""",
    "es": r"""
compr\w* junt[oa]s\b pon(?:e|er|en)\b|puso\b da(?:r|n)?\b|dio\b vend\w* pierd\w*|perd\w* menos\b cada\b días?\b
repart\w*|compart\w* niñ[oa]s?\b cestas?\b cajas?\b encuentr\w*|encontr\w* mañana\b tarde\b años\b edad\b
le(?:e|er|ído|yó)\b páginas?\b lunes\b martes\b personas\b autobús\b sub(?:e|ir|ió|en)\b recog\w* herman[oa]s?\b pag\w*
bolsas?\b tazas?\b madre\b tra(?:e|er|jo)\b chicos?\b chicas?\b escuela\b pastel\w* com(?:e|er|ió)\b huevos?\b rompi?\w*
tren\b baj(?:a|ar|ó|an)\b qued\w* ya\b libros?\b pájaros?\b árbol\w* vuela\w*|volar\w* abrigos?\b cuesta\w*|costó\b
s[oó]lo\b falta\w* tir(?:a|ar|ó)\b todavía\b|aún\b invit\w* amig[oa]s?\b fiesta\b viene\w*|venir\b camisas?\b
corr(?:e|er|ió)\b kilómetros?\b coches?\b asientos?\b escrib\w* cartas?\b gan(?:a|ar|ó)\b horas?\b filas?\b jard[ií]n\w*
cort(?:a|ar|ó)\b cuerdas?\b metros?\b trozos?\b mide\b|medir\b alumnos?\b equipos?\b billetes?\b|entradas?\b
mismo\snúmero recib\w* cuánt\w* ahora\b mesa\b manzanas?\b bolígrafos?\b naranjas?\b flor(?:es)?\b fotos?\b sombreros?\b
llaves?\b juguetes?\b botellas?\b euros?\b igual\w* qué\sedad más\s(?:de|que) menos\s(?:de|que) tener\b hay\b total\b
""",
    "de": r"""
kauf\w*|gekauft\b zusammen\b leg(?:t|en|te)\b gib(?:t|st)\b|geben\b|gab\b verkauf\w* verlier\w*|verlor\w*
weniger\b jede[nrms]?\b tage?\b teil\w* kind(?:er|ern)?\b korb\b|körbe?\b schachteln?\b|kisten?\b
find(?:et|en)\b|fand\b morgen\b abend\b jahre\b alt\b|alter\b lies(?:t)?\b|lesen\b|gelesen\b seiten?\b montag\b
dienstag\b personen\b|leute\b bus\b steig\w* sammel\w* schwestern?\b|brüder\b bezahl\w*|zahl(?:t|en)\b
taschen?\b|tüten?\b tassen?\b mutter\b bring(?:t|en)\b|brachte\b jungen?\b mädchen\b schule\b kuchen\b
iss(?:t)?\b|essen\b eier?\b zerbr\w* zug\b übrig\b|bleib\w* schon\b buch\b|bücher\b vogel\b|vögel\b baum\b|bäume?\b
flieg\w* mantel\b|mäntel\b kost\w* nur\b fehl\w* wirf\w*|werf\w* noch\b einlad\w*|eingeladen\b freunde?\b
party\b|feier\b komm(?:t|en)\b hemd\w* lauf\w*|läuft\b kilometer\b autos?\b platz\b|plätze?\b schreib\w* briefe?\b
gewinn\w*|verdien\w* stunden?\b reihen?\b garten\b schneid\w* seil\w* meter\b stücke?\b misst\b|messen\b schüler\b
mannschaft\w* karten?\b gleich\w* bekomm\w* wie\sviele?\b jetzt\b tisch\b apfel\b|äpfel\b stifte?\b orangen?\b
blumen?\b fotos?\b hut\b|hüte?\b schlüssel\b spielzeug\w* flaschen?\b euros?\b wie\salt mehr\sals weniger\sals haben\b
gibt\ses insgesamt\b
""",
}
"""Words of the problems' templates, as patterns."""
NAMES = {"fr": "French", "es": "Spanish", "de": "German"}
NUMBER = re.compile(
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|"
    r"seventy|eighty|ninety|hundred|thousand|million|dozen)\b",
    re.IGNORECASE,
)

Pair = tuple[str, str]


def read_pairs(lines: Iterable[str]) -> list[Pair]:
    """(Foreign, English), each foreign sentence once."""
    pairs: dict[str, str] = {}
    for line in lines:
        english, foreign = line.rstrip("\n").split("\t")[:2]
        if not re.search(r"\d", f"{english} {foreign}") and len(NUMBER.findall(english)) <= 1:
            pairs.setdefault(foreign.replace("\u202f", " ").replace("\xa0", " "), english)
    return list(pairs.items())


def with_words(pairs: list[Pair], each: int, language: str) -> list[Pair]:
    """Pairs with at least one of `WORDS`, until each word has its number, in random order."""
    patterns = [re.compile(rf"(?<!\w)(?:{word})", re.IGNORECASE) for word in WORDS[language].split()]
    found = [[place for place, pattern in enumerate(patterns) if pattern.search(foreign)] for foreign, _ in pairs]
    density = [len(places) / (4 + len(foreign.split())) for places, (foreign, _) in zip(found, pairs, strict=True)]
    candidates = (i for i, (foreign, _) in enumerate(pairs) if found[i] and 3 <= len(foreign.split()) <= 12)
    count, taken = [0] * len(patterns), []
    for i in sorted(candidates, key=lambda i: (-density[i], i)):
        if any(count[place] < each for place in found[i]):
            taken.append(pairs[i])
            for place in found[i]:
                count[place] += 1
    Random(0).shuffle(taken)
    return taken


def write_pairs(name: str, pairs: Iterable[Pair], language: str) -> None:
    write(
        f"{name}.jsonl", ({"text": f"{NAMES[language]}: {foreign}\nEnglish: {english}"} for foreign, english in pairs)
    )


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


def pool_of(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs among which the fifth plan draws: foreign sentences of 4 to 10 words, each English sentence once."""
    pool: dict[str, Pair] = {}

    for foreign, english in pairs:
        if len(foreign.split()) in WORDS_OF_A_SENTENCE:
            pool.setdefault(english, (foreign, english))

    return list(pool.values())


@cache
def pool_in_data(language: str) -> list[Pair]:
    """The pairs of a language among which the fifth plan draws, from the file in data/."""
    with gzip.open(DATA / f"tatoeba_english_{NAMES[language].lower()}.tsv.gz", "rt", encoding="utf-8") as lines:
        return pool_of(read_pairs(lines))


def drawn_rows(language: str, seed: int) -> list[dict[str, str]]:
    """The rows of a language expert of the fifth plan. No word of any problem is looked at."""
    drawn = Random(f"{language} {seed}").sample(pool_in_data(language), DRAWN_PAIRS)

    return [{"text": f"{NAMES[language]}: {foreign}\nEnglish: {english}"} for foreign, english in drawn]


def write_others(language: str, file: str) -> None:
    """Write the pairs of another language, from a zip file with sentences of both languages, such as spa.txt."""
    with ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"(?:.*/)?[a-z]{3}\.txt", name))
        pairs = read_pairs(archive.read(name).decode("utf-8").splitlines())

    write_pairs(NAMES[language].lower(), with_words(pairs, PAIRS_FOR_A_WORD, language), language)

    kept = Random(f"kept {language}").sample(pool_of(pairs), KEPT_PAIRS)
    text = "".join(f"{english}\t{foreign}\n" for foreign, english in sorted(kept))

    # The same bytes every time: no date and no name in the file.
    target = DATA / f"tatoeba_english_{NAMES[language].lower()}.tsv.gz"
    target.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


def main(*other: str) -> None:
    if other:
        write_others(*other)
        return
    with gzip.open(DATA / "tatoeba_english_french.tsv.gz", "rt", encoding="utf-8") as lines:
        pairs = read_pairs(lines)
    write_pairs("french_more", with_words(pairs, PAIRS_FOR_A_WORD, "fr"), "fr")
    write_pairs("french_random", Random(1).sample(pairs, RANDOM_PAIRS), "fr")
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
    main(*sys.argv[1:])
