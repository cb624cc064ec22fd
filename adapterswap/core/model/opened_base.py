"""Open a base model with transformers: its config and tokenizer, and its weights on request.

Reads a local folder or a Hub repository, safetensors only, and never runs the repository's code. Training adds adapters
to a base and evaluation scores it; both use this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapterswap.core.companions.companions import CompanionPlan, Companions
from adapterswap.core.companions.files import GENERATION_CONFIG, MODEL_CONFIG
from adapterswap.core.model.base import empty_language_model, language_model_class, read_config
from adapterswap.core.model.checkpoints import check_alone, model_identity
from adapterswap.core.model.layers import Depth, ModelConfig, NumLayers
from adapterswap.core.model.sources import Source
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, BaseModelError, ExpertError, reason_of
from adapterswap.kit.files.folders import scratch_folder
from adapterswap.kit.files.inside import read_inside
from adapterswap.kit.files.numbers import Dtype
from adapterswap.kit.files.text import check_pointers

_SMALL_FILES = ["config.json", "adapter_config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
                "*.model", "*.jinja", "vocab*", "merges.txt", "added_tokens.json"]  # fmt: skip
_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]
_DTYPES = ("auto", *Dtype.NAMES)


@dataclass(frozen=True)
class OpenedBase:
    """A base without its weights.

    Attributes:
        reference: the folder or Hub id that the user passed.
        source: where its files are; outputs record its name and revision.
        config: the transformers config.
        tokenizer: its tokenizer, or that of the experts on it; None until `with_companions` if only experts have one.
        generation: the generation settings that go with that; None for the base's own.
    """

    reference: str
    source: Source
    config: Any
    tokenizer: Any
    generation: Any = None

    @property
    def num_layers(self) -> int | None:
        """The number of the language model's layers; None if its config does not say it."""
        return ModelConfig(self.config.to_dict()).num_layers

    @property
    def identity(self) -> dict[str, Any]:
        """See `model_identity`."""
        return model_identity(self.source)

    def check_depth(self, requested: NumLayers | None, remedy: str) -> None:
        """Raise `CompositionError` if the base has another number of layers than was requested, and both are known."""
        Depth.check(self.reference, self.num_layers, requested, remedy)

    def with_companions(self, companions: CompanionPlan) -> OpenedBase:
        """The base with the tokenizer, the chat templates and the ends of answers that full weights would have.

        Args:
            companions: made with this base's folder.

        Raises:
            ExpertError: transformers cannot read the tokenizer of an expert.
            BaseModelError: neither the base nor an expert has a tokenizer.
        """
        from transformers import AutoTokenizer, GenerationConfig

        if "tokenizer" not in companions.prompts_of_experts:
            self._check_tokenizer()
        if not companions.prompts_of_experts:
            return self
        with scratch_folder("tokenizer") as folder:
            (folder / MODEL_CONFIG).write_bytes(read_inside(self.source.folder, MODEL_CONFIG) or b"{}")
            companions.write(folder)
            try:
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            except Exception as error:  # as in `load_weights`
                raise ExpertError(
                    f"The tokenizer of {companions.owner('tokenizer')} cannot be opened: {reason_of(error)}",
                    "Save it again with tokenizer.save_pretrained(FOLDER), or pass `tokenizer=base`",
                    parameter="tokenizer",
                ) from None
            generation = None
            if (folder / GENERATION_CONFIG).is_file():
                generation = GenerationConfig.from_pretrained(folder)
        tokenizer.name_or_path = str(self.source.folder)  # no path of a folder that is gone
        return replace(self, tokenizer=tokenizer, generation=generation)

    def generation_config(self) -> Any:
        """The model's own generation settings, as `load_weights` would find them."""
        from transformers import GenerationConfig

        if self.generation is not None:
            return self.generation
        if (self.source.folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(self.source.folder)
        return GenerationConfig.from_model_config(self.config)

    def load_weights(self, *, dtype: str = "auto", **options: Any) -> Any:
        """Load the language model, on the CPU unless `options` say otherwise; see `language_model_class`.

        Args:
            dtype: float32, bfloat16, float16, or auto for the one that the weights are stored in.
            options: further options of `from_pretrained`, such as `quantization_config` or `attn_implementation`.
        """
        if dtype not in _DTYPES:
            raise ArgumentError(
                f"The dtype {dtype!r} is unknown", f"Use one of {', '.join(_DTYPES)}", parameter="dtype"
            )
        folder = self.source.folder
        if self.source.revision is not None:  # on the Hub, of which only the small files are here
            folder = Source.find(self.reference, [*_SMALL_FILES, *_WEIGHTS], what="base model").folder
        kind = language_model_class(self.config, f"The base model {self.reference}")
        model = _load(kind, folder, self.reference, dtype=dtype, **options)
        if self.generation is not None:
            model.generation_config = self.generation
        return model

    def empty_model(self) -> Any:
        """The language model's modules without weights; see `empty_language_model`."""
        return empty_language_model(self.config, f"The base model {self.reference}")

    def _check_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise BaseModelError(
                f"The base model {self.reference} has no tokenizer",
                "Save it there with tokenizer.save_pretrained(FOLDER): tokenizer.json and tokenizer_config.json",
                parameter="base_model",
            )

    @staticmethod
    def open(reference: str, *, tokenizer_of_experts: bool = False) -> OpenedBase:
        """Open the config and tokenizer of a base.

        Args:
            reference: a folder, or a Hub id `org/name[@revision]`.
            tokenizer_of_experts: whether `with_companions` follows, so that the base itself may lack a tokenizer.

        Raises:
            NotFoundError: there is no such base.
            BaseModelError: transformers cannot read its config or its tokenizer, or it has none.
        """
        # What costs nothing to find out comes before transformers, whose import takes seconds.
        require("models")
        source = Source.find(reference, _SMALL_FILES, what="base model")
        check_pointers(source.folder)
        try:
            check_alone(source.folder)
        except ExpertError as error:
            raise error.recast(BaseModelError, parameter="base_model") from None

        from transformers import AutoTokenizer

        config = read_config(source.folder, f"The base model {reference}")
        if not Companions(source.folder).has("tokenizer"):
            base = OpenedBase(reference, source, config, tokenizer=None)
            if not tokenizer_of_experts:
                base._check_tokenizer()
            return base
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
        except Exception as error:  # as in `load_weights`
            raise BaseModelError(
                f"The base model {reference} cannot be opened: {reason_of(error)}",
                "Pass a folder or Hub id whose config.json and tokenizer transformers can read without remote code",
                parameter="base_model",
            ) from None
        return OpenedBase(reference, source, config, tokenizer)


def load_as_saved(folder: Path, name: str, *, config: Any, **options: Any) -> Any:
    """Load the model in a folder in the class and the dtype that it was saved in.

    Args:
        folder: the folder.
        name: the model's name in messages.
        config: its transformers config, which may be changed.
        options: further options of `from_pretrained`.
    """
    import transformers

    names = config.architectures or ["AutoModelForCausalLM"]
    if not hasattr(transformers, names[0]):
        raise BaseModelError(
            f"The base model {name} cannot be loaded: transformers has no {names[0]}",
            "Use a model that transformers supports",
            parameter="base_model",
        )
    return _load(getattr(transformers, names[0]), folder, name, config=config, dtype="auto", **options)


def _load(kind: Any, folder: Path, name: str, **options: Any) -> Any:
    """The model of a class, with all of its weights."""
    try:
        model, info = kind.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except Exception as error:  # with an untested config, a model class can raise anything
        raise BaseModelError(
            f"The base model {name} cannot be loaded: {reason_of(error)}",
            "Use a base whose config.json and safetensors weights the installed transformers can load",
            parameter="base_model",
        ) from None
    if mismatched := sorted(info["mismatched_keys"]):
        parameter, stored, expected = mismatched[0]
        raise BaseModelError(
            f"The weights of the base model {name} do not match its config: {parameter} is {_shape(stored)}, but "
            f"the config says {_shape(expected)}",
            "Use the config.json that was saved with these weights",
            parameter="base_model",
        )
    if missing := sorted(info["missing_keys"]):
        listed = ", ".join(missing[:4])
        if len(missing) > 4:
            listed += " …"
        raise BaseModelError(
            f"The base model {name} is missing weights: {listed}",
            "Save or download the model again: transformers would fill these weights with random numbers",
            parameter="base_model",
        )
    return model


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))


def choose_device(name: str) -> Any:
    """The torch device called `name`; `auto` picks CUDA or MPS if one is available, else the CPU."""
    require("models")
    import torch

    if name == "auto":
        accelerator = None
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        raise ArgumentError(
            f"The device {name!r} cannot be used: {reason_of(error)}",
            "Use auto, cpu, cuda, cuda:N or mps",
            parameter="device",
        ) from None
    return device


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide a deprecation warning that you can do nothing about: PEFT 0.21 uses names that transformers 5.23 changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning)
        yield
