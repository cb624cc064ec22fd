"""Composing starts fast: it imports what it needs. Requests are read with all that they may hold, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from adapterswap import Composition, Rule
from adapterswap.kit.errors import FieldError

UNUSED = {
    "pydantic", "pydantic_core", "annotated_types", "ruamel", "jinja2", "huggingface_hub.hf_api", "httpx", "requests",
    "torch", "transformers", "peft", "argparse", "yaml", "lm_eval", "PIL", "matplotlib", "scipy",
}  # fmt: skip


def imported(code: str, *arguments: object) -> set[str]:
    """The modules that a process has imported after it ran the code."""
    lines = f"import sys\n{code}\nprint('IMPORTED', *sys.modules)"
    command = [sys.executable, "-c", lines, *map(str, arguments)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(result.stdout.partition("IMPORTED")[2].split())


def named(folder: Path, base: str, copy: Path) -> Path:
    """A copy of an adapter that names another base."""
    copy.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    (copy / "adapter_config.json").write_text(json.dumps(config))
    (copy / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    return copy


@pytest.mark.parametrize("where", ["local", "hub"])
def test_composing_without_a_recipe_imports_only_what_it_needs(
    where: str, math: Path, swahili: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "num_hidden_layers": 6, **sizes}
    if where == "hub":
        cache = tmp_path / "cache" / "models--org--base"
        place = cache / "snapshots" / ("0" * 40)
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0" * 40)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    else:
        place = tmp_path / "base"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    name = "org/base" if where == "hub" else str(place)
    experts = [named(folder, name, tmp_path / folder.name) for folder in (math, swahili)]
    by_python = (
        "import adapterswap\n"
        "plan = adapterswap.compose('math+swahili@top=1', {'math': sys.argv[1], 'swahili': sys.argv[2]})\n"
        "plan.write(sys.argv[3])"
    )
    by_command = (
        "from adapterswap.cli import main\n"
        "main(['compose', '-t', sys.argv[1], '-l', sys.argv[2], '-o', sys.argv[3]], standalone_mode=False)"
    )
    for place_of, code in (("a", by_python), ("b", by_command)):
        out = tmp_path / place_of
        assert imported(code, *experts, out) & UNUSED == set()
        assert (out / "README.md").exists()


def test_a_missing_base_is_found_before_transformers_is_imported(math: Path, tmp_path: Path) -> None:
    adapter = named(math, str(tmp_path / "missing"), tmp_path / "math")
    code = (
        "import adapterswap\n"
        "from adapterswap.kit.errors import NotFoundError\n"
        "for composition, base in ((None, sys.argv[1]), (sys.argv[2], None)):\n"
        "    try:\n"
        "        adapterswap.ask(composition, 'Hi', base_model=base)\n"
        "    except NotFoundError as error:\n"
        "        assert [problem.parameter for problem in error.problems] == ['base_model']"
    )
    assert imported(code, tmp_path / "missing", adapter) & {"torch", "transformers", "peft"} == set()


RIGHT: list[dict[str, Any]] = [
    {},
    {"task": "math", "language": ["swahili", "french"], "bottom": "2", "top": 1, "task_weight": 2, "seed": 0},
    {"num_layers": {"encoder": 4, "decoder": "6"}, "base_model": Path("base"), "experts": {"math": Path("m")}},
    {"method": "ties", "density": "0.5", "scale": 2, "language_weight": 0.25},
    {"method": "dare_linear", "density": 1, "seed": 7},
    {"method": "cat"},
    {"partition": "A", "outside": "task", "norms": "layer"},
    {"rules": ["swahili: 0-4, 30", "mlp of math*0.5 + swahili: 5 with method=ties, density=0.5", {"expert": "math"}]},
    {"allocation": [{"layers": [1, 2], "modules": "mlp", "blend": {"a": 1, "b": 2}, "lambda": 0.5, "method": "ties"}]},
    {"rules": [{"expert": "mean", "averages": {"mean": ["a", "b"]}}, Rule(expert="base")]},
    {"allow_negative": True, "method": "task_arithmetic", "language_weight": "-1"},
    {"row_threshold": 0.001, "tokenizer": "math", "config_from": "base", "task_type": "SEQ_CLS"},
]
WRONG: list[tuple[Any, str | None]] = [
    ({"bottom": True}, "bottom"),
    ({"bottom": -1}, "bottom"),
    ({"top": "1.5"}, "top"),
    ({"num_layers": 0}, "num_layers"),
    ({"num_layers": {"encoder": 3}}, "num_layers"),
    ({"task_weight": float("nan")}, "task_weight"),
    ({"row_threshold": 0}, "row_threshold"),
    ({"row_threshold": float("inf")}, "row_threshold"),
    ({"partition": "D"}, "partition"),
    ({"method": "tise"}, "method"),
    ({"method": "ties"}, "density"),
    ({"method": "ties", "density": 2}, "density"),
    ({"density": 0.5}, "density"),
    ({"bottm": 1}, "bottm"),
    ({"experts": {"base": "x"}}, "experts"),
    ({"rules": ["math"], "allocation": ["math"]}, "rules"),
    ({"rules": ["math: 5-3"]}, "rules.0"),
    ({"rules": ["math"], "top": 1}, "top"),
    ([], None),
]


@pytest.mark.parametrize("content", RIGHT)
def test_a_request_is_read_from_what_is_written_of_it(content: dict[str, Any]) -> None:
    read = Composition.read_content(content, where="a recipe")
    assert read == Composition(**content)
    assert {field for field in read.model_fields if field in content} <= read.model_fields_set
    again = Composition.model_validate(read.model_dump(exclude_defaults=True))
    assert again == read
    assert repr(again) == repr(read)


@pytest.mark.parametrize(("content", "parameter"), WRONG)
def test_a_wrong_request_is_refused(content: Any, parameter: str | None) -> None:
    with refused(FieldError, parameter):
        Composition.model_validate(content)
