"""Folders that somebody else made: links, pipes, devices, code and texts beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from refusals import refused

from adapterswap.core.experts.adapter import open_adapter
from adapterswap.core.model.base import read_config
from adapterswap.core.model.sources import Source
from adapterswap.engines.live import find_adapter
from adapterswap.kit.errors import BaseModelError, UnsupportedError
from adapterswap.kit.files.tensorfile import TensorFile

Run = Callable[..., Result]
PRIVATE = "a private key"

ATTACKS: dict[str, Callable[[Path, Path], object]] = {
    "a linked tokenizer": lambda folder, private: (folder / "tokenizer.json").symlink_to(private),
    "linked settings": lambda folder, private: (folder / "tokenizer_config.json").symlink_to(private),
    "a linked template": lambda folder, private: (folder / "chat_template.jinja").symlink_to(private),
    "linked processing": lambda folder, private: (folder / "preprocessor_config.json").symlink_to(private),
    "a template that is a pipe": lambda folder, _: os.mkfifo(folder / "chat_template.jinja"),
    "an endless template": lambda folder, _: (folder / "chat_template.jinja").symlink_to("/dev/zero"),
    "an endless tokenizer": lambda folder, _: (folder / "tokenizer.json").symlink_to("/dev/zero"),
    "a template in Latin-1": lambda folder, _: (folder / "chat_template.jinja").write_bytes("é".encode("latin-1")),
    "a huge template": lambda folder, _: (folder / "chat_template.jinja").write_bytes(b"x" * 2**21),
}


@pytest.fixture
def theirs(swahili: Path, tmp_path: Path) -> Path:
    """An expert of somebody else, beside a private file."""
    (tmp_path / "private.key").write_text(PRIVATE)
    return Path(shutil.copytree(swahili, tmp_path / "theirs"))


def composed(run: Run, math: Path, theirs: Path, out: Path) -> Result:
    return run("compose", "-t", math, "-l", theirs, "-o", out, "--bottom", 1, "--top", 1)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_not_a_file_of_the_folder_is_refused(
    run: Run, math: Path, theirs: Path, tmp_path: Path, name: str
) -> None:
    ATTACKS[name](theirs, tmp_path / "private.key")
    result = composed(run, math, theirs, tmp_path / "out")
    assert (result.exit_code, (tmp_path / "out").exists()) == (3, False), result.output
    assert result.stderr.startswith("Error: ")


def test_only_known_names_are_copied_and_no_code(run: Run, math: Path, theirs: Path, tmp_path: Path) -> None:
    (theirs / "tokenizer_private.key").symlink_to(tmp_path / "private.key")
    (theirs / "vocab_private").symlink_to(tmp_path / "private.key")
    (theirs / "tokenization_own.py").write_text("raise SystemExit")
    (theirs / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": "tokenization_own.Own"}}))
    result = composed(run, math, theirs, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "adapterswap.json", "tokenizer_config.json",
    }  # fmt: skip
    assert all(PRIVATE.encode() not in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_a_link_to_a_folder_is_followed_once(
    math: Path, swahili: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pointed elsewhere after the config was read, as a training run does with its latest checkpoint."""
    for name, folder in (("one", math), ("other", swahili)):
        shutil.copytree(folder, tmp_path / name)
    config = json.loads((tmp_path / "other/adapter_config.json").read_text())
    (tmp_path / "other/adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 999}))
    link = tmp_path / "latest"
    link.symlink_to("one")
    expected = open_adapter(link)
    read = TensorFile.read

    def repointed(path: Path) -> Any:
        link.unlink()
        link.symlink_to("other")
        return read(path)

    monkeypatch.setattr(TensorFile, "read", staticmethod(repointed))
    opened = open_adapter(link)
    assert link.resolve().name == "other"
    assert (opened.config, opened.file.path) == (expected.config, expected.file.path)
    assert opened.file.path == tmp_path / "one/adapter_model.safetensors"
    assert Source.find(tmp_path / "one", [], what="adapter").folder == tmp_path / "one"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_cannot_name_code_for_its_attention(math: Path, tmp_path: Path, key: str) -> None:
    base = Path(json.loads((math / "adapter_config.json").read_text())["base_model_name_or_path"])
    content = json.loads((base / "config.json").read_text())
    for value, harmless in (("sdpa", True), ("eager", True), ("org/kernel", False), ({"": "org/kernel"}, False)):
        (tmp_path / "config.json").write_text(json.dumps({**content, key: value}))
        if harmless:
            read_config(tmp_path, "the base")
        else:
            with refused(BaseModelError, "base_model"):
                read_config(tmp_path, "the base")


def test_evaluations_load_listed_kinds_of_adapters(theirs: Path) -> None:
    """PEFT would load a tokenizer with its code, other models, or modules that such a config names."""
    path = theirs / "adapter_config.json"
    content = json.loads(path.read_text())
    assert find_adapter(str(theirs)).folder == theirs
    for changed in (
        {
            "peft_type": "PROMPT_TUNING",
            "tokenizer_name_or_path": "o/n",
            "tokenizer_kwargs": {"trust_remote_code": True},
        },
        {"peft_type": "XLORA", "adapters": {"a": "org/name"}},
        {"peft_type": "SHADOW", "shadow_model": "org/name"},
        {"peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "own"},
        {"peft_type": None},
    ):
        path.write_text(json.dumps({**content, **changed}))
        with refused(UnsupportedError, "adapter"):
            find_adapter(str(theirs))
