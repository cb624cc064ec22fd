"""Experts that trained single tokens (`trainable_token_indices`): compared with a transplant of what PEFT merges."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pico_models as pico
import pytest
import torch
from conftest import load_base
from peft import LoraConfig, TrainableTokensConfig
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close
from transformers import AutoConfig, AutoModelForCausalLM

import adapterswap
from adapterswap.core.planning.composition import Composition
from adapterswap.core.planning.planner import make_plan
from adapterswap.core.planning.rules import Rule
from adapterswap.kit.errors import BaseModelError, CompositionError, ExpertError, UnsupportedError

from .vocabularies import LAYERS, SIZE, in_peft, merged_by_peft, pico_llama, plan_of, resized

KEY = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
EXPERTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three": {"trainable_token_indices": [3, 1, 7]},
    "same": {"trainable_token_indices": [3, 1, 7]},
    "overlapping": {"trainable_token_indices": {"embed_tokens": [7, 20]}},
    "apart": {"trainable_token_indices": [30, 5], "ensure_weight_tying": True},
    "dora": {"trainable_token_indices": [2, 30], "use_dora": True},
    "both": {"trainable_token_indices": {"embed_tokens": [3, 1], "lm_head": [8, 3, 1]}},
    "head": {"trainable_token_indices": {"lm_head": [5, 1]}},
    "whole": {"modules_to_save": ["embed_tokens"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "new": {"trainable_token_indices": [SIZE + 1, 3, SIZE]},
    "alone": {"token_indices": [7, 5, 20]},  # TRAINABLE_TOKENS, without LoRA
    "alone both": {"token_indices": [8, 3], "target_modules": ["embed_tokens", "lm_head"]},
}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """`bases(tied)`: a pico Llama."""
    return cache(lambda tied: pico_llama(tmp_path_factory.mktemp("base"), tied=tied))


@pytest.fixture(scope="module")
def trained(bases: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`trained("three", tied=True)`: a random expert, as PEFT saves it."""
    made: dict[tuple[str, bool], Path] = {}

    def make(name: str, *, tied: bool = False) -> Path:
        if (name, tied) not in made:
            settings = {"r": 2, "use_rslora": True, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
            alone = "token_indices" in EXPERTS[name]
            config = TrainableTokensConfig(**EXPERTS[name]) if alone else LoraConfig(**(settings | EXPERTS[name]))
            model, folder = resized(bases(tied), SIZE + 2 * (name == "new")), tmp_path_factory.mktemp("expert")
            options = {"seed": 1 + len(made), "scale": 0.2, "save_embedding_layers": False}
            made[name, tied] = pico.trained(model, config, folder, **options)
        return made[name, tied]

    return make


def answers(model: Any, size: int = SIZE) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(2 * size).reshape(2, size) % size).logits
    return logits


def rows_of(name: str, module: str, *, tied: bool) -> set[int]:
    if tokens := EXPERTS[name].get("token_indices"):
        return set(tokens) if tied or module in EXPERTS[name].get("target_modules", ["embed_tokens"]) else set()
    tokens = EXPERTS[name].get("trainable_token_indices", {})
    tokens = tokens if isinstance(tokens, dict) else {"embed_tokens": tokens}
    return set(tokens.get("embed_tokens" if tied else module, ()))


def transplant(base: Path, names: tuple[str, str], folders: tuple[Path, Path], outside: str, *, tied: bool) -> Any:
    """Layers 0 and 3 of the language; a row that an entering expert trained is its own, or the average of several."""
    weights = load_base(base).state_dict()
    theirs = [merged_by_peft(base, folder) for folder in folders]
    entering = {"average": (0, 1), "task": (0,), "language": (1,)}[outside]
    for key in weights:
        if ".layers." in key:
            weights[key] = theirs[1 if key.split(".")[2] in ("0", "3") else 0][key]
        elif "norm" not in key:
            module = key.split(".")[-2]
            owners = {i: rows_of(names[i], module, tied=tied) for i in entering}
            weights[key] = weights[key].clone()
            for row in set().union(*owners.values()):
                weights[key][row] = torch.stack([theirs[i][key][row] for i in entering if row in owners[i]]).mean(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).eval()
    model.load_state_dict(weights)
    return model


PAIRS = [("three", "plain"), ("three", "apart"), ("three", "overlapping"), ("same", "three"), ("plain", "three")]
PAIRS += [("alone", "plain"), ("three", "alone"), ("plain", "alone")]
UNTIED = [("both", "plain"), ("both", "head"), ("head", "three"), ("both", "apart"), ("alone both", "both")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("outside", ["average", "task", "language"])
@pytest.mark.parametrize(
    ("task", "language", "tied"),
    [(*pair, tied) for pair in PAIRS for tied in (False, True)] + [(*pair, False) for pair in UNTIED],
)
def test_the_result_is_the_transplant(
    task: str, language: str, tied: bool, outside: Any, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    base, one, two = bases(tied), trained(task, tied=tied), trained(language, tied=tied)
    plan = plan_of(one, two, base, outside=outside)
    expected = transplant(base, (task, language), (one, two), outside, tied=tied)
    out = plan.write(tmp_path / "out")
    close(answers(in_peft(base, out)), answers(expected), depth=LAYERS)
    merged = load_base(plan.merge(tmp_path / "merged"))
    close(merged.state_dict(), expected.state_dict())
    assert (merged.config.vocab_size, merged.config.tie_word_embeddings) == (SIZE, tied)
    for folder in (out, tmp_path / "merged"):
        assert adapterswap.verify(folder, {"t": one, "l": two}, base_model=base).equal


def test_dora_beside_tokens(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    expert, base = trained("dora", tied=True), bases(True)
    plan = make_plan(Composition(allocation=(Rule(expert="t"),)), {"t": adapterswap.open_adapter(expert)})
    close(answers(in_peft(base, plan.write(tmp_path / "out"))), answers(in_peft(base, expert)), depth=LAYERS)
    close(load_base(plan.merge(tmp_path / "merged")).state_dict(), merged_by_peft(base, expert))
    with refused(UnsupportedError, "adapter"):
        adapterswap.convert(expert, tmp_path / "converted", rank=4)


def test_rows_of_one_owner_are_copied(trained: Make, tmp_path: Path) -> None:
    expert = trained("three")
    out = plan_of(expert, trained("plain"), None).write(tmp_path / "out")
    assert torch.equal(
        load_file(out / "adapter_model.safetensors")[KEY], load_file(expert / "adapter_model.safetensors")[KEY]
    )
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == {"model.embed_tokens": [3, 1, 7]}
    assert config["modules_to_save"] is None


def test_a_slice_and_a_conversion_keep_the_rows(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    expert, base = trained("overlapping"), bases(False)
    own = load_file(expert / "adapter_model.safetensors")[KEY]
    adapterswap.slice_layers(expert, "0-1").write(tmp_path / "slice")
    adapterswap.convert(expert, tmp_path / "converted", layout="portable")
    for folder in (tmp_path / "slice", tmp_path / "converted"):
        assert torch.equal(load_file(folder / "adapter_model.safetensors")[KEY], own)
    close(answers(in_peft(base, tmp_path / "converted")), answers(in_peft(base, expert)), depth=LAYERS)
    with refused(UnsupportedError, "saved_rank"):
        adapterswap.convert(expert, tmp_path / "lowered", saved_rank=2)


def test_inspect_shows_owners_of_rows(trained: Make, tmp_path: Path, run: Callable[..., Any]) -> None:
    out = plan_of(trained("three"), trained("overlapping"), None).write(tmp_path / "out")
    (saved,) = json.loads(run("inspect", out, "--json").stdout)["saved"]
    assert saved["tokens"] == [1, 3, 7, 20]
    assert saved["rows"] == {"1-1": "t", "3-3": "t", "7-7": {"t": 0.5, "l": 0.5}, "20-20": "l"}


def test_tokens_beyond_the_base(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    base, one, two = bases(True), trained("new", tied=True), trained("plain", tied=True)
    plan = plan_of(one, two, base, outside="average")
    assert f"model.resize_token_embeddings({SIZE + 2})" in plan.notes[-1]
    merged = load_base(plan.merge(tmp_path / "merged"))
    assert merged.config.vocab_size == SIZE + 2
    composed = in_peft(base, plan.write(tmp_path / "out"), SIZE + 2)
    close(answers(merged, SIZE + 2), answers(composed, SIZE + 2), depth=LAYERS)
    rows = merged_by_peft(base, one, SIZE + 2)["model.embed_tokens.weight"]
    close(merged.model.embed_tokens.weight.detach(), rows)
    untied = plan_of(trained("new"), trained("plain"), bases(False))  # the head would have fewer rows
    with refused(UnsupportedError):
        untied.merge(tmp_path / "untied")


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_a_resized_base_are_refused(
    tied: bool, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    """PEFT would put them over the base's own; the remedy composes them as full weights."""
    base, plain = bases(tied), trained("plain", tied=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about the copies
        model = in_peft(base, trained("new", tied=tied), SIZE + 2)
        model.save_pretrained(tmp_path / "copies")
        with refused(UnsupportedError, match="whole embedding"):
            adapterswap.open_expert(tmp_path / "copies")
        model.merge_and_unload().save_pretrained(tmp_path / "full")
    swap = adapterswap.Composition(bottom=1, top=1, outside="task", base_model=str(base))
    plan = adapterswap.compose(swap, {"task": tmp_path / "full", "language": plain})
    result, full = load_base(plan.merge(tmp_path / "merged")), load_base(tmp_path / "full")
    assert torch.equal(result.get_input_embeddings().weight, full.get_input_embeddings().weight)
    assert torch.equal(result.get_output_embeddings().weight, full.get_output_embeddings().weight)
    own, by_peft = result.state_dict(), merged_by_peft(base, plain)
    for layer, expected in ((0, by_peft), (1, full.state_dict()), (LAYERS - 1, by_peft)):
        key = f"model.layers.{layer}.self_attn.q_proj.weight"
        close(own[key], expected[key])


def test_new_tokens_of_two_experts_need_their_tokenizers(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    expert = trained("new", tied=True)
    with refused(ExpertError):
        plan_of(expert, expert, bases(True))


def test_a_gap_in_new_rows_is_refused(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    folder = edited(trained("three", tied=True), tmp_path, [3, 1, SIZE + 5])
    plan = plan_of(folder, trained("plain", tied=True), bases(True))
    with refused(BaseModelError, "base_model"):
        plan.merge(tmp_path / "merged")


def edited(expert: Path, folder: Path, tokens: Any, base: str | None = None, **tensors: Any) -> Path:
    """The expert with other tokens in its config."""
    out = shutil.copytree(expert, folder / "edited")
    config = json.loads((out / "adapter_config.json").read_text())
    config |= {"trainable_token_indices": tokens, "base_model_name_or_path": base or config["base_model_name_or_path"]}
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file({**load_file(out / "adapter_model.safetensors"), **tensors}, out / "adapter_model.safetensors")
    return out


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ([3, 1], ExpertError), ([3, 1, 7, 9], ExpertError), ([3, 3, 1], UnsupportedError),
        ({"lm_head": [3, 1, 7]}, ExpertError),
        (None, UnsupportedError), (["3"], ExpertError), ({"embed_tokens": 3}, ExpertError), ([True, 1, 7], ExpertError),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit(tokens: Any, kind: type[Exception], trained: Make, tmp_path: Path) -> None:
    with refused(kind):  # type: ignore[arg-type]
        adapterswap.open_adapter(edited(trained("three"), tmp_path, tokens))


def test_rows_beside_whole_weights(trained: Make, tmp_path: Path) -> None:
    weight: dict[str, Any] = {"base_model.model.model.embed_tokens.weight": torch.zeros(SIZE, 16)}
    with refused(ExpertError):
        adapterswap.open_adapter(edited(trained("three"), tmp_path, [3, 1, 7], **weight))


def test_what_cannot_be_blended(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    one, two, base = trained("three"), trained("plain"), bases(False)
    with refused(UnsupportedError):  # which rows would be averaged with which?
        plan_of(one, trained("whole"), base)
    with refused(UnsupportedError):
        adapterswap.ties(one, trained("same"), density=0.5)
    experts = {"t": adapterswap.open_adapter(one), "l": adapterswap.open_adapter(trained("same"))}
    with refused(CompositionError):
        negative = Rule(blend={"t": 1.0, "l": -0.5}, normalize=False)
        make_plan(Composition(allocation=(negative,), allow_negative=True), experts)
    checkpoint = plan_of(two, two, base).merge(tmp_path / "full")
    with refused(UnsupportedError):
        make_plan(
            Composition(task=("t",), language=("l",), bottom=1, top=1, base_model=str(base)),
            {"t": adapterswap.open_adapter(one), "l": adapterswap.open_expert(checkpoint)},
        )


def test_a_rule_decides_between_rows_and_a_whole_embedding(
    trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    one, two, base = trained("three"), trained("whole"), bases(False)
    for owner, folder in (("t", one), ("l", two)):
        rules = (
            Rule(modules=("embed_tokens",), expert=owner), Rule(layers="1", expert="l"), Rule(expert="t"),
        )  # fmt: skip
        experts = {"t": adapterswap.open_adapter(one), "l": adapterswap.open_adapter(two)}
        plan = make_plan(Composition(allocation=rules, base_model=str(base)), experts)
        theirs = {key: value for key, value in merged_by_peft(base, two).items() if ".layers.1." in key}
        embedding = {"model.embed_tokens.weight": merged_by_peft(base, folder)["model.embed_tokens.weight"]}
        expected = {**merged_by_peft(base, one), **theirs, **embedding}
        close(load_base(plan.merge(tmp_path / f"{owner}-merged")).state_dict(), expected)
        close(merged_by_peft(base, plan.write(tmp_path / owner)), expected)


@pytest.mark.parametrize(("task", "language"), [("head", "plain"), ("three", "whole head")])
def test_tied_bases_with_two_changes(
    task: str, language: str, trained: Make, bases: Callable[[bool], Path], tmp_path: Path
) -> None:
    one, two = trained(task, tied=True), trained(language, tied=True)
    with refused(UnsupportedError, "base_model"):
        plan_of(one, two, bases(True))


def test_a_base_that_is_away_may_be_tied(trained: Make, tmp_path: Path) -> None:
    folder = edited(trained("head"), tmp_path, {"lm_head": [5, 1]}, base="org/away")
    with refused(BaseModelError, "base_model"):
        make_plan(
            Composition(allocation=(Rule(expert="t"),), num_layers=LAYERS), {"t": adapterswap.open_adapter(folder)}
        )


def test_live_and_gguf_refuse(trained: Make, bases: Callable[[bool], Path], tmp_path: Path) -> None:
    one, base = trained("three"), bases(False)
    with refused(UnsupportedError):
        adapterswap.LiveComposer.from_experts(load_base(base), {"t": one})
    with refused(UnsupportedError):
        adapterswap.LiveComposer(in_peft(base, one)).set(Composition(allocation=(Rule(expert="default"),)))
    with refused(UnsupportedError):
        plan_of(one, trained("plain"), base).export(tmp_path / "out.gguf")


def test_diff_compares_the_same_tokens(trained: Make) -> None:
    same = adapterswap.diff(trained("three"), trained("same"))
    (row,) = same.saved
    ours, theirs = (load_file(trained(name) / "adapter_model.safetensors")[KEY] for name in ("three", "same"))
    close(row.apart, torch.linalg.norm(ours - theirs).item())
    with refused(UnsupportedError, "other"):
        adapterswap.diff(trained("three"), trained("apart"))
