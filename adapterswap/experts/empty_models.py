"""Build transformers models without weights, on torch's meta device, from a checkpoint's config.

Nothing is downloaded, and no code of a repository is run. Knows configs; reads no tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterswap.errors import BaseModelError, reason_of

__all__ = ["empty_language_model", "empty_model_as_saved", "empty_model_for", "read_config"]

# PEFT's task types that change the model's class → transformers' class for them.
_TASK_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


def read_config(folder: Path, name: str) -> Any:
    """The transformers config in a folder; `name` is the model's name in messages.

    Raises:
        BaseModelError: transformers cannot read the config without remote code, or it is inconsistent.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # with an untested config, a model class can raise anything
        raise BaseModelError(
            f"{name} cannot be opened: {reason_of(error)}",
            "Use a model with a valid config.json that transformers supports without remote code",
            parameter="base_model",
        ) from None


def empty_language_model(config: Any, name: str) -> Any:
    """The modules of a config's causal language model; `name` is the model's name in messages.

    Raises:
        BaseModelError: transformers has no causal language model for the config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as in `read_config`
        raise BaseModelError(
            f"{name} cannot be loaded: {reason_of(error)}",
            "Use a causal language model that transformers supports, with a valid config.json",
            parameter="base_model",
        ) from None


def empty_model_as_saved(folder: Path, name: str) -> Any:
    """The modules, without weights, of the model class in `architectures` of a folder's config.json.

    This may be more than a language model, for example a vision model, or less, without a head. A config that names no
    class gets transformers' own choice: the multimodal model if there is one, else the causal language model.

    Args:
        folder: the folder with config.json.
        name: the model's name in messages.

    Raises:
        BaseModelError: transformers cannot build it without remote code.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        names = config.architectures or []
        kind = getattr(transformers, names[0], None) if names else _auto_class(config)
        if kind is None:
            raise ValueError(f"transformers has no {names[0]}")
        with torch.device("meta"):
            build = kind._from_config if names else kind.from_config
            return build(config)
    except Exception as error:  # as in `read_config`
        raise BaseModelError(
            f"{name} cannot be built to look up its modules: {reason_of(error)}",
            "Use a model that the installed transformers supports without remote code",
            parameter="base_model",
        ) from None


def empty_model_for(folder: Path, name: str, task_type: str | None) -> Any:
    """The modules, without weights, of the model class for a task type of PEFT, where transformers has one.

    Otherwise, and for language models, that of `empty_model_as_saved`; the arguments and errors are the same.
    """
    import torch
    import transformers

    config, task_class = read_config(folder, name), getattr(transformers, _TASK_CLASSES.get(task_type or "", ""), None)
    if task_class is None or type(config) not in task_class._model_mapping:
        return empty_model_as_saved(folder, name)
    with torch.device("meta"):
        return task_class.from_config(config, trust_remote_code=False)


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    multimodal = config.get_text_config() is not config and type(config) in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM
