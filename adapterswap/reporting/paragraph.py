"""A run's methods as a paragraph to paste into a paper: models, decoding, selection, statistics, versions.

Says only what the run recorded and what the report computed; a sentence is left out if the run did not record its
facts. Knows reports and what runs describe; knows nothing of pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from adapterswap import __version__
from adapterswap.reporting.headline import Target, resampled
from adapterswap.reporting.ranks import Ranks
from adapterswap.reporting.relations import Ranking
from adapterswap.reporting.statistics import MIN_UNITS
from adapterswap.sweeps.freezing import Preregistration

__all__ = ["methods_paragraph"]

_HASH = 12  # digits shown of a SHA-256


def methods_paragraph(
    described: Mapping[str, Any], kind: str, units: str, reference: str, targets: Sequence[Target],
    ranking: Ranking | None, *, draws: int, seed: int, registered: Preregistration | None = None,
) -> str:  # fmt: skip
    """The methods paragraph, on one line.

    Args:
        described: the run's description of itself: sweep.json, or a lab run's scene.
        kind: `sweep` or `lab`.
        units: what methods are averaged over.
        reference: the family with which the others are compared.
        targets: the tables.
        ranking: the tests, if there are any.
        draws, seed: of the bootstrap.
        registered: what was registered before the run, if anything.
    """
    sentences = [
        *(_models(described) if kind == "sweep" else _lab(described)),
        *(_evaluation(described, targets) if kind == "sweep" else ()),
        *_selection(described, kind, units, targets),
        *_statistics(units, reference, targets, ranking, draws, seed),
        *_registered(registered),
        *_versions(described),
    ]
    return " ".join(sentences)


def _lab(described: Mapping[str, Any]) -> list[str]:
    scene = described.get("recipe", {}).get("scene", {}).get("name")
    scene_text = f', scene "{scene}"' if scene else ""
    return [f"We trained and composed experts of a pico model in adapterswap's lab{scene_text}."]


def _models(described: Mapping[str, Any]) -> list[str]:
    base, experts = described.get("base_model", {}), described.get("experts", {})
    sentences = []
    if "source" in base:
        sentences.append(f"All compositions use the base model {_source_text(base, 'config_sha256', 'config ')}.")
    sides: dict[str, list[str]] = {}
    for name, expert in experts.items():
        full = "files" in expert
        hashed = (
            _source_text(expert, "config_sha256", "full checkpoint, config ")
            if full
            else _source_text(expert, "sha256")
        )
        sides.setdefault(str(expert.get("side")), []).append(f"{name} ({hashed})")
    roles = ("task", "language", *described.get("recipe", {}).get("roles", {}))
    for side, names in sides.items():
        kind, row = (f"{side} expert", "") if side in roles else ("other adapter", f" of {side}")
        sentences.append(
            f"The {kind}{row} is {names[0]}." if len(names) == 1 else f"The {kind}s{row} are {_listed(names)}."
        )
    return sentences


def _source_text(source: Mapping[str, Any], hashed: str, label: str = "") -> str:
    revision = f"@{source['revision']}" if source.get("revision") else ""
    digest = source.get(hashed)
    return f"{source['source']}{revision}" + (f", {label}SHA-256 {str(digest)[:_HASH]}…" if digest else "")


def _evaluation(described: Mapping[str, Any], targets: Sequence[Target]) -> list[str]:
    settings, versions = described.get("settings", {}), described.get("versions", {})
    harness = "lm-evaluation-harness" + (f" {versions['lm_eval']}" if "lm_eval" in versions else "")
    tasks = _listed([f"{target.task} ({target.metric})" for target in targets])
    shots = settings.get("num_fewshot")
    how = [f"with {shots} shots" if shots is not None else "with each task's own number of shots"]
    if settings.get("apply_chat_template"):
        how.append("the chat template")
    sentences = [f"We evaluate on {tasks} with {harness}, {' and '.join(how)}."]
    other_tasks = list(dict.fromkeys(task for target in targets for task in target.tasks if task != target.task))
    other_tasks = [task for task in other_tasks if task not in {target.task for target in targets}]
    if other_tasks:
        sentences.append(f"The same compositions are also evaluated on {_listed(other_tasks)}.")
    tokens = settings.get("max_gen_toks")
    generation = settings.get("gen_kwargs") or {}
    decoding = _listed([f"{key} = {value}" for key, value in generation.items()])
    limits = f"outputs are limited to {tokens} tokens unless a task sets its own limit" if tokens else ""
    own = "Decoding follows each task's own settings" + (f", except {decoding}" if generation else "")
    sentences.append(f"{own}; {limits}." if limits else f"{own}.")
    if own_settings := settings.get("generation_config"):
        listed = _listed([f"{key} = {value}" for key, value in own_settings.items()])
        sentences.append(f"Settings that a task leaves open follow the model's generation config ({listed}).")
    if settings.get("dtype"):
        sentences.append(f"The base model is loaded in {settings['dtype']}.")
    if settings.get("system_instruction"):
        sentences.append("A system instruction precedes each prompt.")
    if settings.get("limit") is not None:
        limit = settings["limit"]
        sentences.append(f"We use the first {limit} documents of each task." if limit >= 1 else
                         f"We use the first {limit:.0%} of each task's documents.")  # fmt: skip
    return sentences


def _selection(described: Mapping[str, Any], kind: str, units: str, targets: Sequence[Target]) -> list[str]:
    if kind == "lab":
        return ["Configurations were selected for each seed on a development set."]
    split = [target for target in targets if target.select]
    if not any(target.chosen for target in targets):
        return []
    if not split:
        return ["No documents were set apart for selecting configurations, so we report defaults."]
    seed = described.get("recipe", {}).get("selection", {}).get("seed", 0)
    sizes = _by_task({target.task: f"{target.select} documents" for target in split})
    remaining = _by_task({target.task: str(target.report) for target in split})
    sentences = [
        f"Configurations were selected separately for each of the {units} on {sizes}, drawn with seed {seed}, and are "
        f"reported on the other {remaining}; ties go to the default configuration."
    ]
    if search := described.get("recipe", {}).get("search"):
        sentences.append(f"Grids were searched ({search.get('sampler', 'tpe')}, {search.get('trials', 40)} trials).")
    return sentences


def _by_task(numbers: Mapping[str, str]) -> str:
    """The number if it is the same for all tasks; otherwise each number with its task."""
    if len({*numbers.values()}) == 1:
        return next(iter(numbers.values()))
    return _listed([f"{number} ({task})" for task, number in numbers.items()])


def _statistics(
    units: str, reference: str, targets: Sequence[Target], ranking: Ranking | None, draws: int, seed: int
) -> list[str]:
    sentences = [f"Methods are averaged over {units} and compared with {reference}."]
    if any(row.difference and row.difference.low is not None for target in targets for row in target.rows):
        over = _listed(list(dict.fromkeys(resampled(target) for target in targets)))
        sentences.append(
            "Differences are paired by document and expert and have 95 % intervals from a pigeonhole bootstrap (Owen "
            f"2007) over {over} ({draws:,} draws, seed {seed}), widened for small numbers of levels and not corrected "
            "for multiple comparisons."
        )
    ranks = ranking.ranks if ranking is not None else None
    if ranks is None or ranking is None:
        return sentences
    if ranks.settings < MIN_UNITS:
        return [*sentences, f"We report no p-values: {ranks.settings} settings are fewer than the {MIN_UNITS} needed."]
    sentences += _tests(ranks, ranking)
    return sentences


def _tests(ranks: Ranks, ranking: Ranking) -> list[str]:
    sentences = []
    methods = _listed([re.sub(r", (selected|default)$", r" (\1)", label) for label in ranking.methods])
    if ranks.p is not None and ranks.statistic is not None and ranks.agreement is not None:
        p = "p < 0.001" if ranks.p < 0.001 else f"p = {ranks.p:.3f}"
        sentences.append(
            f"Friedman's test over {ranks.settings} settings compares {methods} (χ² = {ranks.statistic:.2f}, "
            f"{len(ranks.mean_ranks) - 1} degrees of freedom, {p}, Kendall's W = {ranks.agreement:.2f}); mean ranks "
            f"differ at the 0.05 level if they are at least {ranks.critical_difference:.2f} apart (Nemenyi; Demšar "
            "2006). These tests assume independent settings; settings that share experts or documents are not."
        )
    against = f"against {ranks.reference}" if ranks.reference else "between every pair of methods"
    sentences.append(
        f"Wilcoxon's signed-rank tests {against} are corrected by Holm's method and reported with rank-biserial "
        "correlations as effect sizes."
    )
    return sentences


def _registered(registered: Preregistration | None) -> list[str]:
    if registered is None:
        return []
    sentence = f"Comparisons and selection were registered before the run (SHA-256 {registered.sha256})"
    if not registered.differences:
        return [f"{sentence} and carried out as registered."]
    return [f"{sentence}, with these departures: {'; '.join(registered.differences)}."]


def _versions(described: Mapping[str, Any]) -> list[str]:
    versions = {name: number for name, number in described.get("versions", {}).items() if number}
    recorded = described.get("adapterswap_version")
    ran = [f"adapterswap {recorded}"] if recorded else []
    ran += [f"{name} {number}" for name, number in versions.items()]
    credit = f"the report was made by adapterswap {__version__}"
    return [f"The run used {_listed(ran)}; {credit}." if ran else f"{credit[0].upper()}{credit[1:]}."]


def _listed(names: Sequence[str]) -> str:
    *some, last = names or [""]
    return f"{', '.join(some)} and {last}" if some else last
