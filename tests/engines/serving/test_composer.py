"""From names to folders: the right adapter is composed once; what does not fit is refused before writing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tolerances import close
from transformers import AutoModelForCausalLM

import adapterswap
from adapterswap import AdapterswapError, open_adapter, open_checkpoint
from adapterswap.core.writing.copies import Comparable
from adapterswap.engines.serving import Cache, Manifest, NamedComposer, UnknownNameError
from adapterswap.engines.serving.vllm import choose_rank
from adapterswap.kit.errors import BaseModelError, CompositionError, ExpertError, RunError, UnsupportedError

from .cases import COMPOSITIONS, PROMPTS
from .conftest import LAYERS, Reference, load, make_expert

Compose = Callable[..., NamedComposer]


@pytest.fixture
def composer(served_base: Callable[[str], Path], experts: Path, tmp_path: Path) -> Compose:
    """`composer(rank=16, allow=(…))` serves the experts of this test."""

    def make(rank: int | None = 16, architecture: str = "llama", **manifest: Any) -> NamedComposer:
        settings = {**Manifest.read(experts).model_dump(), **manifest}
        cache = Cache(tmp_path / "cache")
        return NamedComposer(Manifest(**settings), str(served_base(architecture)), cache, rank)

    return make


def entries(composer: NamedComposer) -> set[str]:
    folder = composer.cache.root / "compositions"
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


def test_peft_answers_with_the_folders_as_full_weights_do(
    composer: Compose, served_base: Callable[[str], Path], experts: Path
) -> None:
    served, reference = composer(), Reference(served_base("llama"), experts)
    for name, zones in COMPOSITIONS.items():
        model = PeftModel.from_pretrained(load(served_base("llama")), served.folder(name))
        _, (expected,) = reference.answer(zones, PROMPTS[0], 1)
        with torch.no_grad():
            result = torch.log_softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1], -1)
        close(result, torch.tensor(list(expected.values())), depth=LAYERS)


def test_a_chain_is_one_expert(served_base: Callable[[str], Path], experts: Path, tmp_path: Path) -> None:
    """Its folders equal PEFT's merge of one adapter after the other, whether or not a record tells of the chain."""
    base = served_base("llama")
    merged = {
        "recorded": adapterswap.merge(experts / "math", base, out_path=tmp_path / "recorded"),
        "unrecorded": tmp_path / "unrecorded",
    }
    PeftModel.from_pretrained(load(base), experts / "math").merge_and_unload().save_pretrained(merged["unrecorded"])
    for kind, folder in merged.items():
        top = make_expert(folder, tmp_path / f"top-{kind}", seed=9, r=2)
        content = {"experts": {"tutor": {"chain": ["experts/math", top.name]}, "swahili": "experts/swahili"}}
        (tmp_path / "experts.yaml").write_text(json.dumps(content))
        manifest = Manifest.read(tmp_path / "experts.yaml")
        composer = NamedComposer(manifest, str(base), Cache(tmp_path / f"cache-{kind}"), 32)
        assert manifest.names == ("tutor", "swahili")
        assert choose_rank(composer, {name: composer.open(name) for name in manifest.adapters}) == 32  # (8 + 2) + 8
        both = PeftModel.from_pretrained(load(base), experts / "math").merge_and_unload()
        both = PeftModel.from_pretrained(both, top).merge_and_unload().state_dict()
        outer = PeftModel.from_pretrained(load(base), experts / "swahili").merge_and_unload().state_dict()
        for name, own in (("tutor", ()), ("tutor+swahili@bottom=2,top=1", (0, 1, LAYERS - 1))):
            found = PeftModel.from_pretrained(load(base), composer.folder(name)).merge_and_unload().state_dict()
            for key, weight in found.items():
                side = outer if any(f".layers.{layer}." in key for layer in own) else both
                close(weight, side[key], name=key, depth=2)
        assert composer.folder("tutor+swahili@bottom=0,top=6") == composer.folder("tutor+swahili@bottom=6,top=0")
        with pytest.raises(UnknownNameError):
            composer.folder("tutor-2")
    alone = Manifest(experts={"top": str(tmp_path / "top-recorded"), "swahili": str(experts / "swahili")})
    with refused(ExpertError, "base_model"):
        NamedComposer(alone, str(base), Cache(tmp_path / "alone"), 32).folder("top+swahili")


def test_every_folder_is_in_the_layout_that_all_engines_read(composer: Compose) -> None:
    served = composer()
    for name in COMPOSITIONS:
        config = json.loads((served.folder(name) / "adapter_config.json").read_text())
        assert (config["rank_pattern"], config["alpha_pattern"], config["modules_to_save"]) == ({}, {}, None)
        assert config["r"] <= 16
        kept = served.plan(name).experts.keys() <= {"math", "swahili"} and "transition" not in name
        kept = kept and "soup" not in name  # experts of one rank and scale: the tensors stay as they are
        if kept:
            assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (True, 8, 16)


def test_the_same_composition_is_the_same_folder(composer: Compose) -> None:
    served = composer()
    first = served.folder("math+swahili@bottom=2,top=1")
    assert served.folder("math+swahili@top=1,bottom=2") == first
    assert served.folder("math+swahili") == served.folder("math+swahili@bottom=1,top=0")
    assert served.folder("math+swahili") != first
    assert len(entries(served)) == 2
    assert composer().folder("math+swahili@bottom=2,top=1") == first  # another server, the same cache


def test_a_composition_is_reported_once_with_its_time(composer: Compose) -> None:
    served, times = composer(), list[float]()
    for name in ("math+swahili", "math+swahili", "math+swahili@bottom=1,top=0"):
        served.folder(name, times.append)
    assert len(times) == 1
    assert times[0] > 0


def test_the_folder_follows_the_content_not_the_place(
    composer: Compose, experts: Path, served_base: Callable[[str], Path], tmp_path: Path
) -> None:
    served = composer()
    before = served.folder("math+swahili")
    moved = shutil.copytree(experts / "math", tmp_path / "elsewhere" / "math")
    same = composer(experts={"math": str(moved), "swahili": str(experts / "swahili")})
    assert same.folder("math+swahili") == before
    make_expert(served_base("llama"), experts / "math", seed=99)
    after = served.folder("math+swahili")
    assert after != before
    assert before.is_dir()
    config = json.loads((experts / "math" / "adapter_config.json").read_text())
    (experts / "math" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    assert served.folder("math+swahili") not in (before, after)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_expert_replaced_under_the_same_size_and_time_is_noticed(
    in_place: bool, composer: Compose, experts: Path
) -> None:
    """Images, reproducible archives and `cp -p` replace files like this. Other names must not reuse the old hash."""
    served = composer()
    before = served.folder("math+swahili")
    file = experts / "math" / "adapter_model.safetensors"
    stamp, content = file.stat(), bytearray(file.read_bytes())
    content[-4:] = b"\x00\x00\x80\x3f"
    target = file if in_place else file.with_suffix(".new")
    target.write_bytes(content)
    os.utime(target, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    target.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stamp.st_size, stamp.st_mtime_ns)
    assert served.folder("math+swahili") != before
    for server in (served, composer()):
        record = json.loads((server.folder("math") / "adapterswap.json").read_text())
        assert record["experts"]["math"]["sha256"][file.name] == hashlib.sha256(content).hexdigest()


def test_servers_of_two_bases_may_share_a_cache(
    composer: Compose, served_base: Callable[[str], Path], experts: Path, tmp_path: Path
) -> None:
    """Where the experts name different bases, an adapter names the one that is served; another may have its shapes."""
    for name in ("math", "swahili"):
        file = experts / name / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": f"org/{name}"}))
    served = composer()
    other = shutil.copytree(served_base("llama"), tmp_path / "another-base")
    servers = (served, NamedComposer(served.manifest, str(other), served.cache, 16))
    folders = [server.folder("math+swahili") for server in servers]
    for server, folder in zip(servers, folders, strict=True):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == server.base_model
    assert folders[0] != folders[1]


def test_hashes_kept_by_an_older_version_are_not_used(composer: Compose, experts: Path) -> None:
    """They were stored only by size and modification time."""
    served = composer()
    served.cache.open()
    file = experts / "math" / "adapter_model.safetensors"
    stamp = (file.stat().st_size, file.stat().st_mtime_ns)
    served.cache.memo.put(f"sha256 {os.path.realpath(file)} {stamp}", "0" * 64)
    record = json.loads((composer().folder("math") / "adapterswap.json").read_text())
    assert record["experts"]["math"]["sha256"][file.name] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_name_is_planned_again_only_if_an_expert_changed(
    composer: Compose, experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = composer()
    folder = served.folder("math+swahili")
    content = (folder / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(folder)
    assert served.folder("math+swahili") == folder  # planned again, because the cache lost it
    assert (folder / "adapter_model.safetensors").read_bytes() == content
    opened: list[str] = []
    monkeypatch.setattr(
        "adapterswap.engines.serving.composer.open_adapter", lambda path: opened.append(path) or open_adapter(path)
    )
    assert served.folder("math+swahili") == folder
    assert opened == []
    config = json.loads((experts / "math" / "adapter_config.json").read_text())
    config["lora_alpha"] *= 2
    (experts / "math" / "adapter_config.json").write_text(json.dumps(config))
    assert served.folder("math+swahili") != folder
    assert len(opened) == 2
    served.release("math+swahili")
    assert served.folder("math+swahili") != folder
    assert len(opened) == 4


def test_a_damaged_composition_is_composed_again(composer: Compose) -> None:
    folder = composer().folder("math+swahili")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert composer().folder("math+swahili") == folder
    assert (folder / "adapter_model.safetensors").read_bytes() == whole


def test_a_restored_expert_reuses_its_folder(composer: Compose, experts: Path, tmp_path: Path) -> None:
    served = composer()
    before = served.folder("math")
    shutil.move(experts / "math", tmp_path / "kept")
    with pytest.raises(AdapterswapError, match="math"):
        served.folder("math")
    shutil.move(tmp_path / "kept", experts / "math")
    assert served.folder("math") == before


def test_threads_compose_once(composer: Compose) -> None:
    served = composer()
    names = ["math+swahili@bottom=2,top=1", "math+swahili@top=1,bottom=2"] * 8
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(served.folder, names))) == 1
    assert len(entries(served)) == 1
    assert list((served.cache.root / "building").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "parameter", "values"),
    [
        ("code+math@method=soup", "max_lora_rank", "24.* 16"),
        ("math+swahili@method=ties,density=0.5", "name", "ties"),
        ("math+swahili@method=dare_ties,density=0.5", "name", "dare_ties"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_made(
    composer: Compose, name: str, parameter: str, values: str
) -> None:
    served = composer()
    with refused(UnsupportedError, parameter, match=values):
        served.folder(name)
    assert entries(served) == set()


@pytest.mark.parametrize("name", ["math+swahili@bottom=4,top=3", "math+swahili@bottom=9"])
def test_what_cannot_be_planned_is_refused_before_it_is_made(composer: Compose, name: str) -> None:
    served = composer()
    with refused(CompositionError, "bottom"):
        served.folder(name)
    assert entries(served) == set()


def test_only_what_is_allowed_is_served(composer: Compose) -> None:
    served = composer(allow=("math+swahili@bottom=2,top=1", "math"))
    assert served.folder("math+swahili@top=1,bottom=2").is_dir()  # the same composition, spelt differently
    assert served.folder("math").is_dir()
    for name in ("swahili", "math+swahili", "math+swahili@bottom=2", "swahili+math@bottom=2,top=1"):
        with refused(UnknownNameError, "name"):
            served.folder(name)


def test_compositions_are_counted(composer: Compose) -> None:
    served = composer(max_compositions=2)
    with refused(UnsupportedError, "max_lora_rank"):
        served.folder("code+math@method=soup")  # what fails does not count
    for name in ("math", "swahili", "math"):
        served.folder(name)
    with refused(RunError, "max_compositions", match="2 compositions"):
        served.folder("telugu")
    assert served.folder("swahili").is_dir()
    assert len(entries(served)) == 2


SPELLINGS = {
    "math+swahili": ["task_weight=1.0", "task_weight=1.00", "task_weight=3", "bottom=1,top=0", "method=layer_swap"],
    "math+swahili@method=soup": ["method=soup,task_weight=2,language_weight=2", "language_weight=1e0,method=soup"],
    "math+swahili@method=soup,weights=magnitude": [
        "method=soup,weights=magnitude,task_weight=2,language_weight=2", "weights=magnitude,method=soup",
    ],
    "math+swahili@method=slerp": ["method=slerp,task_weight=4,language_weight=4"],
    "math+swahili@method=task_arithmetic,scale=0.5": [
        "method=task_arithmetic,task_weight=0.5,language_weight=0.5", "method=task_arithmetic,scale=5e-1",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_composition_count_once(composer: Compose, name: str) -> None:
    served = composer(max_compositions=1)
    folder = served.folder(name)
    for settings in SPELLINGS[name]:
        assert served.folder(f"math+swahili@{settings}") == folder
    with refused(RunError, "max_compositions"):
        served.folder("math+swahili@method=soup,task_weight=2")
    assert entries(served) == {folder.name}


def test_weights_of_experts_without_a_common_module_count(
    composer: Compose, experts: Path, served_base: Callable[[str], Path]
) -> None:
    """Each module is then one expert's alone, but its coefficient follows from both weights."""
    served = composer()
    for name, module in (("math", "q_proj"), ("swahili", "v_proj")):
        make_expert(served_base("llama"), experts / name, seed=1, target_modules=[module])
    for method in ("soup", "soup,weights=magnitude", "slerp", "multislerp"):
        name = f"math+swahili@method={method}"
        assert served.folder(name) != served.folder(f"{name},language_weight=3")


def test_spellings_of_what_is_allowed_count_once(composer: Compose) -> None:
    served = composer(max_compositions=1, allow=("math+swahili", "math"))
    folder = served.folder("math+swahili")
    assert {served.folder(f"math+swahili@bottom=1,top={zero}") for zero in ("0", "00", "000")} == {folder}
    with refused(RunError, "max_compositions"):
        served.folder("math")


def test_unloading_a_name_frees_its_place(composer: Compose) -> None:
    served = composer(max_compositions=1)
    for name in ("math+swahili", "math+swahili@bottom=1,top=0"):
        served.folder(name)
    served.release("never served")
    served.release("math+swahili")
    with refused(RunError, "max_compositions"):  # the other name is still served
        served.folder("math")
    served.release("math+swahili@bottom=1,top=0")
    assert served.folder("math").is_dir()
    with refused(RunError, "max_compositions"):
        served.folder("swahili")


def test_a_name_is_counted_once_when_its_expert_changes(
    composer: Compose, experts: Path, served_base: Callable[[str], Path]
) -> None:
    served = composer(max_compositions=1)
    before = served.folder("math")
    make_expert(served_base("llama"), experts / "math", seed=99, target_modules=["q_proj"])
    assert served.folder("math") != before
    with refused(RunError, "max_compositions"):
        served.folder("swahili")


def break_width(experts: Path, base: Path) -> None:
    wide = load(base).config
    wide.hidden_size, wide.head_dim = 128, 32
    AutoModelForCausalLM.from_config(wide).save_pretrained(experts.parent / "wide")
    make_expert(experts.parent / "wide", experts / "math", seed=1)


def break_depth(experts: Path, base: Path) -> None:
    deep = load(base).config
    deep.num_hidden_layers = 8
    deep.layer_types = None
    AutoModelForCausalLM.from_config(deep).save_pretrained(experts.parent / "deep")
    make_expert(experts.parent / "deep", experts / "math", seed=1)


def break_kind(experts: Path, base: Path) -> None:
    make_expert(base, experts / "math", seed=1, use_dora=True)


def break_saved(experts: Path, base: Path) -> None:
    make_expert(base, experts / "math", seed=1, modules_to_save=["lm_head"])


def break_file(experts: Path, base: Path) -> None:
    weights = experts / "math" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def break_names(experts: Path, base: Path) -> None:
    weights = experts / "math" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"self_attn.q_proj", b"self_attn.z_proj"))
    config = experts / "math" / "adapter_config.json"
    config.write_text(config.read_text().replace('"q_proj"', '"z_proj"'))  # otherwise PEFT would not load them


def break_number(experts: Path, base: Path) -> None:
    weights = experts / "math" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x80\x7f")  # infinity


def break_base(experts: Path, base: Path) -> None:
    other = load(base)
    other.get_input_embeddings().weight.data += 0.01
    carry_copies(other, experts)


def carry_copies(model: Any, experts: Path) -> None:
    """Give the expert `math` the copies that PEFT saves of a model's embedding and head."""
    options = {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 8, "task_type": "CAUSAL_LM"}
    shutil.rmtree(experts / "math")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")  # PEFT reports what it saves
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        get_peft_model(model, LoraConfig(**options)).save_pretrained(experts / "math")


@pytest.mark.parametrize(
    ("harm", "kind", "value"),
    [
        (break_base, AdapterswapError, "embed_tokens"),
        (break_width, ExpertError, "128.* 64"),
        (break_depth, ExpertError, "layers"),
        (break_kind, AdapterswapError, "DoRA"),
        (break_saved, UnsupportedError, "lm_head"),
        (break_file, AdapterswapError, "math"),
        (break_names, ExpertError, "z_proj"),
        (break_number, AdapterswapError, "infinity"),
    ],
)
def test_experts_that_do_not_fit_are_refused_without_their_paths(
    composer: Compose,
    experts: Path,
    served_base: Callable[[str], Path],
    tmp_path: Path,
    harm: Callable[[Path, Path], None],
    kind: type[AdapterswapError],
    value: str,
) -> None:
    served = composer(rank=None)
    harm(experts, served_base("llama"))
    for name in ("math", "math+swahili"):
        with pytest.raises(kind, match=value) as caught:
            served.folder(name)
        assert not isinstance(caught.value, UnknownNameError)
        assert "math" in str(caught.value)
        assert str(tmp_path) not in str(caught.value)
    assert entries(served) == set()
    assert served.folder("swahili").is_dir()


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_the_base_are_compared_once(
    tied: bool, served_base: Callable[[str], Path], experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the head is stored only as the embedding, and if the copies were rounded."""
    model = load(served_base("llama"))
    if tied:
        config = type(model.config).from_dict(model.config.to_dict() | {"tie_word_embeddings": True})
        model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "base")
    assert ("lm_head.weight" in open_checkpoint(tmp_path / "base").parameters) is not tied
    carry_copies(load(tmp_path / "base").to(torch.bfloat16), experts)
    served = NamedComposer(Manifest.read(experts), str(tmp_path / "base"), Cache(tmp_path / "cache"), 16)
    compared = []
    same = Comparable.is_one_with
    monkeypatch.setattr(Comparable, "is_one_with", lambda *both: compared.append(both) or same(*both))
    for name in ("math", "swahili", "math+swahili"):
        assert served.folder(name).is_dir()
    assert len(compared) == 2
    model.get_input_embeddings().weight.data += 0.01
    model.save_pretrained(tmp_path / "base")
    with refused(BaseModelError, "base_model", match="embed_tokens"):
        served.folder("math+swahili")


def test_the_operator_declares_the_base(composer: Compose, pristine: Callable[[str], Path], experts: Path) -> None:
    """An expert that names another base is accepted on the operator's declaration; `serve` warns about it."""
    served = composer(experts={"math": str(pristine("qwen2") / "math"), "swahili": str(experts / "swahili")})
    assert served.folder("math+swahili").is_dir()


def test_a_base_of_unknown_depth_is_refused(experts: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    with refused(BaseModelError, "base_model"):
        NamedComposer(Manifest.read(experts), str(tmp_path / "base"), Cache(tmp_path / "cache"), 16)
    (tmp_path / "base" / "config.json").write_text('{"model_type": "unheard-of", "num_hidden_layers": 6}')
    with refused(BaseModelError, "base_model", match="unheard-of"):
        NamedComposer(Manifest.read(experts), str(tmp_path / "base"), Cache(tmp_path / "cache"), 16)


def test_served_compositions_can_be_verified(composer: Compose, experts: Path, run: Callable[..., Any]) -> None:
    folder = composer().folder("math+swahili@bottom=1,top=1,bottom_transition=1")
    assert open_adapter(folder).config.rank == 16
    sources = [argument for name in ("math", "swahili") for argument in ("--expert", f"{name}={experts / name}")]
    result = run("verify", folder, *sources)
    assert result.exit_code == 0, result.stderr
