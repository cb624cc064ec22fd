"""The measurements of analyze, against dense matrices in numpy and scipy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crafting
import numpy as np
import pytest
import torch
import transformers
from click.testing import Result
from conftest import load_base, merged_weights
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from pictures import check_figure, check_files
from refusals import refused
from safetensors.torch import load_file, save_file
from scipy.linalg import subspace_angles
from tiers import ALL
from tolerances import close, near, tolerance

from adapterswap import AdapterswapError, Composition, compose
from adapterswap.core.experts.adapter import open_adapter, open_expert
from adapterswap.core.model.checkpoints import Checkpoint, open_checkpoint
from adapterswap.core.writing.resolution import Resolved
from adapterswap.experiments.analysis import Changes, choose_threshold, measure, read_fractions
from adapterswap.experiments.analysis.analysis import analyze
from adapterswap.experiments.analysis.interference import FractionTable, Interference, write_fractions
from adapterswap.experiments.analysis.pictures import describe_fractions, draw_fractions, draw_norms, family_of
from adapterswap.kit.errors import DataError, UnsupportedError
from adapterswap.kit.style import STYLE

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ARCHITECTURES = ["llama", "gpt2", "neox"]


def compare(experts: dict[str, Any], base: Checkpoint | None = None) -> Interference:
    """What `analyze` says about two experts."""
    (pair,) = analyze(experts, base_model=base).pairs
    return pair


def deltas(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    """Dense ΔW by module name, out×in, from PEFT's own merge."""
    own, merged = load_base(base).state_dict(), merged_weights(base, adapter)
    turned = "gpt2" in str(base)
    result = {}
    for name, weight in merged.items():
        delta = (weight.double() - own[name].double()).numpy()
        if name.endswith(".weight") and delta.ndim == 2 and np.abs(delta).max() > 0:
            result[name.removesuffix(".weight")] = delta.T if turned else delta
    return result


def full_expert(base: Path, adapter: Path, out: Path) -> Path:
    from peft import PeftModel

    PeftModel.from_pretrained(load_base(base), adapter).merge_and_unload().save_pretrained(out)
    return out


def by_name(changes: Changes) -> dict[str, Any]:
    return {change.matrix.name: change for change in changes.modules}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_and_norms_match_the_dense_matrices(
    architecture: str, base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    folder, adapter = base(architecture), expert(architecture, seed=1)
    own = open_checkpoint(folder)
    low_rank = measure(open_adapter(adapter), name="low", base=own)
    dense = measure(open_expert(full_expert(folder, adapter, tmp_path / "full")), name="full", base=own)
    truth, weights = deltas(folder, adapter), load_base(folder).state_dict()
    assert by_name(low_rank).keys() == by_name(dense).keys() == truth.keys()
    for changes in (low_rank, dense):
        for name, change in by_name(changes).items():
            stored = weights[f"{name}.weight"].double()
            # ΔW of full weights is a difference, which carries the rounding of both terms.
            close(change.rows, np.abs(truth[name]).mean(axis=1), scale=stored.abs().max().item(), name=name)
            assert change.norm == near(np.linalg.norm(truth[name]), scale=stored.norm().item())
            assert change.base_norm == near(stored.norm().item())

    # The same norms together: ‖ΔW‖ / ‖W‖ over the matrices of each layer.
    of_layer = {layer: [change for change in low_rank.modules if change.matrix.layer == layer] for layer in range(6)}
    relative = low_rank.layer_norms(relative=True)
    for layer, changes_there in of_layer.items():
        names = [change.matrix.name for change in changes_there]
        changed = np.linalg.norm([np.linalg.norm(truth[name]) for name in names])
        whole = np.linalg.norm([weights[f"{name}.weight"].double().norm().item() for name in names])
        assert relative[layer] == near(changed / whole, scale=1.0)


SMALL = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
TEXT = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
)
SIGHT = transformers.CLIPVisionConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)

# Models outside the usual causal language models: how to build one, and whether it stores weights in×out.
OTHERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "gpt2 without head": (
        lambda: transformers.GPT2Model(transformers.GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0)), True
    ),
    "imagegpt": (
        lambda: transformers.ImageGPTForCausalImageModeling(transformers.ImageGPTConfig(**SMALL)), True
    ),
    "llava": (
        lambda: transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(vision_config=SIGHT, text_config=TEXT)
        ),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_rows_are_a_weights_outputs_in_either_orientation(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    make, turned = OTHERS[kind]
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path / "base")
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.01
    model.save_pretrained(tmp_path / "full")
    own, changed = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "full"))
    expert = open_expert(tmp_path / "full")
    result = by_name(measure(expert, name="full", base=open_checkpoint(tmp_path / "base")))
    assert len(result) == (8 if turned else 14)
    for name, change in result.items():
        stored = (changed[f"{name}.weight"] - own[f"{name}.weight"]).abs().double()
        close(change.rows, stored.mean(dim=0 if turned else 1).numpy())


def test_models_unknown_to_transformers_have_no_rows(
    base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    """GPT-2 has square weights with biases: the checkpoint does not say whether they belong to a Conv1D."""
    full = full_expert(base("gpt2"), expert("gpt2", seed=1), tmp_path / "full")
    config = json.loads((full / "config.json").read_text())
    (full / "config.json").write_text(json.dumps({**config, "architectures": ["RemoteForCausalLM"]}))
    with pytest.raises(AdapterswapError, match=r"full cannot be built.*no RemoteForCausalLM"):
        measure(open_expert(full), name="full", base=open_checkpoint(base("gpt2")))


def test_a_fraction_is_the_share_of_rows_above_the_threshold(math: Path) -> None:
    changes = measure(open_adapter(math), name="math")
    rows = np.concatenate([change.rows for change in changes.modules])
    threshold = choose_threshold([changes])
    assert np.mean(rows > threshold) == pytest.approx(0.5, abs=1 / len(rows))
    table = changes.fractions(threshold)
    assert set(table.layers) == set(range(6))
    assert table.modules == [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    one = by_name(changes)["model.layers.3.mlp.up_proj"]
    assert table.cells[3, "mlp.up_proj"] == np.mean(one.rows > threshold)
    assert set(changes.fractions(0).cells.values()) == {1.0}
    assert set(changes.fractions(1e9).cells.values()) == {0.0}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_interference_matches_the_dense_matrices(
    architecture: str, base: Callable[[str], Path], expert: Callable[..., Path], tmp_path: Path
) -> None:
    folder = base(architecture)
    first, second = expert(architecture, seed=1), expert(architecture, seed=2, r=4)
    x, y, weights = deltas(folder, first), deltas(folder, second), load_base(folder).state_dict()
    full = open_expert(full_expert(folder, second, tmp_path / "full"))
    pairs = [
        compare({"x": open_adapter(first), "y": open_adapter(second)}),
        compare({"x": open_adapter(first), "y": full}, open_checkpoint(folder)),
    ]
    for pair in pairs:
        assert {module.matrix.name for module in pair.modules} == x.keys()
        for module in pair.modules:
            one, other = x[module.matrix.name], y[module.matrix.name]
            cosine = np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)
            assert module.cosine == near(cosine, scale=1)
            # The squared cosines of the angles between the subspaces; the smaller one has 4 dimensions.
            for actual, left, right in ((module.written, one, other), (module.read, one.T, other.T)):
                angles = subspace_angles(np.linalg.svd(left)[0][:, :8], np.linalg.svd(right)[0][:, :4])
                assert actual == near(np.mean(np.cos(angles) ** 2), scale=1)
            signs = np.mean(np.sign(one) != np.sign(other))
            # A number within rounding of zero may have either sign; ΔW has the rounding of full weights.
            rounding = tolerance(weights[f"{module.matrix.name}.weight"])
            unsure = np.mean((np.abs(one) < rounding) | (np.abs(other) < rounding))
            assert abs(module.conflicts / module.elements - signs) <= unsure


def test_an_expert_agrees_with_itself_and_conflicts_with_its_opposite(
    expert: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    one = open_adapter(expert(seed=1))
    turned = tmp_path / "opposite"
    turned.mkdir()
    for file in one.source.folder.iterdir():
        (turned / file.name).write_bytes(file.read_bytes())
    weights = load_file(turned / "adapter_model.safetensors")
    save_file({k: -v if "lora_B" in k else v for k, v in weights.items()}, turned / "adapter_model.safetensors")
    same, opposite = (compare({"a": one, "b": other}).by_layer() for other in (one, open_adapter(turned)))
    for layer in range(6):
        assert same[layer] == near({"cosine": 1, "written": 1, "read": 1, "sign_conflicts": 0})
        assert opposite[layer] == near({"cosine": -1, "written": 1, "read": 1, "sign_conflicts": 1})


cells = st.dictionaries(
    st.tuples(st.integers(0, 40), st.sampled_from(["attention.wq", "mlp.up_proj", "a,b \"c'"])),
    st.floats(0, 1),
    min_size=1,
)


@given(tables=st.dictionaries(st.sampled_from(["math", "Kiswahili #1", "వ"]), cells, min_size=1))
def test_a_table_survives_its_csv(tables: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "changes.csv"
    written = [FractionTable(name, None, found) for name, found in tables.items()]
    write_fractions(written, path)
    assert read_fractions(path) == written


@pytest.mark.parametrize(
    "text",
    [
        "",
        "layer,module\n1,a\n",
        "expert,layer,module,fraction_of_rows_above_threshold\n",
        "expert,layer,module,fraction_of_rows_above_threshold\nmath,-1,q,0.5\n",
        "expert,layer,module,fraction_of_rows_above_threshold\nmath,1,q,1.5\n",
        "expert,layer,module,fraction_of_rows_above_threshold\nmath,one,q,0.5\n",
        "expert,layer,module,fraction_of_rows_above_threshold\nmath,1\n",
        "expert,layer,module,fraction_of_rows_above_threshold\nmath,1,q,0.5,0.6\n",
        "expert,layer,module,fraction_of_rows_above_threshold\nmath,1,q,0.5\nmath,1,q,0.6\n",
    ],
)
def test_a_csv_that_is_not_a_table_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with refused(DataError, "path"):
        read_fractions(path)


def test_the_command_writes_tables_and_pictures(
    run: Callable[..., Result], base: Callable[[str], Path], math: Path, swahili: Path, tmp_path: Path
) -> None:
    from PIL import Image

    out = tmp_path / "out"
    names = [f"math={math}", f"swahili={swahili}"]
    result = run("analyze", *names, "--base-model", base("llama"), "-o", out, "--threshold", "0.01", "--json")
    assert result.exit_code == 0, result.stderr
    output = json.loads(result.stdout)
    written = json.loads((out / "analysis.json").read_text())
    assert written.pop("files") == sorted(path.name for path in out.iterdir())
    assert written == output
    assert output["experts"]["math"]["threshold"] == 0.01
    assert output["captions"].keys() == {"changes", "norms", "math-swahili"}
    assert "threshold is 0.01 for all experts" in output["captions"]["changes"]
    truth = deltas(base("llama"), math)["model.layers.2.self_attn.v_proj"]
    (cell,) = [
        cell
        for cell in output["experts"]["math"]["fractions_of_rows"]
        if (cell["layer"], cell["module"]) == (2, "self_attn.v_proj")
    ]
    assert cell["fraction"] == np.mean(np.abs(truth).mean(axis=1) > 0.01)
    assert [table.expert for table in read_fractions(out / "changes.csv")] == ["math", "swahili"]
    assert output["pairs"][0]["experts"] == ["math", "swahili"]
    for name in ("changes", "norms", "math-swahili"):
        check_files(out, name, 6.75)
    pictures = {path.name: np.asarray(Image.open(path)) for path in out.glob("*.png")}
    assert pictures.keys() == {"changes.png", "norms.png", "math-swahili.png"}
    assert all(len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 20 for picture in pictures.values())


def test_a_caption_names_every_threshold() -> None:
    one, other = (FractionTable(name, value, {(0, "q"): 0.5}) for name, value in (("math", 1e-5), ("swahili", 1.9e-5)))
    unknown = FractionTable("telugu", None, {(0, "q"): 0.5, (1, "q"): 0.5, (0, "k"): 0.5})
    assert "The threshold is 1e-05. Darker: a larger share." in describe_fractions([one])
    assert "1e-05 (math), 1.9e-05 (swahili)" in describe_fractions([one, other], one_scale=False)
    assert "each on its own scale" in describe_fractions([one, other], one_scale=False)
    assert "does not record it" in describe_fractions([unknown])
    assert "Hatched" in describe_fractions([unknown])  # layer 1 lacks k
    assert "Hatched" not in describe_fractions([one, other])


def test_the_command_draws_a_csv(run: Callable[..., Result], tmp_path: Path) -> None:
    source = tmp_path / "table.csv"
    write_fractions([FractionTable("math", None, {(0, "wq"): 0.25, (1, "wq"): 1.0})], source)
    result = run("analyze", "--from-csv", source, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "0.250" in result.stdout
    assert (tmp_path / "out" / "changes.csv").read_bytes() == source.read_bytes()


def test_mistakes_are_refused(
    run: Callable[..., Result], base: Callable[[str], Path], math: Path, tmp_path: Path
) -> None:
    full = full_expert(base("llama"), math, tmp_path / "full")
    for arguments, code, message in (
        ((), 2, "Pass either experts or --from-csv"),
        ((math, "--from-csv", tmp_path), 2, "Pass either experts or --from-csv"),
        ((math, "--threshold", "-1"), 2, "but must be 0 or more"),
        ((math, "--threshold", "nan"), 2, "but must be 0 or more"),
        ((full,), 2, "Pass --base-model"),
        ((full, "--base-model", base("gpt2")), 3, "the base lacks it"),
        ((tmp_path / "absent",), 3, "does not exist"),
        ((f"a={math}", f"a={math}"), 2, "experts are called 'a'"),
        ((f"a\udcff={math}",), 2, r"'a\udcff' cannot be the name of an expert"),
        (("--from-csv", tmp_path / "absent.csv"), 3, "absent.csv cannot be read: No such file or directory"),
    ):
        result = run("analyze", *arguments)
        assert result.exit_code == code, result.output
        assert message in result.stderr
    out = tmp_path / "out"
    assert json.loads(run("analyze", math, "--dry-run", "--json", "-o", out).stdout)["dry_run"] is True
    assert not out.exists()


def test_a_mixture_of_experts_is_counted_by_part(tmp_path: Path) -> None:
    """The matrices of one part of all experts go into one cell."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "expert")
    own, changed = open_checkpoint(tmp_path / "base"), open_expert(tmp_path / "expert")
    assert isinstance(changed, Checkpoint)
    changes = measure(changed, name="moe", base=own)
    table = changes.fractions(0.008)
    expected = [
        change.rows for change in changes.modules if "layers.0." in change.matrix.name and "w1" in change.matrix.name
    ]
    assert len(expected) == 3
    assert table.cells[0, "block_sparse_moe.experts.w1"] == np.mean(np.concatenate(expected) > 0.008)


def test_a_shared_initial_a_is_reported(
    run: Callable[..., Result], base: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two experts with one seed and unrelated B: their rows overlap only because of the seed."""
    folders = {}
    for name, seed in (("math", 1), ("swahili", 1), ("code", 2)):
        torch.manual_seed(seed)
        model = get_peft_model(load_base(base("llama")), LoraConfig(r=4, use_rslora=True, target_modules=["q_proj"]))
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(folders)))
                parameter.data += noise * (0.02 if "lora_A" in key else 0.1)
        folders[name] = open_adapter(_saved(model, tmp_path / name))
    together = compare({name: folders[name] for name in ("math", "swahili")})
    apart = compare({name: folders[name] for name in ("math", "code")})
    assert together.shared_start is not None
    assert together.shared_start > 0.9
    assert apart.shared_start is None
    rows = {name: load_file(tmp_path / name / "adapter_model.safetensors") for name in ("math", "swahili")}
    for module in together.modules:
        one, other = (rows[name][f"base_model.model.{module.matrix.name}.lora_A.weight"] for name in rows)
        expected = torch.nn.functional.cosine_similarity(one.double(), other.double()).mean()
        assert module.start == pytest.approx(float(expected), rel=1e-5)
    result = run("analyze", *(tmp_path / name for name in folders))
    assert result.exit_code == 0
    assert "math and swahili were trained from the same initial A" in result.stderr
    assert "math and code were" not in result.stderr
    content = json.loads(run("analyze", *(tmp_path / name for name in folders), "--json").stdout)
    assert [pair["shared_start"] is None for pair in content["pairs"]] == [False, True, True]


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_tables_of_many_experts_fit_80_columns(
    run: Callable[..., Result], expert: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    named = [f"expert-number-{seed}={expert(seed=seed)}" for seed in range(4)]
    result = run("analyze", *named)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    rows = [line for line in result.stdout.splitlines() if line.split()[:1] == ["5"]]
    assert len(rows) == 2 + 6  # two tables of experts, and one per pair


def test_an_expert_outside_the_layers_is_refused(run: Callable[..., Result], expert: Callable[..., Path]) -> None:
    head = expert(seed=1, target_modules=["lm_head"])
    result = run("analyze", f"head={head}", expert(seed=2))
    assert result.exit_code == 3
    assert "head changes no matrix in the layers" in result.stderr


def test_a_layer_beyond_any_model_is_refused(run: Callable[..., Result], math: Path, tmp_path: Path) -> None:
    tensors = load_file(math / "adapter_model.safetensors")
    folder = tmp_path / "deep"
    folder.mkdir()
    save_file({k.replace(".5.", ".99999."): t for k, t in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((math / "adapter_config.json").read_text())
    result = run("analyze", folder, "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "99999" in result.stderr
    table = tmp_path / "table.csv"
    table.write_text("expert,layer,module,fraction_of_rows_above_threshold\na,99999,q_proj,0.5\n")
    assert run("analyze", "--from-csv", table).exit_code == 3
    table.write_text("expert,layer,module,fraction_of_rows_above_threshold\na,499,q_proj,0.5\n")
    assert [layer for layer, _ in read_fractions(table)[0].cells] == [499]
    drawn = 499 if ALL else 125  # a picture of 500 layers takes fifteen seconds
    table.write_text(f"expert,layer,module,fraction_of_rows_above_threshold\na,{drawn},q_proj,0.5\n")
    assert run("analyze", "--from-csv", table, "-o", tmp_path / "pictures").exit_code == 0


def test_subspaces_come_from_the_product_not_its_factors(tmp_path: Path) -> None:
    """A repeats its first row, and B ignores another row: ΔW has rank 1."""
    random = np.random.default_rng(0)
    places = []
    for name in ("one", "other"):
        content = crafting.tensors(layers=1, rank=3, seed=len(name), width=16)
        for key, (dtype, shape, raw) in content.items():
            values = np.frombuffer(raw, np.float32).reshape(shape).copy()
            if "lora_A" in key:
                values[1] = values[0]
                values[2] = random.standard_normal(shape[1])
            else:
                values[:, 2] = 0
            content[key] = dtype, shape, values.tobytes()
        places.append(crafting.adapter(tmp_path / name, content, crafting.config(r=3)))
    one, other = map(open_adapter, places)
    for module in compare({"one": one, "other": other}).modules:
        x, y = (dense(place, module.matrix.name) for place in places)
        assert np.linalg.matrix_rank(x) == np.linalg.matrix_rank(y) == 1
        for actual, left, right in ((module.written, x, y), (module.read, x.T, y.T)):
            (angle,) = subspace_angles(np.linalg.svd(left)[0][:, :1], np.linalg.svd(right)[0][:, :1])
            assert actual == near(np.cos(angle) ** 2, scale=1)
        assert module.by_chance == (1 / x.shape[0], 1 / x.shape[1])


def test_signs_of_small_changes_are_counted(tmp_path: Path) -> None:
    small = crafting.tensors(layers=1, seed=1)
    for key, (dtype, shape, raw) in small.items():
        small[key] = dtype, shape, (np.frombuffer(raw, np.float32) * np.float32(1e-13)).tobytes()
    one, other = crafting.adapter(tmp_path / "one", small), crafting.adapter(tmp_path / "other", small)
    for module in compare({"one": open_adapter(one), "other": open_adapter(other)}).modules:
        assert (module.conflicts, module.elements) == (0, 32)
        assert module.cosine == near(1, scale=1)


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_measurements_ignore_how_the_factors_share_their_size(size: float, tmp_path: Path) -> None:
    experts = {}
    for seed, name in enumerate(("one", "other", "third")):
        content = crafting.tensors(layers=1, seed=seed, width=8)
        experts[name] = crafting.adapter(tmp_path / name, content)
        if name == "one":
            for key, (dtype, shape, raw) in content.items():
                values = np.frombuffer(raw, np.float32) * np.float32(size if "lora_A" in key else 1 / size)
                content[key] = dtype, shape, values.tobytes()
            experts["uneven"] = crafting.adapter(tmp_path / "uneven", content)
    opened = {name: open_adapter(path) for name, path in experts.items()}
    plain, uneven = (
        analyze({"x": opened[name], "other": opened["other"], "third": opened["third"]}, threshold=0.1)
        for name in ("one", "uneven")
    )
    for change, same in zip(plain.changes[0].modules, uneven.changes[0].modules, strict=True):
        close(same.rows, change.rows)
        assert same.norm == near(change.norm)
    for pair, same_pair in zip(plain.pairs, uneven.pairs, strict=True):
        assert pair.experts == same_pair.experts
        for module, same_module in zip(pair.modules, same_pair.modules, strict=True):
            assert (module.conflicts, module.elements) == (same_module.conflicts, same_module.elements)
            for key in ("cosine", "written", "read", "start"):
                assert getattr(same_module, key) == near(getattr(module, key), scale=1)


def test_three_experts_measure_like_pairs_and_like_one(tmp_path: Path) -> None:
    """One pass through all three; some matrices exist in only one expert."""
    experts = {}
    for seed, name in enumerate(("one", "other", "third")):
        content = crafting.tensors(layers=1 + seed, seed=seed, rank=2 + seed, width=8)
        experts[name] = open_adapter(crafting.adapter(tmp_path / name, content, crafting.config(r=2 + seed)))
    result = analyze(experts, threshold=0.1)
    for changes in result.changes:
        alone = measure(experts[changes.expert], name=changes.expert)
        assert [change.matrix for change in changes.modules] == [change.matrix for change in alone.modules]
        for change, same in zip(changes.modules, alone.modules, strict=True):
            exact = dense(tmp_path / changes.expert, change.matrix.name) * 4 / rank_of(experts, changes.expert) ** 0.5
            close(change.rows, np.abs(exact).mean(axis=1))
            assert change.norm == near(float(np.linalg.norm(exact)))
            assert same.norm == near(change.norm)
    assert [pair.experts for pair in result.pairs] == [("one", "other"), ("one", "third"), ("other", "third")]
    for pair in result.pairs:
        two = compare({name: experts[name] for name in pair.experts})
        for module, same_module in zip(pair.modules, two.modules, strict=True):
            x, y = (dense(tmp_path / name, module.matrix.name) for name in pair.experts)
            expected = float(np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y))
            assert module.cosine == near(expected, scale=1)
            assert same_module.cosine == near(expected, scale=1)
            assert module.conflicts == same_module.conflicts == int(np.sum(x * y < 0))
            overlaps = []
            for left, right in ((x, y), (x.T, y.T)):
                ranks = np.linalg.matrix_rank(left), np.linalg.matrix_rank(right)
                angles = subspace_angles(np.linalg.svd(left)[0][:, : ranks[0]], np.linalg.svd(right)[0][:, : ranks[1]])
                overlaps.append(float(np.sum(np.cos(angles) ** 2)) / min(ranks))
            assert [module.written, module.read] == near(overlaps, scale=1)


def rank_of(experts: dict[str, Any], name: str) -> int:
    return next(iter(experts[name].modules.values())).rank


def dense(folder: Path, name: str) -> np.ndarray:
    weights = load_file(folder / "adapter_model.safetensors")
    b, a = (weights[f"base_model.model.{name}.lora_{factor}.weight"].double().numpy() for factor in "BA")
    return np.asarray(b @ a)


def test_the_note_on_rows_says_what_is_averaged(run: Callable[..., Result], tmp_path: Path) -> None:
    """Four changed rows in one matrix and eight unchanged rows in another average to 1/2, not 1/3."""
    content = crafting.tensors(layers=1)
    for key, (dtype, shape, raw) in content.items():
        if "q_proj" in key:
            content[key] = dtype, shape, (np.frombuffer(raw, np.float32) * np.float32(1e-3)).tobytes()
    result = run("analyze", crafting.adapter(tmp_path / "one", content), "--threshold", 0.01)
    assert "0.500" in result.stdout
    assert "averaged over the matrices of a layer" in result.stderr


def test_a_change_beyond_float32_is_refused_by_name(tmp_path: Path) -> None:
    """Both factors are finite, but their product is not."""
    huge = {
        name: (dtype, shape, np.full(shape, 1e30, np.float32).tobytes())
        for name, (dtype, shape, _) in crafting.tensors(layers=1).items()
    }
    one, other = (open_adapter(crafting.adapter(tmp_path / name, huge)) for name in ("one", "other"))
    threshold = Composition(task="one", language="other", num_layers=1, method="soup", row_threshold=1.0)
    attempts: list[Callable[[], object]] = [
        lambda: measure(one, name="one"),
        lambda: compare({"one": one, "other": other}),
        lambda: Resolved.of(compose(threshold, {"one": one, "other": other})),
    ]
    for attempt in attempts:
        with refused(UnsupportedError, match="overflows F32") as caught:
            attempt()
        assert "layers.0." in str(caught.value)


def norms_of(count: int) -> dict[str, dict[int, float]]:
    members = [f"{family}{i}" for family in ("math", "sw") for i in range(count)]
    return {name: {layer: place + layer / 8 for layer in range(32)} for place, name in enumerate(members)}


@pytest.mark.parametrize("width", [3.25, 6.75])
def test_pictures_are_readable_at_column_width(width: float) -> None:
    cells = {(layer, module): (layer + 1) / 40 for layer in range(32) for module in MODULES}
    del cells[3, "q_proj"]
    tables = [FractionTable(f"a long name of expert number {i}", None, cells) for i in range(6)]
    with STYLE.applied():
        made = [draw_fractions(tables, width), draw_norms(norms_of(4), width, relative=True)]
    for figure in made:
        check_figure(figure, width)
    (hatched,) = (patch for patch in made[0].axes[0].patches if patch.get_hatch())
    assert (hatched.get_x() + 0.5, hatched.get_y() + 0.5) == (tables[0].modules.index("q_proj"), 3)


def test_families_share_a_colour_and_members_differ() -> None:
    with STYLE.applied():
        figure = draw_norms(norms_of(4), 6.75, relative=False)
    assert [axes.get_title() for axes in figure.axes] == ["math", "sw"]  # more than six experts: a panel for a family
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    assert len(lines) == 8
    for family in ("math", "sw"):
        members = [line for name, line in lines.items() if str(name).startswith(family)]
        assert len({line.get_color() for line in members}) == 1
        assert len({line.get_marker() for line in members}) == 4
    assert lines["math0"].get_color() != lines["sw0"].get_color()
    for name, norms in norms_of(4).items():
        assert list(lines[name].get_ydata()) == list(norms.values())
    with STYLE.applied():
        panels = draw_norms(norms_of(2), 6.75, relative=False).axes
    assert [len(axes.lines) for axes in panels] == [4]
    assert [family_of(name) for name in ("math-2", "swahili #3", "7", "tulu")] == ["math", "swahili", "7", "tulu"]
