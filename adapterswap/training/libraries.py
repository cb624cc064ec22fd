"""Check for the optional libraries that a recipe needs before anything starts. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from adapterswap.errors import DependencyError, Problems
from adapterswap.training.recipe import TrainRecipe

__all__ = ["check_libraries"]

_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def check_libraries(recipe: TrainRecipe) -> None:
    """Check that all libraries that the recipe needs are installed.

    Raises:
        DependencyError: lists every missing library and how to install it.
    """
    if missing := [name for name in ("datasets", "trl") if find_spec(name) is None]:
        raise DependencyError(
            f"packages that training needs are not installed: {', '.join(missing)}",
            "Run `pip install 'adapterswap[train]'`",
        )
    problems, options = Problems(DependencyError), recipe.training
    if recipe.selection and find_spec("lm_eval") is None:
        problems.add(
            "`selection` needs lm-evaluation-harness, which is not installed",
            "Run `pip install 'adapterswap[eval]'`",
            parameter="selection",
        )
    if find_spec("bitsandbytes") is None:
        if recipe.quantization:
            problems.add(
                "`quantization` needs bitsandbytes, which is not installed",
                "Run `pip install bitsandbytes`",
                parameter="quantization",
            )
        if "8bit" in options.optimizer or "paged" in options.optimizer:
            problems.add(
                f"training.optimizer {options.optimizer} needs bitsandbytes, which is not installed",
                "Run `pip install bitsandbytes`, or choose adamw_torch_fused",
                parameter="training.optimizer",
            )
    package = _ATTENTION.get(options.attn_implementation)
    if package and find_spec(package) is None:
        problems.add(
            f"training.attn_implementation {options.attn_implementation} needs {package}, which is not installed",
            "Install FlashAttention for your CUDA version, or choose sdpa",
            parameter="training.attn_implementation",
        )
    if options.report_to:
        from transformers.integrations import get_available_reporting_integrations

        for name in sorted(set(options.report_to) - set(get_available_reporting_integrations())):
            problems.add(
                f"training.report_to: {name!r} is not installed, or is not a tracker that transformers supports",
                "Install it or correct the name",
                parameter="training.report_to",
            )
    problems.raise_if_any()
