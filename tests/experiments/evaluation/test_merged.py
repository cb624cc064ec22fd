"""Full weights are evaluated as the composition that they were merged from is live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import choices

import adapterswap
from adapterswap.core.model.opened_base import OpenedBase
from adapterswap.experiments.evaluation import Settings, evaluate_model
from adapterswap.experiments.evaluation.subjects import Subject


def test_merged_then_evaluated_is_live_then_evaluated(
    byte_base: Path, byte_expert: Callable[[str], Path], tmp_path: Path
) -> None:
    own = choices.write_task(tmp_path / "own")
    composition = adapterswap.Composition(
        task="math", language="swahili", bottom=2, top=1, bottom_transition=1, base_model=str(byte_base)
    )
    plan = adapterswap.compose(composition, {name: byte_expert(name) for name in ("math", "swahili")})
    merged = OpenedBase.open(str(adapterswap.merge(plan, out_path=tmp_path / "merged")))
    live = OpenedBase.open(str(byte_base))
    assert isinstance(plan, adapterswap.Plan)
    reports = []
    for base, composed in ((live, plan), (merged, None), (live, None)):
        with Subject(base, plan=composed).loaded(device="cpu") as model:
            settings = Settings(limit=3, num_fewshot=1, max_gen_toks=12, batch_size=1, include_path=str(own))
            result = evaluate_model(model, base.tokenizer, ["mgsm_direct_sw", choices.TASK], settings)
            # Log-likelihoods of choices differ in their last bits, greedy text and scores do not.
            outputs = [sample.output for sample in result.samples if sample.task == "mgsm_direct_sw"]
            reports.append((outputs, [(sample.task, sample.doc_id, sample.scores) for sample in result.samples]))
    assert reports[0] == reports[1]
    assert reports[0][0] != reports[2][0]
