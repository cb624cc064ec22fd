"""The inputs of the golden list, and what to do with them: made once, by the frozen version and its own tests' helpers.

`python inputs.py FOLDER` runs with the frozen checkout and its tests first on PYTHONPATH. It writes the folders that
cells read, and jobs.json: a list of jobs. The steps of a job run one after another in one folder.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Job = dict[str, Any]

ROOT = Path(inspect.getfile(importlib.import_module("adapterswap"))).parents[1]  # the frozen checkout

FACTORY = SimpleNamespace(  # in place of pytest's
    mktemp=lambda name, **_: _new(Path.cwd() / "fixtures" / name),
    getbasetemp=lambda: _new(Path.cwd() / "fixtures" / "shared"),
)
MATRIX_ALSO = ("inspect", "diff", "convert", "export", "verify", "extract")  # on every pair; "full" results are swaps

NUMBERS = ("-1", "0", "1", "3", "6", "99", "0.5", "-0.5", "2.5", "nan", "inf", "1e308", "x", "")
WORDS = ("", "x", "none", "base", "math", "0", "nowhere/else", "a=b", "experts/math", "ties", "0-3", "7-9", "a\tb")
VALUES = (
    "None", "True", "0", "-1", "1", "3", "99", "0.5", "-0.5", "float('nan')", "float('inf')", "''", "'x'", "'base'",
    "'experts/math'", "'0-2'", "[]", "['x']", "{}", "{'math': 1}", "object", "b'x'",
)  # fmt: skip
SIDES = "-t experts/math -l experts/swahili"
COMMANDS = {  # a command that works in the world of the tools; options are added to it
    "compose": f"compose {SIDES} -o new",
    "merge": f"merge {SIDES} --base-model org/base -o new",
    "export": f"export {SIDES} -o new.gguf",
    "inspect": "inspect math-swahili",
    "slice": "slice experts/swahili --layers 0-1 -o new",
    "convert": "convert experts/dora -o new",
    "extract": "extract full/math --base-model org/base -o new",
    "verify": "verify math-swahili",
    "diff": "diff experts/math experts/swahili",
    "analyze": "analyze experts/math swahili=experts/swahili",
    "suggest": f"suggest {SIDES}",
    "train": "train train.yaml --dry-run",
    "report": "report runs/swahili -o new",
    "sweep": "sweep sweep.yaml -o new --dry-run",
    "evaluate": "evaluate --base-model org/base --tasks mgsm_direct_sw --dry-run",
}
SKIPPED = {"push_to_hub", "private", "revision", "commit_message", "quiet", "verbose", "ray", "workers", "figures"}
CALLS = {  # functions that work like this
    "layer_swap": "'experts/math', 'experts/swahili'",
    "soup": "'experts/math', 'experts/swahili'",
    "slerp": "'experts/math', 'experts/swahili'",
    "task_arithmetic": "'experts/math', 'experts/swahili'",
    "ties": "'experts/math', 'experts/swahili', density=0.5",
    "dare": "'experts/math', 'experts/swahili', density=0.5",
    "slice_layers": "'experts/math', '0-2'",
    "compose": "asw.Composition(task='math', language='sw'), {'math': 'experts/math', 'sw': 'experts/swahili'}",
    "open_adapter": "'experts/math'",
    "open_checkpoint": "'full/math'",
    "open_expert": "'experts/math'",
    "read_composition": "'recipe.yaml'",
    "read_mergekit": "'mergekit-config.yml'",
    "inspect": "'experts/math'",
    "verify": "'math-swahili'",
    "diff": "'experts/math', 'experts/swahili'",
    "analyze": "{'math': 'experts/math', 'swahili': 'experts/swahili'}",
    "suggest": "'experts/math', 'experts/swahili'",
    "convert": "'experts/dora', 'new'",
    "extract": "'full/math', 'org/base', 'new'",
    "merge": "asw.soup('experts/math', 'experts/swahili'), out_path='new', base_model='org/base'",
    "export": "asw.soup('experts/math', 'experts/swahili'), out_path='new.gguf'",
    "write_adapter": "asw.soup('experts/math', 'experts/swahili'), 'new'",
    "report": "'runs/swahili', 'new'",
    "train": "'train.yaml', out_path='new'",
    "sweep": "'sweep.yaml', 'new'",
    "evaluate": "'org/base', ['mgsm_direct_sw']",
    "parse_composition": "'math+swahili'",
}
TOOLS = """
compose {sides} --bottom 2 --top 1 -o swap --json
compose {sides} --bottom 1 --top 1 --bottom-transition 1 --task-weight 0.3 --layout portable -o portable --json
compose {sides} --partition B -o partition --json
compose {sides} --weights magnitude --bottom 1 --top 1 --top-transition 2 -o magnitude --json
compose {sides} --method soup --max-rank 4 -o reduced --json
compose {sides} --method soup --max-error 0.2 -o within --json
compose {sides} --method soup --row-threshold 0.01 --max-rank 8 -o rows --json
compose {named} --rule 'swahili: 0-1,7' --rule 'math*0.5 + swahili*0.5: 2' --rule 'mlp of swahili: 3' --rule math -o by
compose {sides} --bottom 2 --top 1 --names transformers4 -o named --dry-run --json
compose recipe.yaml -o by-recipe --json
compose full.yaml -o from-full --json
merge swap --base-model org/base -o merged --json
merge mergekit-config.yml --base-model org/base -o kit --json
merge {sides} --base-model org/base --dtype bfloat16 -o half --json
merge -t full/math -l full/swahili --base-model org/base --norms layer -o both-full --json
merge -t full/math -l experts/swahili --base-model org/base -o mixed --json
inspect swap --json
inspect merged --json
inspect experts/dora --json
inspect full/math --json
inspect swap
verify swap {named} --json
verify swap --json
verify magnitude {named} --json
verify merged --expert swap=swap --json
verify mixed --expert math=full/math --expert swahili=experts/swahili --json
diff experts/math experts/swahili --json
diff swap portable --modules
diff experts/math swap --max-distance 0.1 --json
analyze math=experts/math swahili=experts/swahili --base-model org/base -o analysis --json
analyze math=full/math swahili=experts/swahili --base-model org/base --json
suggest {sides} -o suggested.yaml --json
suggest {named} --per module --json
suggest {sides} --base-model org/base --task-texts gsm8k.jsonl --language-texts swahili.jsonl --json
export {sides} -o out.gguf --json
export swap -o half.gguf --outtype f16 --json
export {sides} -o pieces --pieces --by zone --json
slice experts/swahili --layers 0-1,7 -o shell --json
slice experts/math --layers 2-6 -o core --json
compose -t core -l shell --bottom 2 --top 1 -o cored --json
extract merged --base-model org/base --rank 4 -o extracted --json
extract full/math --base-model org/base --max-error 0.3 --embeddings -o searched --json
convert experts/dora --rank 8 -o plain --json
convert experts/math --layout portable --dtype bfloat16 -o converted --json
convert experts/math --names transformers4 -o renamed --json
methods --json
recipes ls --json
train train.yaml --dry-run --json
train train.yaml -o trained --json
train train.yaml --set training.max_steps=1 --set adapter=none -o trained-full --json
evaluate --base-model org/base --adapter swap --tasks mgsm_direct_sw --limit 4 --max-gen-toks 4 -o eval --json
evaluate --base-model org/base {sides} --tasks mgsm_native_cot_sw --limit 1 --max-gen-toks 4 --json
sweep sweep.yaml -o run --dry-run --json
sweep sweep.yaml -o run --json
report run -o run-report --json
report runs/swahili -o report --json
report runs/swaps runs/ties -o together --layout paper --percent --json
""".format(sides=SIDES, named="--expert math=experts/math --expert swahili=experts/swahili").strip()


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _few(name: str, one_in: int) -> bool:
    """Whether this cell is in a fixed sample."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % one_in == 0


def _step(cell: str, kind: str, text: str, *, sample: bool = True, **more: Any) -> Job:
    return {"cell": cell, "kind": kind, "text": text, "sample": sample, **more}


# (a) The matrix


def matrix(folder: Path) -> Iterator[Job]:
    """A job for every pair of adapters; every cell is in it."""
    from core.matrix.adapters import KINDS
    from core.matrix.architectures import ARCHITECTURES, build
    from core.matrix.expectations import CELLS, SAMPLE

    sample = set(SAMPLE)
    for name, cells in itertools.groupby(CELLS, key=lambda cell: cell.architecture):
        architecture, base = ARCHITECTURES[name], folder / name / "base"
        build(architecture).save_pretrained(base)
        model = architecture.model_class.from_pretrained(base).eval()
        for kind, group in itertools.groupby(cells, key=lambda cell: cell.kind):
            listed = list(group)
            pair = KINDS[kind].make(architecture, model, folder / name / kind)
            sampled = any(cell in sample for cell in listed)
            data = {
                "base": str(base), "class": architecture.model_class.__name__,
                "task": str(pair.task.folder), "language": str(pair.language.folder),
            }  # fmt: skip
            steps = [_step(f"matrix/{cell}", "matrix", cell.operation, sample=cell in sample) for cell in listed]
            steps += [_step(f"matrix/{name}-{kind}-{also}", "matrix", also, sample=sampled) for also in MATRIX_ALSO]
            yield {"group": f"matrix/{name}-{kind}", "world": None, "pair": data, "fresh": True, "steps": steps}


# (b) The pages


def pages(folder: Path) -> Iterator[Job]:
    """A job for every page, in a copy of its folder."""
    import test_public_face
    from pages import test_pages
    from pages.blocks import changed, steps_of
    from pages.worlds import SETUPS, make_world

    lab = _unwrapped("conftest", "small_lab_run")(FACTORY)
    plain = {layers: make_world(_new(folder / f"plain-{layers}"), layers) for layers in (6, 32)}
    for page in test_pages.pages():
        here = folder / page.replace("/", "-") / "here"
        _new(here.parent)
        shutil.copytree(plain[6 if page in test_pages.SIX_LAYERS else 32], here, symlinks=True)
        if page in test_pages.LAB:
            shutil.copytree(lab, here / "lab-run")
        (here / "examples").unlink()  # a link to the checkout
        shutil.copytree(ROOT / "examples", here / "examples")
        _set_up(SETUPS.get(page, lambda: None), here)
        steps = []
        for step in steps_of(page):
            if test_pages.excuse(step) is not None:
                continue
            step = changed(step, test_pages.CHANGED)[0]
            cell, kind = f"pages/{page}:{step.line}", step.language
            if kind == "yaml":
                places = test_pages.FILES.items()
                name, command = next(to for (of, start), to in places if of == page and step.text.startswith(start))
                steps.append(_step(f"{cell}-yaml", "file", step.text, name=name))
                steps += [_step(cell, "shell", command)] if command else []
            else:
                steps.append(_step(cell, "python" if kind == "python" else "shell", step.text))
        yield {"group": f"pages/{page}", "world": str(here.parent), "page": page, "steps": steps}
    yield from examples(lab, folder)
    world = _unwrapped("test_public_face", "world")(FACTORY)
    here = shutil.copytree(world, _new(folder / "python") / "here")
    text = test_public_face.page_as_script(str(world / "base"))
    yield {"group": "pages/docs/python.md", "world": str(here.parent), "steps": [_step("pages/python", "python", text)]}


def examples(lab: Path, folder: Path) -> Iterator[Job]:
    """The notebooks, and the commands of an example's page; without what reaches into the package."""
    for name in ("compose", "live"):
        here = _new(folder / name) / "here"
        shutil.copytree(lab, here / "lab-run")
        cells = json.loads((ROOT / f"examples/notebooks/{name}.ipynb").read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        sources = [re.sub(r"^if not Path.*\n +!.*\n", "", source, flags=re.MULTILINE) for source in sources]
        steps = [_step(f"pages/examples/{name}:{number}", "python", text) for number, text in enumerate(sources)]
        yield {"group": f"pages/examples/{name}", "world": str(here.parent), "steps": steps}
    from pages.blocks import steps_of

    page = "examples/which_layers/README.md"
    here = _new(folder / "which_layers") / "here"
    shutil.copytree(lab, here / "lab-run")
    shutil.copytree(ROOT / "examples" / "which_layers", here / "examples" / "which_layers")
    lines = [step for step in steps_of(page) if step.text.split()[1] in ("analyze", "suggest", "compose")]
    steps = [_step(f"pages/{page}:{step.line}", "shell", step.text) for step in lines]
    yield {"group": f"pages/{page}", "world": str(here.parent), "steps": steps}


def _unwrapped(module: str, fixture: str) -> Any:
    return getattr(__import__(module), fixture)._get_wrapped_function()


def _set_up(setup: Any, here: Path) -> None:
    """Run a page's setup in its folder, with a Hub cache next to it."""
    import huggingface_hub

    before, hub = Path.cwd(), huggingface_hub.constants
    previous, hub.HF_HUB_CACHE = hub.HF_HUB_CACHE, str(here.parent / "hub")
    os.chdir(here)
    try:
        setup()
    finally:
        os.chdir(before)
        hub.HF_HUB_CACHE = previous


# (c) The recipes


def recipes(folder: Path) -> Iterator[Job]:
    """Every shipped recipe, validated and printed; compositions are also composed, from adapters of the same names."""
    from pages.worlds import make_world

    here = make_world(_new(folder / "here"), 32)
    (here / "examples").unlink()
    texts = [path.read_text() for path in (ROOT / "recipes").rglob("*.yaml")]
    for name in sorted({one for text in texts for one in re.findall(r"experts/[\w.-]+/[\w.-]+", text)}):
        shutil.copytree(here / "experts" / ("math" if "math" in name else "swahili"), here / name)
    tree = ROOT / "recipes"
    names = sorted(path.relative_to(tree).with_suffix("").as_posix() for path in tree.rglob("*.yaml"))
    steps = []
    for name in names:
        steps += [_step(f"recipes/{name}-{verb}", "shell", f"adapterswap recipes {verb} {name}{flag}")
                  for verb, flag in (("validate", " --json"), ("cat", ""))]  # fmt: skip
        if name.startswith("compose/"):
            steps.append(_step(f"recipes/{name}-dry", "shell", f"adapterswap compose {name} -o dry --dry-run --json"))
            steps.append(_step(f"recipes/{name}", "shell", f"adapterswap compose {name} -o {name} --json"))
        if name.startswith("sweep/"):
            steps.append(_step(f"recipes/{name}", "shell", f"adapterswap sweep {name} -o dry --dry-run --json"))
    yield {"group": "recipes", "world": str(folder), "steps": steps}


# (d) Refusals, and (e) the tools


def tools(folder: Path) -> Iterator[Job]:
    """The world of the tools: everything that the pages' setups make for eight layers, in one folder."""
    from pages import worlds

    here = worlds.make_world(_new(folder / "here"), 8)
    (here / "examples").unlink()

    def make() -> None:
        for setup in (worlds.merge_page, worlds.texts_page, worlds.report_page):
            setup()
        math = shutil.copytree("experts/math", "kept")
        worlds.train_page()  # which removes the expert
        shutil.move(math, "experts/math")
        shutil.move("recipe.yaml", "train.yaml")
        rules = "rules: [swahili: 0-4, math]"
        Path("recipe.yaml").write_text(f"experts: {{math: experts/math, swahili: experts/swahili}}\n{rules}\n")
        worlds.save_expert(worlds.open_base(), Path("experts/dora"), seed=9, use_dora=True, target_modules=["q_proj"])
        Path("full.yaml").write_text(json.dumps({
            "experts": {"math": "full/math", "swahili": "full/swahili"}, "base_model": "org/base",
            "allocation": [{"layers": "0,5", "expert": "swahili"}, {"blend": {"math": 1, "swahili": 2}}],
        }))  # fmt: skip
        Path("sweep.yaml").write_text(json.dumps({
            "base_model": "org/base", "task_experts": {"math": "experts/math"},
            "language_experts": {"swahili": "experts/swahili"}, "tasks": ["mgsm_direct_sw"],
            "compositions": [{"bottom": [1, 2], "top": 1}, {"method": "ties", "density": 0.5, "max_rank": 4}],
            "settings": {"limit": 2, "num_fewshot": 1, "max_gen_toks": 4, "batch_size": 2},
        }))  # fmt: skip

    _set_up(make, here)
    lines = TOOLS.splitlines() + [line for name in _methods() for line in _by_method(*name)]
    steps = [_step(f"tools/{number:03} {line}", "shell", f"adapterswap {line}") for number, line in enumerate(lines)]
    yield {"group": "tools", "world": str(here.parent), "steps": steps}
    yield from _options(str(here.parent))
    yield from _arguments(str(here.parent))


def _methods() -> list[tuple[str, list[str]]]:
    from click.testing import CliRunner

    from adapterswap.cli import main

    listed = json.loads(CliRunner().invoke(main, ["methods", "--json"]).stdout)
    return [(name, method["parameters"]) for name, method in listed.items() if method["as_composition"]]


def _by_method(name: str, parameters: list[str]) -> Iterator[str]:
    density = " --density 0.5" if "density" in parameters else ""
    yield f"compose {SIDES} --method {name}{density} --max-rank 6 -o adapter-{name} --json"
    yield f"merge {SIDES} --base-model org/base --method {name}{density} -o merged-{name} --json"


def _options(world: str) -> Iterator[Job]:
    """Every option of every command with good and bad values."""
    import click

    from adapterswap.cli import main

    for name, line in COMMANDS.items():
        command = main.get_command(click.Context(main), name)
        steps = []
        for parameter in command.params:
            if parameter.name in SKIPPED or not isinstance(parameter, click.Option):
                continue
            if name in ("evaluate", "export", "merge") and parameter.name not in ("bottom", "method", "rule", "scale"):
                shared = {other.name for other in main.get_command(click.Context(main), "compose").params}
                if parameter.name in shared - {"out_path", "base_model", "overwrite", "max_rank"}:
                    continue  # compose has it
            numeric = isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType)
            values = ("",) if parameter.is_flag else tuple(getattr(parameter.type, "choices", ())) + (
                NUMBERS if numeric else WORDS
            )  # fmt: skip
            for value in values:
                words = [parameter.opts[-1]] if parameter.is_flag else [parameter.opts[-1], value]
                cell = f"refusals/{line} {' '.join(map(repr, words))}"
                sample = name == "compose" or (_few(cell, 6) and name not in ("evaluate", "train", "sweep"))
                steps.append(_step(cell, "command", "", words=[*line.split(), *words], sample=sample))
        for missing in range(1, len(line.split())):  # each word left out
            words = line.split()
            del words[missing]
            cell = f"refusals/{' '.join(words)}"
            steps.append(_step(cell, "command", "", words=words, sample=name not in ("evaluate", "train", "sweep")))
        yield {"group": f"refusals/options-{name}", "world": world, "fresh": True, "steps": steps}


def _arguments(world: str) -> Iterator[Job]:
    """Every parameter of every public function, and every field of the public models, with good and bad values."""
    import adapterswap

    for name in adapterswap.__all__:
        function = getattr(adapterswap, name)
        fields = getattr(function, "model_fields", None) or {}
        if name not in CALLS and not fields:
            continue
        call = CALLS.get(name, "")
        heavy = name in ("train", "sweep", "evaluate")  # only what is refused before anything runs
        names = [*fields] if fields else [
            one.name for one in inspect.signature(function).parameters.values()
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]  # fmt: skip
        steps = []
        for position, parameter in enumerate(names):
            for value in VALUES:
                if heavy and (position > 1 or value in ("'base'", "'experts/math'")):
                    continue
                if (parameter, value) == ("seed", "None"):  # draws anew each time
                    continue
                text = f"asw.{name}({_with(call, position, parameter, value)})"
                cell = f"refusals/{text}"
                steps.append(_step(cell, "python", text, sample=_few(cell, 6) and not heavy))
        steps.append(_step(f"refusals/asw.{name}()", "python", f"asw.{name}()"))
        yield {"group": f"refusals/arguments-{name}", "world": world, "fresh": True, "steps": steps}


def _with(call: str, position: int, parameter: str, value: str) -> str:
    """The call's text with another value for one parameter, which may be among its arguments already."""
    import ast

    tree = ast.parse(f"f({call})", mode="eval").body
    assert isinstance(tree, ast.Call)
    given = [ast.unparse(argument) for argument in tree.args]
    keywords = {str(one.arg): ast.unparse(one.value) for one in tree.keywords}
    if position < len(given):
        given[position] = value
    else:
        keywords[parameter] = value
    return ", ".join([*given, *(f"{key}={text}" for key, text in keywords.items())])


def damage(folder: Path, count: int = 400) -> Iterator[Job]:
    """Adapters, configs, records, bases and recipes, each damaged in one place at random and used by some commands."""
    import yaml
    from crafting import BASE_CONFIG
    from mutations import Subject, mutate_bytes, mutate_json

    steps = []
    subject = Subject(_new(folder / "whole"))
    whole = {"config": subject.config, "record": subject.record, "base": BASE_CONFIG}
    places = {"weights": "math/adapter_model.safetensors", "config": "math/adapter_config.json",
              "record": "math/adapterswap.json", "base": "base/config.json", "recipe": "recipe.yaml",
              "zones": "recipe.yaml"}  # fmt: skip
    sides = "-t math -l swahili -o new"
    uses = {
        "weights": ["inspect math --json", f"compose {sides} --num-layers 4 --method soup", "diff math swahili"],
        "config": ["inspect math --json", f"compose {sides} --num-layers 4 --bottom 1 --top 1",
                   "convert math -o new --layout portable", "slice math --layers 0-1 -o new --num-layers 4"],
        "record": ["inspect math --json", "verify math --expert math=swahili --expert swahili=swahili",
                   f"compose {sides} --num-layers 4 --partition A"],
        "base": [f"compose {sides} --bottom 1 --top 1", f"export {sides[:-3]}new.gguf", f"merge {sides}"],
        "recipe": ["compose recipe.yaml -o new", "recipes validate recipe.yaml", "merge recipe.yaml -o new"],
        "zones": ["compose recipe.yaml -o new", "recipes validate recipe.yaml"],
    }  # fmt: skip
    for number in range(count):
        chance = random.Random(number)
        kind = chance.choice([*places])
        here = _new(folder / f"{number:03}")
        for name in ("math", "swahili", "base"):
            shutil.copytree(folder / "whole" / name, here / name)
        path = here / places[kind]
        if kind == "weights":
            header = mutate_json(chance, subject.header)
            raw = path.read_bytes()
            text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
            raw = len(text).to_bytes(8, "little") + text + subject.data if number % 2 else mutate_bytes(chance, raw)
        elif kind in ("recipe", "zones"):
            content = {**getattr(subject, kind), "experts": {"math": "math", "swahili": "swahili"}}
            raw = yaml.safe_dump(_dumpable(mutate_json(chance, content))).encode("utf-8", "surrogatepass")
        else:
            text = json.dumps(mutate_json(chance, whole[kind]), ensure_ascii=False)
            raw = text.encode("utf-8", "surrogatepass")
            raw = mutate_bytes(chance, raw) if number % 4 == 0 else raw
        path.write_bytes(raw)
        for use in uses[kind]:
            words = [str(here / word) if (here / word).exists() else word for word in use.split()]
            words = [re.sub(r"=(\w+)$", rf"={here}/\1", word) for word in words]
            cell = f"refusals/damage-{number:03}-{kind} {use}"
            steps.append(_step(cell, "command", "", words=words, sample=number < 120))
    for start in range(0, len(steps), 100):
        group = f"refusals/damage-{start // 100}"
        yield {"group": group, "world": None, "fresh": True, "steps": steps[start : start + 100]}


def _dumpable(content: Any) -> Any:
    return json.loads(json.dumps(content, default=str))


def main(folder: Path) -> None:
    """Make everything; jobs.json is written last."""
    os.chdir(_new(folder))
    warnings.simplefilter("ignore")
    made: list[Job] = []
    for section in (pages, tools, damage, recipes, matrix):
        made += section(folder / section.__name__)
        print(f"{section.__name__}: {sum(len(job['steps']) for job in made)} cells so far", flush=True)
    (folder / "jobs.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
