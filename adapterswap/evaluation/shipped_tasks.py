"""TyDi QA and XCOPA as tasks of lm-evaluation-harness, over the data shipped here.

Imports the harness, so import this module only where it is needed. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from adapterswap.evaluation.harness import OfflineTask
from adapterswap.evaluation.tydiqa import LooseAnswer, read_tydiqa, score_answer, tydiqa_prompt, tydiqa_task_names
from adapterswap.evaluation.xcopa import read_xcopa, xcopa_choices, xcopa_prompt

__all__ = ["build_shipped_task"]


class _OtherPassages(ContextSampler):  # type: ignore[misc]
    """The first questions of the file that are about another passage than the current question."""

    def sample(self, n: int, eval_doc: Any = None, df: Any = None, **kwargs: Any) -> list[Any]:
        """See the harness."""
        return [row for row in self.df if row["context"] != eval_doc["context"]][:n]


class _LooseFilter(Filter):  # type: ignore[misc]
    """Marks the first response to each document as one to be compared loosely."""

    def apply(self, resps: Sequence[Sequence[str]], docs: Sequence[Any]) -> list[LooseAnswer]:
        """See the harness."""
        return [LooseAnswer(responses[0]) for responses in resps]


def build_shipped_task(name: str) -> ConfigurableTask:
    """The task of that name, one of `tydiqa_task_names()` and `xcopa_task_names()`."""
    return _build_tydiqa(name) if name in tydiqa_task_names() else _build_xcopa(name)


def _build_tydiqa(name: str) -> ConfigurableTask:
    """One shot by default, which shows a base model that a few words are enough."""
    config = {
        "task": name,
        "test_split": "test",
        "fewshot_split": "test",
        "fewshot_config": {"sampler": _OtherPassages},
        "num_fewshot": 1,
        "output_type": "generate_until",
        "doc_to_text": partial(tydiqa_prompt, name),
        "doc_to_target": lambda row: row["answers"][0],
        "target_delimiter": " ",
        "generation_kwargs": {"until": ["\n"], "do_sample": False},
        "filter_list": [
            {"name": "none", "filter": [{"function": "take_first"}]},
            {"name": "normalized", "filter": [{"function": _LooseFilter}]},
        ],
        "process_results": lambda row, results: score_answer(name, results[0], row["answers"]),
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("exact_match", "f1")
        ],
        "metadata": {"version": "1.0"},
    }
    return OfflineTask({"test": read_tydiqa(name)}, config)


def _build_xcopa(name: str) -> ConfigurableTask:
    """No shots by default; others are the first questions of val, and val itself shows none."""
    splits = {"test": read_xcopa(name), "val": read_xcopa("xcopa_val_sw")}
    config = {
        "task": name,
        "test_split": "test",
        "fewshot_split": "val",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 0 if name == "xcopa_val_sw" else None,
        "output_type": "multiple_choice",
        "doc_to_text": xcopa_prompt,
        "doc_to_choice": xcopa_choices,
        "doc_to_target": "label",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": "1.0"},
    }
    return OfflineTask(splits, config)
