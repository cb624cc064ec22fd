"""Weighted sums whose coefficients do not depend on tensors, and the layer swap, which only allocates layers.

`planning` puts their coefficients into the plan, so nothing is computed here.
"""

from __future__ import annotations

from adapterswap.core.methods.method import SCALE, Method


class LayerSwap(Method):
    name = "layer_swap"
    title = "layer swapping (Bandarkar et al. 2025)"
    reference = "Bandarkar et al., ICLR 2025, arXiv:2410.01335"
    formula = "outer layers from the language expert, the middle from the task expert, averages in transitions"
    normalizes = True
    in_rules = False


class Linear(Method):
    name = "linear"
    title = "a weighted sum"
    reference = "Wortsman et al., ICML 2022, arXiv:2203.05482"
    formula = "Σ c_i·ΔW_i, with c_i = w_i/Σw, or w_i with `normalize: false`"
    normalizes = True
    as_composition = False


class Soup(Method):
    name = "soup"
    title = "a model soup (Wortsman et al. 2022)"
    reference = "Wortsman et al., ICML 2022, arXiv:2203.05482"
    formula = "Σ w_i·ΔW_i / Σ w_i"
    normalizes = True
    in_rules = False


class TaskArithmetic(Method):
    name = "task_arithmetic"
    title = "task arithmetic (Ilharco et al. 2023)"
    reference = "Ilharco et al., ICLR 2023, arXiv:2212.04089"
    formula = "λ·Σ w_i·ΔW_i"
    parameters = (SCALE,)
    in_rules = False


class AdaMergeX(Method):
    name = "adamergex"
    title = "AdaMergeX (Zhao et al. 2024)"
    reference = "Zhao et al., NAACL 2025, arXiv:2402.18913"
    formula = "w·ΔW_task + λ·(ΔW_target - ΔW_source), with the language experts in the order target, source"
    notes = (
        "The language experts are trained on one reference task, in the target language and in the source language: "
        "`-l target -l source`."
    )
    parameters = (SCALE,)
    sides = (3, 3)
    in_rules = False
