"""Packages that only some features need, and the extra of adapterswap that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from adapterswap.kit.errors import DependencyError

_MODELS = ("torch", "transformers", "peft", "accelerate")
# Extra → its packages, as they are imported. A package belongs to the first extra that lists it.
EXTRAS = {
    "models": _MODELS,
    "train": (*_MODELS, "datasets", "trl"),
    "eval": (*_MODELS, "datasets", "lm_eval", "yaml", "sacrebleu"),
    "plots": ("matplotlib",),
    "report": ("matplotlib", "jinja2", "scipy"),
    "lab": (*_MODELS, "datasets", "trl", "matplotlib", "jinja2", "scipy"),
    "vllm": ("vllm", "starlette"),
    "gguf": ("gguf", "httpx", "starlette", "uvicorn"),
    "languages": ("lingua",),
    "search": ("optuna",),
    "ray": ("ray",),
    "studio": ("gradio",),
    "quantization": ("bitsandbytes",),
}


def require(extra: str, *packages: str) -> None:
    """Check that the packages of an extra are installed, or only those listed.

    Raises:
        DependencyError: some are not; the message has the command that installs them.
    """
    missing = [name for name in packages or EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise _missing(missing, extra)


def explained(error: ModuleNotFoundError) -> DependencyError | None:
    """The error for a missing package of an extra; None for any other module."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return _missing([package], extra)
    return None


def _missing(packages: list[str], extra: str) -> DependencyError:
    verb = "is" if len(packages) == 1 else "are"
    return DependencyError(f"{', '.join(packages)} {verb} not installed", f"Run `pip install 'adapterswap[{extra}]'`")
