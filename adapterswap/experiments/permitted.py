"""What a file of somebody else may pass on to other libraries, by name.

Recipes and task files are shared, and some of their values become arguments of transformers, vLLM, datasets and
lm-evaluation-harness. A few arguments of these libraries import a module, run a script or open an address. So each
table lists the names that are known to be harmless, and everything else is an error. The tables hold for files only:
what you pass in Python, or on the command line, is your own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapterswap.kit.errors import did_you_mean
from adapterswap.kit.files.readers import FieldMistake
from adapterswap.kit.files.text import shown


def _listed(names: str) -> frozenset[str]:
    """The names in a text, which has spaces between them."""
    return frozenset(names.split())


GENERATION = _listed(
    "until do_sample max_gen_toks max_new_tokens max_tokens max_completion_tokens min_new_tokens temperature top_k"
    " top_p min_p typical_p top_h epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty"
    " no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens"
    " forced_eos_token_id exponential_decay_length_penalty renormalize_logits remove_invalid_values num_beams"
    " length_penalty early_stopping use_cache"
)
"""Generation settings of recipes (`settings.gen_kwargs`) and task files (`generation_kwargs`)."""

ENGINE = _listed(
    "async_scheduling attention_backend block_size calculate_kv_scales cpu_offload_gb disable_cascade_attn"
    " disable_custom_all_reduce disable_log_stats disable_sliding_window enable_chunked_prefill enable_prefix_caching"
    " enforce_eager fully_sharded_loras gpu_memory_utilization kv_cache_dtype kv_cache_memory_bytes"
    " long_prefill_token_threshold max_cpu_loras max_logprobs max_lora_rank max_loras max_model_len"
    " max_num_batched_tokens max_num_partial_prefills max_num_seqs max_parallel_loading_workers num_gpu_blocks_override"
    " pipeline_parallel_size quantization swap_space tensor_parallel_size use_tqdm_on_load"
)
"""Settings of vLLM in recipes (`settings.engine_args`)."""

READERS = frozenset({"json", "csv", "parquet", "arrow", "text"})
"""Names of `datasets`' readers. Others run queries, open catalogues, or are not known here."""

READING = _listed(
    "data_files data_dir revision streaming verification_mode sep delimiter header names column_names quoting quotechar"
    " escapechar doublequote skiprows skipinitialspace thousands decimal encoding keep_default_na na_filter na_values"
    " field columns sample_by keep_linebreaks"
)
"""Options of `datasets.load_dataset` in task files (`dataset_kwargs`)."""

TASK = _listed(
    "task task_alias tag group group_alias aggregate_metric_list include dataset_path dataset_name dataset_kwargs"
    " training_split validation_split test_split fewshot_split doc_to_text doc_to_target doc_to_choice description"
    " target_delimiter fewshot_delimiter fewshot_config num_fewshot metric_list output_type generation_kwargs repeats"
    " filter_list should_decontaminate doc_to_decontamination_query gen_prefix metadata unsafe_code"
)
"""Keys of task files, and of members of their groups. Functions (`!function`) are refused wherever they stand."""

METADATA = _listed("version description group num_samples canonical_task task_pretty_name license url citation")
"""Keys of `metadata` in task files. Some tasks of the harness load the tokenizer, with its code, that it names."""

SHOTS = _listed(
    "sampler split fewshot_indices samples doc_to_text doc_to_choice doc_to_target gen_prefix fewshot_delimiter"
    " target_delimiter"
)
"""Keys of `fewshot_config` in task files."""

METRIC = _listed(
    "metric aggregation higher_is_better hf_evaluate ignore_case ignore_punctuation ignore_numbers regexes_to_ignore"
    " average k weight_by_size filter_list"
)
"""Keys of the metrics in task files."""

FILTERS = _listed(
    "take_first take_first_k majority_vote remove_whitespace lowercase uppercase regex regex_pos multi_choice_regex map"
)
"""Filters of answers in task files, by their names in the harness."""

FILTER = _listed(
    "function regex_pattern group_select fallback ignore_case ignore_punctuation regexes_to_ignore k mapping_dict"
    " default_value"
)
"""Keys of a filter in task files."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.py)")
_HUB = "hf://"
_MOST_ITEMS = 10_000


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside the block, `datasets` does not report loads to a server; it also does so for files on this machine."""
    from datasets import config

    before = config.HF_UPDATE_DOWNLOAD_COUNTS
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def check_settings(key: str, content: Mapping[str, Any]) -> None:
    """Refuse what a sweep's recipe may not pass on: names that are not listed, and values that are not plain.

    Args:
        key: `gen_kwargs` or `engine_args`.
        content: the settings that files set.

    Raises:
        FieldMistake: names the first of them.
    """
    names = GENERATION if key == "gen_kwargs" else ENGINE
    refused = [name for name, value in content.items() if name not in names or not _is_plain(value)]
    if refused:
        reason = "it is not one of the settings that are known to be harmless"
        if refused[0] in names:
            reason = f"{shown(content[refused[0]])} is neither a plain value nor a list of them"
        remedy = f"Remove it or, if you trust it, set settings.{key}.{refused[0]} with `overrides`"
        message = f"a recipe may not set {', '.join(map(str, refused))}: {reason}"
        raise FieldMistake(message, str(refused[0]), remedy=did_you_mean(str(refused[0]), names, remedy))


def _is_plain(value: Any) -> bool:
    """Whether a setting is a word, a number or a truth value, or a short list of such values or lists."""
    if isinstance(value, list):
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def foreign_source(path: Any, *files: Any, known: bool = False) -> str | None:
    """Why `datasets` may not load what a file names as its data; None if it may.

    Args:
        path: one of `READERS`, a Hub id org/name, or a folder.
        files: names of files and folders in it: paths on this machine, and addresses on the Hub (`hf://`). An address
            elsewhere is one that only the author of the file chose.
        known: whether the path is known to be on this machine.
    """
    address = _foreign_address(files)
    if address is not None:
        return f"{shown(address)} is neither a file here nor on the Hub (hf://)"
    if known or path is None or (isinstance(path, str) and (path in READERS or _HUB_ID.fullmatch(path))):
        return None
    if isinstance(path, str) and path and Path(path).is_dir():
        return None
    readers = ", ".join(sorted(READERS))
    return f"{shown(path)} is neither a dataset org/name on the Hub, nor a folder, nor one of {readers}"


def _foreign_address(value: Any) -> str | None:
    """The first of the names of files in a text, list or mapping that may not be opened; None if all may."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            address = _foreign_address(item)
            if address is not None:
                return address
        return None

    # `datasets` reads "::" as one protocol inside another.
    text = str(value)
    is_foreign = "::" in text or "://" in text.removeprefix(_HUB)
    return text if is_foreign else None


def foreign_in_task(content: Mapping[str, Any], function: type) -> Iterator[str]:
    """What a task file passes on that is not known to be harmless: keys, and values of some keys.

    A group's file may change the settings of its members, and each member its own.

    Args:
        content: the content of the file.
        function: the class of values that name functions; these are refused elsewhere.
    """
    # Keys, and those of the settings that are passed on
    known = {"generation_kwargs": GENERATION, "metadata": METADATA, "fewshot_config": SHOTS, "dataset_kwargs": READING}
    yield from _unlisted(content, TASK, "", function)
    for key, names in known.items():
        yield from _unlisted(content.get(key), names, f"{key}: ", function)

    # Where the data come from
    reason = foreign_source(content.get("dataset_path"))
    if reason is not None:
        yield f"dataset_path: {reason}"
    options = content.get("dataset_kwargs")
    if isinstance(options, Mapping):
        reason = foreign_source(None, options.get("data_files"), options.get("data_dir"))
        if reason is not None:
            yield f"dataset_kwargs: {reason}"

    # How answers are scored and filtered
    for key in ("metric_list", "aggregate_metric_list"):
        for metric in _mappings(content.get(key)):
            yield from _unlisted(metric, METRIC, f"{key}: ", function)
            if key == "metric_list":
                yield from _foreign_metric(metric, function)
    for pipeline in _mappings(content.get("filter_list")):
        for step in _mappings(pipeline.get("filter")):
            yield from _unlisted(step, FILTER, "filter_list: ", function)
            name = step.get("function")
            if name not in FILTERS and not isinstance(name, function):
                yield f"filter_list: function: {name}"

    for member in _mappings(content.get("task")):
        yield from foreign_in_task(member, function)


def _unlisted(content: Any, names: Collection[str], where: str, function: type) -> Iterator[str]:
    """The keys of a mapping that are not among `names`, unless a function, which is refused anyway, is their value."""
    if not isinstance(content, Mapping):
        return
    for name, value in content.items():
        if name not in names and not isinstance(value, function):
            yield f"{where}{name}"


def _mappings(content: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; none in anything else."""
    if not isinstance(content, list):
        return []
    return [item for item in content if isinstance(item, Mapping)]


def _foreign_metric(metric: Mapping[str, Any], function: type) -> Iterator[str]:
    """A metric that the harness lacks, which the evaluate library would run as a script."""
    from lm_eval.api import metrics  # noqa: F401  registers the harness's metrics
    from lm_eval.api.registry import metric_registry

    name = metric.get("metric")
    known = isinstance(name, function) or (isinstance(name, str) and name in metric_registry)
    if name is not None and (not known or metric.get("hf_evaluate") is True):
        yield f"metric: {name}, which is a script"
