"""Proposals of suggest, against a search of all allocations, and its measurements against PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import load_base, merged_weights
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from refusals import refused
from tolerances import near, tolerance

from adapterswap import Composition, open_adapter
from adapterswap.core.planning.functions import soup
from adapterswap.core.planning.plan import Plan
from adapterswap.engines.live import load_experts
from adapterswap.experiments.analysis.interference import measure
from adapterswap.experiments.analysis.suggestion import (
    Importance,
    choose_layers,
    importance_of_activations,
    importance_of_weights,
    read_texts,
)
from adapterswap.kit.errors import DataError, ExpertError, UnsupportedError

KINDS = ("attention", "mlp")


def importance(task: list[float], language: list[float]) -> Importance:
    """Shares of whole layers, all in the attention."""
    sides = [{(layer, "attention"): share / sum(row) for layer, share in enumerate(row)} for row in (task, language)]
    return Importance("weights", len(task), *sides)


def kept(shares: Importance, bottom: int, top: int) -> float:
    outer = {*range(bottom), *range(shares.num_layers - top, shares.num_layers)}
    sides = [shares.of_layer(layer) for layer in range(shares.num_layers)]
    return sum(language if layer in outer else task for layer, (task, language) in enumerate(sides))


shares = st.integers(2, 9).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(0.01, 1), min_size=n, max_size=n)] * 2).map(lambda rows: importance(*rows))
)


@given(shares)
def test_no_other_zones_keep_more(measured: Importance) -> None:
    layers = measured.num_layers
    proposal = choose_layers(measured)
    bottom, top = proposal.composition["bottom"], proposal.composition["top"]
    assert 0 < bottom + top <= layers / 2
    assert sum(proposal.kept) == pytest.approx(kept(measured, bottom, top))
    every = (kept(measured, b, u) for b in range(layers) for u in range(layers - b) if 0 < b + u <= layers / 2)
    assert sum(proposal.kept) >= max(every) - 1e-9


@given(shares)
def test_owners_of_modules_keep_at_least_what_zones_keep(measured: Importance) -> None:
    try:
        proposal = choose_layers(measured, form="modules")
    except ExpertError:
        gains = [language - task for task, language in map(measured.of_layer, range(measured.num_layers))]
        assert max(gains) <= 0 or min(gains) > 0
        return
    assert sum(proposal.kept) >= sum(choose_layers(measured).kept) - 1e-9
    Composition.model_validate({**proposal.composition, "num_layers": measured.num_layers})


def test_reasons_name_the_shares() -> None:
    proposal = choose_layers(importance([1, 3, 1, 3, 2], [5, 1, 2, 1, 1]))
    assert proposal.composition == {"bottom": 1, "top": 0}
    assert proposal.kept == pytest.approx((0.9, 0.5))
    assert proposal.reasons[0] == (
        "layer 0 holds 50% of the language expert's effect in the layers, and 10% of the task expert's, "
        "measured by weights"
    )
    assert proposal.reasons[1].startswith("layer 2 also matters more to the language but lies inside")
    unwilling = choose_layers(importance([6, 1, 1, 1, 6], [1, 1, 3, 1, 1]))
    assert "least harmful" in unwilling.reasons[1]


def test_one_layer_cannot_be_shared() -> None:
    with refused(UnsupportedError):
        choose_layers(importance([1], [1]))


def test_weights_are_shares_of_the_squared_norm(base: Callable[[str], Path], math: Path, swahili: Path) -> None:
    result = importance_of_weights(*(measure(open_adapter(path), name="x") for path in (math, swahili)), 6)
    own = load_base(base("llama")).state_dict()
    for adapter, side in ((math, result.task), (swahili, result.language)):
        merged = merged_weights(base("llama"), adapter)
        energy = {
            (layer, kind): sum(
                float((merged[name] - own[name]).double().norm() ** 2)
                for name in merged
                if f"layers.{layer}." in name and {"attention": "self_attn", "mlp": ".mlp."}[kind] in name
            )
            for layer in range(6)
            for kind in KINDS
        }
        assert side == near({block: value / sum(energy.values()) for block, value in energy.items()}, scale=1)


class Characters:
    """A tokenizer of single characters."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) % 90 for character in text][: options["max_length"]]}


def test_activations_are_shares_of_the_divergence(base: Callable[[str], Path], math: Path, swahili: Path) -> None:
    texts = {"task": ["two and two", "is four, they say", "ten"], "language": ["habari yako", "nzuri sana, asante"]}
    plan = soup(math, swahili, num_layers=6)
    assert isinstance(plan, Plan)
    sides = dict(zip(("task", "language"), plan.experts, strict=True))
    model = load_experts(load_base(base("llama")), plan)
    result = importance_of_activations(model, Characters(), plan, sides=sides, texts=texts)
    assert sum(result.task.values()) == pytest.approx(1)
    assert {kind for _, kind in result.task} == set(KINDS)
    for side, adapter, block in (("task", math, (2, "mlp")), ("language", swahili, (0, "attention"))):
        one, other = (divergence(base("llama"), adapter, texts[side], each) for each in (block, (4, "mlp")))
        measured = getattr(result, side)
        assert measured[block] / measured[4, "mlp"] == pytest.approx(one[0] / other[0], rel=one[1] + other[1])


def divergence(base_folder: Path, adapter: Path, texts: list[str], block: tuple[int, str]) -> tuple[float, float]:
    """Σ KL(base ‖ base + one block of the adapter), with the other factors of a PEFT model set to zero.

    Also returns its relative rounding: KL is about half the mean square of the change in log-probabilities, a small
    number.
    """
    layer, kind = block
    model = PeftModel.from_pretrained(load_base(base_folder), adapter)
    inside = {"attention": "self_attn", "mlp": "mlp"}[kind]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and f"layers.{layer}.{inside}" not in name:
                parameter.zero_()
    total, positions, rounding = 0.0, 0, 0.0
    for text in texts:
        ids = torch.tensor([Characters()(text, max_length=99)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits
            changed = logits.double().softmax(-1)
            with model.disable_adapter():
                own = model(ids).logits.double().softmax(-1)
        total += float(torch.nn.functional.kl_div(changed.log(), own, reduction="sum"))
        positions, rounding = positions + ids.numel(), max(rounding, tolerance(logits, depth=6))
    return total, 2 * rounding / (2 * total / positions) ** 0.5


def test_texts_are_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n\n{"prompt": "two", "completion": "three"}\n{"text": "four"}\n')
    assert read_texts(rows, 2) == ["one", "two three"]
    lines = tmp_path / "lines.txt"
    lines.write_text("moja\n\n mbili \n", encoding="utf-8")
    assert read_texts(lines, 9) == ["moja", "mbili"]
    for name, content, place in (
        ("empty.txt", "\n", "empty.txt"),
        (
            "bad.jsonl",
            '{"text": "a"}\n{"question": 1, "solution": 2}\n',
            "line 2 .* has the columns question, solution",
        ),
        ("twice.jsonl", '{"text": "a", "text": "b"}', "line 1 .*same key twice"),
        ("torn.jsonl", '{"text": ', "line 1"),
        ("list.jsonl", "[1]", "line 1"),
    ):
        (tmp_path / name).write_text(content)
        with refused(DataError, "task_texts", match=place):
            read_texts(tmp_path / name, 9, parameter="task_texts")
    with refused(DataError, "task_texts"):
        read_texts(tmp_path / "missing.jsonl", 9, parameter="task_texts")
    (tmp_path / "messages.jsonl").write_text('{"messages": "hello"}')
    with refused(DataError, "datasets"):
        read_texts(tmp_path / "messages.jsonl", 9)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "1 + 1?", "answer": "2", "id": 5}, "1 + 1? 2"),  # as GSM8K has it
        ({"prompt": "a\n", "completion": "b"}, "a\nb"),
        ({"instruction": "add", "input": "1 1", "output": "2"}, "add\n\n1 1 2"),
        ({"instruction": "add", "input": "", "output": "2"}, "add\n\n2"),
        ({"instruction": "add", "output": 2}, "add 2"),
        ({"inputs": "a", "targets": "b"}, "a b"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "a\nb"),
        ({"messages": [["a", "b"], ["c", "d"]]}, "a\nb\nc\nd"),
        ({"text": "all", "question": "no", "answer": "no"}, "all"),
    ],
)
def test_rows_of_common_datasets_are_read(tmp_path: Path, row: dict[str, object], text: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert read_texts(rows, 9) == [text]


@pytest.mark.parametrize("form", ["zones", "modules"])
def test_the_command_writes_a_recipe_that_composes(
    form: str, run: Callable[..., Result], base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    experts = ("-t", math, "-l", swahili, "--base-model", base("llama"))
    result = run("suggest", *experts, "--form", form, "-o", recipe, "--json")
    assert result.exit_code == 0, result.stderr
    output = json.loads(result.stdout)
    assert output["form"] == form
    assert len(output["layers"]) == 6
    assert sum(layer["task"] for layer in output["layers"]) == pytest.approx(1)
    assert output["reasons"][0] in recipe.read_text()
    composed = run("compose", recipe, "--out-path", tmp_path / "out", "--json")
    assert composed.exit_code == 0, composed.stderr
    assert run("suggest", *experts, "--form", form, "-o", recipe).exit_code == 3
    assert run("suggest", *experts, "--form", form, "-o", recipe, "--overwrite").exit_code == 0


def test_mistakes_are_refused(run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path) -> None:
    experts = ("-t", math, "-l", swahili)
    for arguments, code, message in (
        (("--task-texts", "a"), 2, "Pass both --task-texts and --language-texts"),
        (("--task-texts", "a", "--language-texts", "b"), 2, "require --base-model"),
        (("-o", tmp_path), 3, "is a folder"),
    ):
        result = run("suggest", *experts, *arguments)
        assert result.exit_code == code, result.output
        assert message in result.stderr
    assert run("suggest", "-t", math).exit_code == 2
    assert run("suggest", "-l", math).exit_code == 2
    dry = run("suggest", *experts, "--dry-run", "--json", "-o", tmp_path / "absent.yaml")
    assert json.loads(dry.stdout)["dry_run"] is True
    assert not (tmp_path / "absent.yaml").exists()
    astray = run("suggest", *experts, "--dry-run", "-o", tmp_path / "absent" / "recipe.yaml")
    assert astray.exit_code == 3
    assert f"folder {tmp_path / 'absent'} does not exist" in astray.stderr


def test_a_recipe_in_another_folder_names_the_same_experts(
    run: Callable[..., Result], math: Path, swahili: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not others that lie there under the same path: paths in a recipe are relative to its folder."""
    for name, source, decoy in (("math", math, swahili), ("swahili", swahili, math)):
        shutil.copytree(source, tmp_path / "experts" / name)
        shutil.copytree(decoy, tmp_path / "recipes" / "experts" / name)
    monkeypatch.chdir(tmp_path)
    contents = []
    for folder in ("recipes", "."):
        result = run("suggest", "-t", "experts/math", "-l", "experts/swahili", "-o", f"{folder}/proposal.yaml")
        assert result.exit_code == 0, result.output
        out = f"composed-from-{Path(folder).name or 'here'}"
        result = run("compose", f"{folder}/proposal.yaml", "-o", out)
        assert result.exit_code == 0, result.output
        contents.append((tmp_path / out / "adapter_model.safetensors").read_bytes())
    assert contents[0] == contents[1]


def test_texts_are_read_as_they_are_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"text": "one\u2028two"}\r\n{"text": "three"}'.encode())
    assert read_texts(path, 9) == ["one\u2028two", "three"]
    (tmp_path / "latin.txt").write_bytes("é\n".encode("latin-1"))
    with refused(DataError, "task_texts"):  # letters were replaced, and other texts measured
        read_texts(tmp_path / "latin.txt", 9, parameter="task_texts")
