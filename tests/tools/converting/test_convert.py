"""`convert` against PEFT: the logits with each kind of adapter, PEFT's conversion to LoRA, PEFT's loading."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pico_models as pico
import pytest
import torch
from click.testing import Result
from conftest import load_base, logits
from peft import get_peft_model
from pico_models import copied, edit_json, in_peft
from refusals import refused
from safetensors.torch import load_file, save_file
from tolerances import close

import adapterswap
from adapterswap.kit.errors import (
    AdapterswapError,
    ArgumentError,
    BaseModelError,
    CompositionError,
    ExpertError,
    NotFoundError,
    OutputError,
    UnsupportedError,
)
from adapterswap.tools.deltas import CONVERTIBLE, Conversion

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about its own defaults

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
FULL = 48  # the highest rank that a ΔW of the pico model can have

# Kind → PEFT's config.
KINDS: dict[str, Callable[..., Any]] = {
    "DORA": lambda **o: peft.LoraConfig(r=4, use_dora=True, use_rslora=True, **o),
    "ADALORA": lambda **o: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, **o),
    "LOHA": lambda **o: peft.LoHaConfig(r=3, **o),
    "LOKR": lambda **o: peft.LoKrConfig(r=4, **o),
    "OFT": lambda **o: peft.OFTConfig(r=0, oft_block_size=4, **o),
    "BOFT": lambda **o: peft.BOFTConfig(boft_block_size=4, **o),
    "IA3": lambda **o: peft.IA3Config(feedforward_modules=["down_proj"], **o),
    "VERA": lambda **o: peft.VeraConfig(r=4, **o),
    "HRA": lambda **o: peft.HRAConfig(r=4, **o),
    "FOURIERFT": lambda **o: peft.FourierFTConfig(n_frequency=30, **o),
    "VBLORA": lambda **o: peft.VBLoRAConfig(r=2, vector_length=16, num_vectors=8, **o),
    "RANDLORA": lambda **o: peft.RandLoraConfig(r=4, **o),
    "MISS": lambda **o: peft.MissConfig(r=4, **o),
    "SHIRA": lambda **o: peft.ShiraConfig(r=2, **o),
    "C3A": lambda **o: peft.C3AConfig(block_size=8, **o),
    "DELORA": lambda **o: peft.DeloraConfig(r=4, **o),
    "WAVEFT": lambda **o: peft.WaveFTConfig(n_frequency=30, **o),
    "GRALORA": lambda **o: peft.GraloraConfig(r=4, gralora_k=2, **o),
}


def trained(base: Path, folder: Path, kind: str, targets: Sequence[str] = TARGETS, **options: Any) -> Path:
    config = KINDS[kind](target_modules=list(targets), task_type="CAUSAL_LM", **options)
    return pico.trained(base, config, folder, seed=7)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_an_rslora(kind: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    """At full rank the LoRA computes the same as PEFT with the adapter itself."""
    adapter = trained(base("llama"), tmp_path / "in", kind)
    own = in_peft(base("llama"), adapter)
    outcome = adapterswap.convert(adapter, tmp_path / "out", rank=FULL)
    assert outcome.peft_type == kind
    assert outcome.relative_error < 1e-5
    assert len(outcome.modules) == len(TARGETS) * 6
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["peft_type"] == "LORA"
    assert config["use_rslora"]
    result = in_peft(base("llama"), tmp_path / "out")
    assert not torch.allclose(logits(own), logits(load_base(base("llama"))), atol=1e-3)
    close(logits(result), logits(own), depth=6)
    assert adapterswap.verify(tmp_path / "out", {"in": adapter}).equal
    swapped = adapterswap.layer_swap(tmp_path / "out", adapterswap.open_adapter(tmp_path / "out"), bottom=1, top=1)
    assert len(swapped.modules) == len(outcome.modules)


def test_verify_says_what_it_compared(base: Callable[[str], Path], run: Callable[..., Result], tmp_path: Path) -> None:
    """Nothing is converted again, and without the source only the files are compared."""
    adapter = trained(base("llama"), tmp_path / "in", "LOHA")
    adapterswap.convert(adapter, tmp_path / "out", rank=2)
    source = ["--expert", f"in={adapter}"]
    assert run("verify", tmp_path / "out").stdout == "equal: the files match the record\n"
    message = "equal: the files and the source match the record; nothing was converted again\n"
    assert run("verify", tmp_path / "out", *source).stdout == message
    edit_json(adapter / CONFIG, alpha=3)
    changed = run("verify", tmp_path / "out", *source).stdout
    assert changed == f"source changed: in's {CONFIG} differs from what was converted (SHA-256)\n"


def test_every_accepted_kind_is_tested() -> None:
    assert {"LORA", *KINDS} - {"DORA"} == set(CONVERTIBLE)


def test_the_error_matches_pefts_conversion(base: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = trained(base("llama"), tmp_path / "in", "LOHA")
    model = in_peft(base("llama"), adapter)
    deltas = {
        name: module.get_delta_weight("default").double()
        for name, module in model.get_base_model().named_modules()
        if hasattr(module, "get_delta_weight")
    }
    result = adapterswap.convert(adapter, tmp_path / "out", rank=4)
    _, theirs = peft.convert_to_lora(model, rank=4)
    for module in result.modules:
        key = f"base_model.model.{module.name}.lora_"
        product = theirs[f"{key}B.weight"].double() @ theirs[f"{key}A.weight"].double()
        delta = deltas[module.name]
        assert module.error == pytest.approx(float((delta - product).norm() / delta.norm()), rel=1e-3)
        assert module.norm == pytest.approx(float(delta.norm()), rel=1e-4)
        assert module.rank == 4
    written = load_file(tmp_path / "out" / WEIGHTS)
    worst = result.worst
    key = f"base_model.model.{worst.name}.lora_"
    ours = written[f"{key}B.weight"].double() @ written[f"{key}A.weight"].double()  # scale 1
    error = float((deltas[worst.name] - ours).norm() / deltas[worst.name].norm())
    assert worst.error == pytest.approx(error, rel=1e-3)
    assert result.relative_error <= worst.error
    assert "converted from LOHA to rsLoRA of rank 4: " in (tmp_path / "out" / "README.md").read_text()


def test_the_bound_on_the_error(base: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = trained(base("llama"), tmp_path / "in", "LOHA")
    result = adapterswap.convert(adapter, tmp_path / "out", max_error=0.2)
    assert result.worst.error <= 0.2
    assert len({module.rank for module in result.modules}) > 1 or result.modules[0].rank < FULL
    with refused(UnsupportedError, "max_error"):
        adapterswap.convert(adapter, tmp_path / "none", rank=1, max_error=0.2)
    with refused(ArgumentError, "rank"):
        adapterswap.convert(adapter, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with refused(BaseModelError, "base_model"):
        moved = copied(adapter, tmp_path / "moved", base_model_name_or_path=None)
        adapterswap.convert(moved, tmp_path / "none", rank=4)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_converted_slice_is_still_one(pickled: bool, math: Path, tmp_path: Path) -> None:
    """Otherwise its missing layers would pass for the base's."""
    part = adapterswap.slice_layers(math, "0-1,5", num_layers=6).write(tmp_path / "slice")
    if pickled:
        torch.save(load_file(part / "adapter_model.safetensors"), part / "adapter_model.bin")
        (part / "adapter_model.safetensors").unlink()
    adapterswap.convert(part, tmp_path / "out", dtype="bfloat16", allow_pickle=pickled)
    converted = adapterswap.open_adapter(tmp_path / "out")
    assert str(converted.kept_layers) == "layers 0-1,5"
    with refused(CompositionError):
        adapterswap.layer_swap(tmp_path / "out", math, num_layers=6, bottom=1, top=1)
    assert adapterswap.verify(tmp_path / "out", {"slice": part}).equal


def test_a_lora_in_another_dtype_and_layout(math: Path, base: Callable[[str], Path], tmp_path: Path) -> None:
    own = logits(in_peft(base("llama"), math))
    for layout in ("exact", "portable"):
        for dtype in (None, "float32", "float16", "bfloat16"):
            out = tmp_path / f"{layout}-{dtype}"
            result = adapterswap.convert(math, out, layout=layout, dtype=dtype)
            tensors = load_file(out / WEIGHTS)
            wanted = getattr(torch, dtype or "float32")
            assert {tensor.dtype for tensor in tensors.values()} == {wanted}
            assert result.relative_error < {None: 1e-6, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
            assert (result.relative_error > 1e-5) == (dtype in ("float16", "bfloat16"))
            assert adapterswap.verify(out, {math.name: math}).equal
            if dtype in (None, "float32"):
                close(logits(in_peft(base("llama"), out)), own, depth=6)
            config = json.loads((out / CONFIG).read_text())
            assert config["use_rslora"] == (layout == "exact")
    plain = adapterswap.convert(math, tmp_path / "plain")
    assert (plain.out_path / WEIGHTS).read_bytes() == (math / WEIGHTS).read_bytes() or plain.relative_error == 0
    with refused(UnsupportedError, "max_error"):
        adapterswap.convert(math, tmp_path / "coarse", dtype="bfloat16", max_error=1e-4)
    with refused(UnsupportedError, "max_error"):
        adapterswap.convert(math, tmp_path / "low", rank=1, max_error=0.01)


def test_a_pickled_adapter(math: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    torch.save(load_file(math / WEIGHTS), folder / "adapter_model.bin")
    (folder / CONFIG).write_bytes((math / CONFIG).read_bytes())
    with refused(UnsupportedError, "allow_pickle"):
        adapterswap.convert(folder, tmp_path / "out")
    result = run("convert", folder, "-o", tmp_path / "out", "--allow-pickle", "--json", exit_code=0)
    output = json.loads(result.stdout)
    assert output["pickled"]
    assert output["relative_error"] == 0
    ours, theirs = load_file(tmp_path / "out" / WEIGHTS), load_file(math / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert run("verify", tmp_path / "out", "--expert", f"pickled={folder}").exit_code == 0
    assert "converted from a pickled file (adapter_model.bin)" in (tmp_path / "out" / "README.md").read_text()
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")
    assert run("verify", tmp_path / "out", "--expert", f"pickled={folder}").exit_code == 1


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("hostile-was-here"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "content",
    [
        lambda path: path.write_bytes(pickle.dumps({"a": Hostile()})),
        lambda path: torch.save({"a": Hostile()}, path),
        lambda path: torch.save([torch.ones(2)], path),
        lambda path: torch.save({"a": "text"}, path),
        lambda path: torch.save({"a": torch.eye(2).to_sparse()}, path),
        lambda path: path.write_bytes(b"nothing"),
    ],
)
def test_a_hostile_pickle_runs_nothing(
    content: Callable[[Path], object], math: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pickled"
    folder.mkdir()
    content(folder / "adapter_model.bin")
    (folder / CONFIG).write_bytes((math / CONFIG).read_bytes())
    with refused(ExpertError):
        adapterswap.convert(folder, tmp_path / "out", allow_pickle=True)
    assert not (tmp_path / "hostile-was-here").exists()
    assert not (tmp_path / "out").exists()


# The kind, its base, changes of its config, the base to convert with; the error's class, and what the message names.
# (IA)³ scales the output of a linear layer with its bias, and Qwen2's projections have biases.
REFUSED: list[tuple[str, str, dict[str, Any], str | None, type[AdapterswapError], str]] = [
    ("DORA", "llama", {"init_lora_weights": "pissa"}, None, UnsupportedError, "pissa"),
    ("DORA", "llama", {"peft_type": "PROMPT_TUNING"}, None, UnsupportedError, "PROMPT_TUNING"),
    ("DORA", "llama", {"peft_type": None}, None, UnsupportedError, "null|None"),
    ("DORA", "llama", {"use_dora": False, "lora_bias": True}, None, UnsupportedError, "lora_bias"),
    ("IA3", "qwen2", {}, None, UnsupportedError, "bias of model.layers.0.self_attn"),
    ("LOHA", "llama", {}, "gpt2", ExpertError, "PEFT"),
    ("DORA", "llama", {"layer_replication": [[0, 3], [1, 4]]}, None, UnsupportedError, "layer_replication"),
    ("ADALORA", "llama", {"layer_replication": [[0, 3], [1, 4]]}, None, UnsupportedError, "layer_replication"),
    ("LOHA", "llama", {"init_weights": False}, None, ExpertError, r"layers\.3\.mlp\.up_proj"),
    ("LOHA", "llama", {"modules_to_save": ["norm"]}, None, ExpertError, r"layers\.0\.input_layernorm"),
]


@pytest.mark.parametrize(("kind", "base_name", "config", "other", "error", "named"), REFUSED, ids=str)
def test_what_cannot_be_converted(
    kind: str, base_name: str, config: dict[str, Any], other: str | None, error: type[AdapterswapError], named: str,
    base: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    """PEFT starts a module at random if its config says so, or if some of its tensors are missing."""
    adapter = copied(trained(base(base_name), tmp_path / "in", kind), tmp_path / "odd", **config)
    if error is ExpertError and other is None:
        without(adapter, "layers.3.mlp.up_proj")
    with refused(error, "adapter", match=named):
        adapterswap.convert(adapter, tmp_path / "out", rank=4, base_model=other and str(base(other)))


@pytest.mark.parametrize(("config", "options"), [({}, {"names": "transformers4"}), ({"use_dora": True}, {"rank": 2})])
def test_a_base_that_cannot_be_reached_is_asked_for(
    config: dict[str, Any], options: dict[str, Any], math: Path, tmp_path: Path
) -> None:
    adapter = copied(math, tmp_path / "named", base_model_name_or_path="org/base-bnb-4bit", **config)
    with refused(NotFoundError, "base_model", match=r"org/base-bnb-4bit .* Pass `base_model` with the base's folder"):
        adapterswap.convert(adapter, tmp_path / "out", **options)
    with refused(NotFoundError, "adapter"):  # which no base would help
        adapterswap.convert("org/adapter", tmp_path / "out", **options)


def without(adapter: Path, name: str) -> None:
    """Remove the tensors whose key contains `name`."""
    tensors = load_file(adapter / WEIGHTS)
    save_file({key: tensor for key, tensor in tensors.items() if name not in key}, adapter / WEIGHTS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("module", ["mlp", "model.layers.0.self_attn", "norm"])
@pytest.mark.parametrize("kind", ["DORA", "LOHA", "VBLORA"])
def test_modules_trained_in_full_are_kept(kind: str, module: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = trained(base("llama"), tmp_path / "in", kind, ["o_proj"], modules_to_save=[module])
    own = in_peft(base("llama"), adapter)
    adapterswap.convert(adapter, tmp_path / "out", rank=FULL)
    result = in_peft(base("llama"), tmp_path / "out")
    close(logits(result), logits(own), depth=6)
    assert any(f"{module}." in name and ".lora_" not in name for name in load_file(tmp_path / "out" / WEIGHTS))


@pytest.mark.parametrize(
    ("kind", "bias"),
    [("DORA", "all"), ("DORA", "lora_only"), ("ADALORA", "all"), ("OFT", "oft_only"), ("BOFT", "all"), ("VERA", "all")],
)
def test_trained_biases_are_kept(kind: str, bias: str, base: Callable[[str], Path], tmp_path: Path) -> None:
    """Those of adapted modules and, with `all`, of the others."""
    adapter = trained(base("qwen2"), tmp_path / "in", kind, bias=bias)
    stored = sum(name.endswith(".bias") for name in load_file(adapter / WEIGHTS))
    assert stored == {"all": 18}.get(bias, 12)
    own = in_peft(base("qwen2"), adapter)
    adapterswap.convert(adapter, tmp_path / "out", rank=FULL)
    assert sum(name.endswith(".bias") for name in load_file(tmp_path / "out" / WEIGHTS)) == stored
    result = in_peft(base("qwen2"), tmp_path / "out")
    close(logits(result), logits(own), depth=6)


def test_a_module_without_tensors_is_unchanged_and_one_without_some_is_refused(
    base: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = trained(base("llama"), tmp_path / "in", "LOHA")
    without(adapter, "layers.3.mlp.up_proj.hada_w1_a")
    with refused(ExpertError, "adapter", match=r"layers\.3\.mlp\.up_proj\.hada_w1_a"):
        adapterswap.convert(adapter, tmp_path / "out", rank=4)
    without(adapter, "layers.3.mlp.up_proj")
    unchanged = adapterswap.convert(adapter, tmp_path / "out", rank=4)
    assert "model.layers.3.mlp.up_proj" not in {module.name for module in unchanged.modules}


def test_convert_on_the_command_line(math: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", math, "-o", out, "--dtype", "bfloat16", "--dry-run", exit_code=0)
    assert not out.exists()
    result = run("convert", math, "-o", out, "--dtype", "bfloat16", "--layout", "portable", exit_code=0)
    assert result.stdout.startswith("LORA: 42 modules, rank 8")
    assert "relative error of ΔW: 0.00" in result.stderr
    run("convert", math, "-o", out, exit_code=3)
    with refused(OutputError, "out_path"):
        adapterswap.convert(math, out)
    assert isinstance(adapterswap.convert(math, out, overwrite=True), Conversion)


def with_saved(base: Path, folder: Path, saved: list[str], *, change: int = 3, **options: Any) -> Path:
    """A LoRA with whole modules, whose weights differ from the base's by a matrix of rank `change`."""
    settings = {"r": 4, "use_rslora": True, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options
    config = peft.LoraConfig(modules_to_save=saved, **settings)
    model = get_peft_model(load_base(base), config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name.endswith("bias"):
            continue
        random = torch.randn(parameter.shape, generator=generator) * 0.1
        if "lora_" in name or parameter.dim() == 1:
            parameter.data = parameter.data + random
        else:
            u, sigma, v = torch.linalg.svd(random, full_matrices=False)
            parameter.data = parameter.data + (u[:, :change] * sigma[:change]) @ v[:change]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "saved"),
    [
        ("llama", ["embed_tokens", "lm_head"]),
        ("gpt2", ["wte", "h.1.attn.c_proj"]),
        ("llama", ["layers.0.mlp.gate_proj"]),
    ],
    ids=str,
)
def test_modules_trained_in_full_become_lora(
    architecture: str, saved: list[str], base: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"target_modules": ["c_fc"], "fan_in_fan_out": True} if architecture == "gpt2" else {}
    adapter = with_saved(base(architecture), tmp_path / "in", saved, **options)
    own = in_peft(base(architecture), adapter)
    outcome = adapterswap.convert(adapter, tmp_path / "out", saved_rank=3)
    opened = adapterswap.open_adapter(tmp_path / "out")
    assert not opened.saved
    errors = {module.name: module.error for module in outcome.modules}
    assert len(errors) == len(opened.modules)
    for name in saved:
        (module,) = (module for module in opened.modules.values() if module.name.endswith(name))
        assert module.rank == 3
        assert errors[module.name] < 1e-5
    result = in_peft(base(architecture), tmp_path / "out")
    assert not torch.allclose(logits(own), logits(load_base(base(architecture))), atol=1e-3)
    close(logits(result), logits(own), depth=6)
    assert adapterswap.verify(tmp_path / "out", {"in": adapter}).equal


def test_the_error_of_a_lower_rank_is_the_smallest_possible(base: Callable[[str], Path], tmp_path: Path) -> None:
    """Eckart and Young: the root of the sum of squares of the truncated singular values."""
    adapter = with_saved(base("llama"), tmp_path / "in", ["lm_head"], change=8)
    key = "base_model.model.lm_head.weight"
    delta = load_file(adapter / WEIGHTS)[key] - load_base(base("llama")).lm_head.weight.detach()
    sigma = torch.linalg.svdvals(delta.double())
    result = adapterswap.convert(adapter, tmp_path / "out", saved_rank=2)
    (head,) = (module for module in result.modules if module.name == "lm_head")
    assert head.error == pytest.approx(float((sigma[2:].square().sum() / sigma.square().sum()).sqrt()), rel=1e-4)
    assert {module.error for module in result.modules if module is not head} == {0.0}
    record = json.loads((tmp_path / "out" / "adapterswap.json").read_text())["conversion"]
    assert record["saved_rank"] == 2
    assert record["modules"]["lm_head"]["relative_error"] == head.error
    with refused(UnsupportedError, "max_error"):
        adapterswap.convert(adapter, tmp_path / "none", saved_rank=2, max_error=0.01)
    small = adapterswap.convert(adapter, tmp_path / "small", saved_rank=40, max_error=0.01)
    assert {module.rank for module in small.modules if module.name == "lm_head"} == {8}


def test_modules_that_lora_cannot_hold(base: Callable[[str], Path], run: Callable[..., Result], tmp_path: Path) -> None:
    adapter = with_saved(base("llama"), tmp_path / "norm", ["model.norm", "lm_head"])
    with refused(UnsupportedError, "saved_rank"):
        adapterswap.convert(adapter, tmp_path / "out", saved_rank=4)
    content = load_file(adapter / WEIGHTS)
    key = "base_model.model.model.norm.weight"
    save_file(content | {key: load_base(base("llama")).model.norm.weight.detach()}, adapter / WEIGHTS)
    run("convert", adapter, "-o", tmp_path / "out", "--saved-rank", 4, exit_code=0)  # the norm now equals the base's
    assert adapterswap.open_adapter(tmp_path / "out").saved == {}
    grown = torch.zeros(100, content["base_model.model.lm_head.weight"].shape[1])
    save_file(content | {"base_model.model.lm_head.weight": grown}, adapter / WEIGHTS)
    with refused(BaseModelError, "base_model"):
        adapterswap.convert(adapter, tmp_path / "grown", saved_rank=4)
    with refused(ArgumentError, "saved_rank"):
        adapterswap.convert(adapter, tmp_path / "grown", saved_rank=0)
