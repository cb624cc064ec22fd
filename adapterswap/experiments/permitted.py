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

METADATA = _listed("version description num_samples canonical_task task_pretty_name license url citation")
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


def foreign(content: Any, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """What a mapping of settings may not pass on: names outside `names`, and values that are not plain.

    Args:
        content: the settings, as a file has them. Anything but a mapping is for others to refuse.
        names: the permitted names.

    Yields:
        The name of each such setting, and why it is refused.
    """
    for name, value in content.items() if isinstance(content, Mapping) else ():
        if name not in names:
            yield str(name), "it is not one of the settings that are known to be harmless"
        elif not _is_plain(value):
            yield str(name), f"{shown(value)} is neither a plain value nor a list of them"


def _is_plain(value: Any) -> bool:
    """Whether a setting is a word, a number or a truth value, or a short list of such values or lists."""
    if isinstance(value, list):
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def foreign_dataset(path: Any, folder: Path | None = None) -> str | None:
    """Why `datasets` may not load what a file names as its data set; None if it may.

    It may be one of `READERS`, a Hub id org/name, or a folder.

    Args:
        path: the name.
        folder: the folder that a relative path starts from; None for the current one.
    """
    if path is None or (isinstance(path, str) and (path in READERS or _HUB_ID.fullmatch(path))):
        return None
    if isinstance(path, str) and path and (Path(folder or "") / path).is_dir():
        return None
    readers = ", ".join(sorted(READERS))
    return f"{shown(path)} is neither a data set org/name on the Hub, nor a folder, nor one of {readers}"


def foreign_address(value: Any) -> str | None:
    """The first of the names of files in `value`, a text, list or mapping, that may not be opened; None if all may.

    These are paths on this machine and addresses on the Hub (`hf://`): an address elsewhere is one that only the author
    of the file chose.
    """
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return next((address for item in inner if (address := foreign_address(item)) is not None), None)
    text = str(value)
    return text if "::" in text or "://" in text.removeprefix(_HUB) else None
