"""Model cards: zones, experts with links and licences, rank and size, how to load, what to cite."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from conftest import LAYERS
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap.core.model.opened_base import quiet_peft
from adapterswap.core.model.sources import Source
from adapterswap.core.writing.cards import Licence, licence_of
from adapterswap.kit.files.yaml import parse_yaml

Experts = Callable[..., Path]


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def front_of(folder: Path) -> dict[str, Any]:
    front = parse_yaml(card_of(folder).split("---\n")[1])
    assert isinstance(front, dict)
    return front


def table(card: str, head: str) -> list[list[str]]:
    """The rows of the table whose first column has this head."""
    lines = card[card.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def with_card(folder: Path, out: Path, front: str) -> Path:
    shutil.copytree(folder, out)
    (out / "README.md").write_text(f"---\n{front}\n---\n\n# An expert\n", encoding="utf-8")
    return out


def test_zones_with_their_resolved_numbers(math: Path, swahili: Path, tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(math, swahili, bottom=2, top=1, bottom_transition=1)
    card = card_of(plan.write(tmp_path / "out"))
    names = list(plan.experts)
    assert table(card, f"layers of {LAYERS}") == [
        ["0-1", names[1]], ["2", f"0.5·{names[0]} + 0.5·{names[1]}"], ["3-4", names[0]], ["5", names[1]],
    ]  # fmt: skip
    assert "Settings: bottom 2, top 1, bottom_transition 1, top_transition 0, task_weight 1, language_weight 1" in card
    defaults = card_of(adapterswap.layer_swap(math, swahili).write(tmp_path / "defaults"))
    assert "Settings: bottom 1, top 0, bottom_transition 0, top_transition 0" in defaults


def test_layers_that_differ_by_module(math: Path, swahili: Path, tmp_path: Path) -> None:
    rules = [{"layers": "0-3", "modules": ["attention"], "expert": "a"}, {"expert": "b"}]
    composition = adapterswap.Composition.model_validate({"allocation": rules})
    opened = {"a": adapterswap.open_adapter(math), "b": adapterswap.open_adapter(swahili)}
    card = card_of(adapterswap.compose(composition, opened).write(tmp_path / "out"))
    assert table(card, f"layers of {LAYERS}") == [["0-3", "attention: a; mlp: b"], ["4-5", "b"]]


def test_rank_and_size_match_the_file(expert: Experts, tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(expert(seed=1, r=4), expert(seed=2, r=8), bottom=2, top=1, bottom_transition=1)
    out = plan.write(tmp_path / "out")
    tensors = load_file(out / "adapter_model.safetensors").values()
    count, size = sum(t.size for t in tensors), sum(t.nbytes for t in tensors)
    assert f"Ranks 4 to 12; rank-stabilized scale α/√r; {count:,} parameters in F32, {size / 1e6:.1f} MB." in card_of(
        out
    )
    assert "| 4 | not stated |" in card_of(out)
    portable = card_of(plan.write(tmp_path / "portable", layout="portable"))
    assert "Rank 12; scale α/r" in portable


def test_experts_from_the_hub_are_linked_at_their_commit(math: Path, swahili: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    opened = adapterswap.open_adapter(math)
    opened = replace(opened, source=Source(opened.source.folder, "org/math_lora", commit))
    out = adapterswap.layer_swap(opened, swahili, bottom=1, top=1).write(tmp_path / "out")
    link = f"[org/math_lora](https://huggingface.co/org/math_lora/tree/{commit}) at `0123456789ab`"
    rows = table(card_of(out), "expert")
    assert [row[1] for row in rows if "org" in row[1]] == [link]
    assert sorted(row[3] for row in rows) == ["language", "task"]


def test_a_common_licence_is_inherited(math: Path, swahili: Path, base: Experts, tmp_path: Path) -> None:
    front = "license: other\nlicense_name: llama3.1\nlicense_link: LICENSE"
    pair = [with_card(folder, tmp_path / name, front) for name, folder in (("one", math), ("two", swahili))]
    plan = adapterswap.layer_swap(*pair, bottom=1, top=1)
    out = plan.write(tmp_path / "out")
    assert front_of(out).items() >= {"license": "other", "license_name": "llama3.1", "license_link": "LICENSE"}.items()
    assert [row[-1] for row in table(card_of(out), "expert")] == ["llama3.1"] * 2
    merged = plan.merge(tmp_path / "merged", base_model=base("llama"))
    assert front_of(merged)["license_name"] == "llama3.1"
    again = adapterswap.layer_swap(out, pair[0], bottom=1, top=1).write(tmp_path / "again")
    assert front_of(again)["license_name"] == "llama3.1"


@pytest.mark.parametrize("command", ["compose", "merge"])
def test_a_clash_of_licences_is_a_warning(
    command: str, math: Path, swahili: Path, base: Experts, run: Callable[..., Result], tmp_path: Path
) -> None:
    one = with_card(math, tmp_path / "one", "license: apache-2.0")
    two = with_card(swahili, tmp_path / "two", "license: [cc-by-nc-4.0]")
    options = ["--base-model", base("llama")] if command == "merge" else []
    result = run(command, "-t", one, "-l", two, "-o", tmp_path / "out", *options, exit_code=0)
    (warning,) = (line for line in result.stderr.splitlines() if "licences differ" in line)
    assert warning.startswith("Warning: ")
    assert all(text in warning for text in ("one: apache-2.0", "two: cc-by-nc-4.0"))
    assert "license" not in front_of(tmp_path / "out")
    assert "**Warning**: the experts' licences differ" in card_of(tmp_path / "out")
    shown = run(command, "-t", one, "-l", two, "-o", tmp_path / "json", *options, "--dry-run", "--json")
    assert json.loads(shown.stdout)["licenses"] == {"one": "apache-2.0", "two": "cc-by-nc-4.0"}


def test_a_licence_that_one_expert_states_is_not_claimed(math: Path, swahili: Path, tmp_path: Path) -> None:
    one = with_card(math, tmp_path / "one", "license: mit")
    out = adapterswap.layer_swap(one, swahili, bottom=1, top=1).write(tmp_path / "out")
    assert "license" not in front_of(out)
    assert "does not state one" in card_of(out)


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: MIT\n---\n", Licence("mit")),
        ("---\r\nlicense: mit\r\n---\r\n", Licence("mit")),
        ("---\nlicense:\n- mit\n- apache-2.0\n---\ntext", Licence("mit, apache-2.0")),
        ("---\nlicense: 3\n---\n", None),
        ("---\nlicense: {a: b}\n---\n", None),
        ("---\nlicense: [1, 2]\n---\n", None),
        ("---\nlicense: ''\n---\n", None),
        ("---\n[broken\n---\n", None),
        ("---\n- a\n---\n", None),
        ("license: mit", None),
        ("# Title\n---\nlicense: mit\n---\n", None),
        ("", None),
        ("\udcff", None),
    ],
)
def test_what_a_card_states(text: str, licence: Licence | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert licence_of(tmp_path) == licence


def test_folders_and_endless_files_state_no_licence(tmp_path: Path) -> None:
    (tmp_path / "README.md").mkdir()
    assert licence_of(tmp_path) is None
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "README.md").symlink_to("/dev/zero")
    assert licence_of(tmp_path / "two") is None


def test_the_snippet_for_peft_runs(math: Path, swahili: Path, base: Experts, tmp_path: Path) -> None:
    """With a base named as on the Hub, the code in the card loads the adapter."""
    plan = adapterswap.compose(
        adapterswap.Composition.model_validate(
            {"experts": {"a": str(math), "b": str(swahili)}, "task": "a", "language": "b", "num_layers": LAYERS,
             "base_model": "org/base@abc", "bottom": 1, "top": 1}
        )
    )  # fmt: skip
    opened = {
        name: replace(adapter, config=replace(adapter.config, base_model="org/base", revision="abc"))
        for name, adapter in plan.adapters.items()
    }
    out = adapterswap.compose(plan.composition, opened).write(tmp_path / "out")
    (snippet,) = re.findall(r"```python\n(.*?)```", card_of(out), flags=re.DOTALL)
    assert 'AutoModelForCausalLM.from_pretrained("org/base", revision="abc")' in snippet
    snippet = snippet.replace('"org/base", revision="abc"', repr(str(base("llama"))))
    names: dict[str, Any] = {}
    with quiet_peft():
        exec(snippet.replace("path/to/this/folder", str(out)), names)
    assert isinstance(names["model"], PeftModel)
    assert issubclass(
        type(names["base_model"]), AutoModelForCausalLM._model_mapping[names["base_model"].config.__class__]
    )


def test_servers_are_mentioned_only_if_they_can_load_it(
    expert: Experts, swahili: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    alike = expert(seed=1, r=9), expert(seed=2, r=9)
    plain = card_of(adapterswap.layer_swap(*alike, bottom=1, top=1).write(tmp_path / "plain"))
    assert "--layout portable" not in plain
    assert "--enable-lora --max-lora-rank 16 --lora-modules composed=path/to/this/folder" in plain
    assert "llama-server -m base.gguf --lora composed.gguf" in plain

    # vLLM has one scale for all modules, so an adapter with patterns is written again first.
    mixed = adapterswap.layer_swap(expert(seed=1, r=9), swahili, bottom=1, top=1).write(tmp_path / "mixed")
    (commands,) = re.findall(r"```bash\n(adapterswap convert .*\n)vllm serve .* composed=portable\n```", card_of(mixed))
    portable = tmp_path / "portable"
    words = commands.replace("path/to/this/folder", str(mixed)).replace("-o portable", f"-o {portable}").split()[1:]
    run(*words, exit_code=0)
    config = json.loads((portable / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"], config["lora_alpha"]) == ({}, {}, config["r"])

    with quiet_peft():
        whole = expert(seed=1, modules_to_save=["lm_head"])
    saved = card_of(adapterswap.soup(whole, expert(seed=2, modules_to_save=["lm_head"])).write(tmp_path / "saved"))
    assert "adapterswap merge" in saved
    assert "vllm serve" not in saved


@pytest.mark.parametrize(
    ("compose", "cited"),
    [
        (lambda a, b: adapterswap.layer_swap(a, b, bottom=1, top=1), {"2410.01335", "2505.18356"}),
        (lambda a, b: adapterswap.soup(a, b), {"2203.05482"}),
        (lambda a, b: adapterswap.task_arithmetic(a, b), {"2212.04089"}),
        (lambda a, b: adapterswap.ties(a, b, density=0.5), {"2306.01708"}),
        (lambda a, b: adapterswap.parse_composition("math+swahili@partition=A"), {"2505.18356"}),
    ],
    ids=["layer_swap", "soup", "task_arithmetic", "ties", "partition"],
)
def test_the_paper_of_the_method_is_cited(
    compose: Callable[..., Any], cited: set[str], math: Path, swahili: Path, tmp_path: Path
) -> None:
    plan = compose(math, swahili)
    if isinstance(plan, adapterswap.Composition):
        opened = {"math": adapterswap.open_adapter(math), "swahili": adapterswap.open_adapter(swahili)}
        plan = adapterswap.compose(plan, opened)
    card = card_of(plan.write(tmp_path / "out", max_rank=None if plan.composition.method != "ties" else 4))
    citation = card.split("## Citation\n")[1]
    assert set(re.findall(r"https://arxiv.org/abs/([\d.]+)", citation)) == cited


def test_the_same_inputs_give_the_same_card(math: Path, swahili: Path, tmp_path: Path) -> None:
    plan = adapterswap.layer_swap(math, swahili, bottom=1, top=1)
    assert card_of(plan.write(tmp_path / "one")) == card_of(plan.write(tmp_path / "two"))
    assert str(tmp_path) not in card_of(tmp_path / "one")
