"""A report as plain data: its page, its tables, documents on which methods disagree, and commands to run it again.

Prompts and samples come from models and data sets, so callers must escape them before they show them.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from adapterswap import __version__
from adapterswap.core import BASE, Rule, words_of
from adapterswap.experiments.evaluation import Settings
from adapterswap.experiments.reporting.choices import (
    Choice,
    SelectionCurve,
    Truncations,
    Unit,
    choices,
    families_of,
    included_methods,
    is_single,
    matching,
    reported,
    selection_curves,
    single_families,
    table_choice,
    truncations,
    with_units,
)
from adapterswap.experiments.reporting.headline import Target, target_table
from adapterswap.experiments.reporting.relations import (
    GridCell,
    Indicator,
    Ranking,
    ZoneGrid,
    grids,
    indicators,
    ranking,
)
from adapterswap.experiments.reporting.source import ReportSource
from adapterswap.experiments.reporting.statistics import LEVEL, MIN_UNITS
from adapterswap.experiments.sweeps import Cell, CellResult, Run, TaskInfo
from adapterswap.experiments.sweeps.recording import Preregistration
from adapterswap.kit.dependencies import require
from adapterswap.kit.errors import ArgumentError, DataError, Problems, did_you_mean

_NOT_OPTIONS = {"task", "language", "allocation", "allow_negative", "chains", "full_rank"}
_SETTINGS = ("num_fewshot", "limit", "batch_size", "max_gen_toks", "system_instruction", "dtype")
_FLAGS = ("apply_chat_template", "truncate", "language_fidelity", "confirm_run_unsafe_code")


def compose_command(run: Run, cell: Cell) -> str | None:
    """The `adapterswap compose` that writes a cell's adapter, or the `adapterswap merge` that writes its full weights.

    None if the cell composes nothing or is a reset.
    """
    experts = run.described.get("experts", {})
    chains = cell.composition.get("chains", {})
    expert_names: list[str] = []
    for name in dict.fromkeys((*cell.task_expert, *cell.language_expert, *cell.other_experts)):
        expert_names += chains.get(name, [name])
    if is_single(cell) or not experts.keys() >= {*expert_names}:
        return None

    settings = cell.composition
    owners = _only(settings, ("tokenizer", "config_from"))
    refers_to_names = "allocation" in settings or chains or set(owners.values()) - {BASE}
    if not refers_to_names and not (cell.task_expert and cell.language_expert):
        return None

    words = ["adapterswap", "merge" if _is_merged(run, cell) else "compose"]
    if refers_to_names:
        # With -t and -l, experts would be named by their folders.
        for name in expert_names:
            words += ["--expert", f"{name}={_source(experts[name])}"]
        for name, parts in chains.items():
            words += ["--chain", f"{name}={','.join(parts)}"]

        # The rules of the cell, or those that its zones and its method mean; these leave only a few settings to name
        rules = settings.get("allocation")
        if rules is None:
            composition = cell.parsed
            assert composition is not None
            has_checkpoint = any("files" in experts[name] for name in expert_names)
            rules = [rule.as_data() for rule in composition.rules(run.described["num_layers"], full=has_checkpoint)]
            settings = owners | _only(settings, ("row_threshold", "seed", "allow_negative"))
        for rule in rules:
            words += ["--rule", Rule.text_of(rule)]
    else:
        for name in cell.task_expert:
            words += ["-t", _source(experts[name])]
        for name in cell.language_expert:
            words += ["-l", _source(experts[name])]

    words += ["--base-model", _source(run.described["base_model"])]
    for key, value in {**settings, **cell.output}.items():
        if key not in _NOT_OPTIONS and (key, value) != ("method", "layer_swap"):
            words += words_of(key, value)
    if settings.get("allow_negative"):
        words.append("--allow-negative")
    return shlex.join([*words, "--out-path", cell.cell])


def _only(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Those of the settings that are set and have one of these keys."""
    return {key: settings[key] for key in keys if key in settings}


def evaluate_command(run: Run, cell: Cell) -> str:
    """The `adapterswap evaluate` that evaluates the output of `compose_command` on the cell's tasks.

    Two lines, if one engine answered the tasks that generate and another one the others.
    """
    settings: Mapping[str, Any] = run.described.get("settings", {})
    if "loglikelihood" not in (settings.get("engine") or {}):
        return _evaluate_command(run, cell, cell.tasks, settings)

    # Only a task that generates records how many of its answers were cut off.
    values = next(result.results for result in run.results if result.cell.cell == cell.cell)
    generated = []
    compared = []
    for task in cell.tasks:
        if values[task].cut is None:
            compared.append(task)
        else:
            generated.append(task)

    lines = []
    if generated:
        lines.append(_evaluate_command(run, cell, generated, settings))
    if compared:
        own = {**settings, **settings.get("loglikelihood", {}), "engine": None}
        lines.append(_evaluate_command(run, cell, compared, own))
    return "\n".join(lines)


def _evaluate_command(run: Run, cell: Cell, tasks: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The `adapterswap evaluate` of some tasks, with those settings that are not the default."""
    words = ["adapterswap", "evaluate", "--base-model"]
    if _is_merged(run, cell):
        words.append(cell.cell)
    else:
        words += [_source(run.described["base_model"]), "--adapter", cell.cell]
    words += ["--tasks", ",".join(tasks)]

    # Settings that are options of the same name
    for key in _SETTINGS:
        if settings.get(key) is not None:
            words += [f"--{key.replace('_', '-')}", str(settings[key])]
    for key in _FLAGS:
        if settings.get(key):
            words.append(f"--{key.replace('_', '-')}")

    # The others
    engine = settings.get("engine")
    if engine:
        words += ["--engine", engine["name"]]
        for key, value in engine["arguments"].items():
            words += ["--engine-args", f"{key}={value}"]
    own_tasks = run.described["recipe"].get("settings", {}).get("include_path")
    if own_tasks:
        words += ["--include-path", str(own_tasks)]
    if settings.get("seed", Settings.seed) != Settings.seed:
        words += ["--sampling-seed", str(settings["seed"])]
    generation = settings.get("gen_kwargs")
    if generation:
        words += ["--gen-kwargs", ",".join(f"{key}={value}" for key, value in generation.items())]
    return shlex.join(words)


def _is_merged(run: Run, cell: Cell) -> bool:
    """Whether a cell was evaluated as full weights: at full rank, or because an expert is a full checkpoint."""
    if cell.output.get("full_rank"):
        return True
    experts = run.described.get("experts", {})
    expert_names = (*cell.task_expert, *cell.language_expert, *cell.other_experts)
    return any("files" in experts.get(name, {}) for name in expert_names)


def _source(described: Mapping[str, Any]) -> str:
    """Where a base or an expert comes from, with its revision."""
    source, revision = described["source"], described.get("revision")
    if revision:
        return f"{source}@{revision}"
    return str(source)


_EACH_WAY = 3
_LONGEST = 1500  # characters shown of a text


@dataclass(frozen=True)
class ScoredChoice:
    """A choice of a document: its text, its log-likelihood, and whether the method chose it."""

    text: str
    likelihood: float
    is_chosen: bool


@dataclass(frozen=True)
class Output:
    """A method's output for a document: its text, the answers that filters extracted from it, and its primary score.

    If the task asks for likelihoods, they are the text, or the choices where these are known, and there are no answers.
    """

    method: str
    text: str
    answers: Mapping[str, str]
    score: float | None
    choices: tuple[ScoredChoice, ...] = ()


@dataclass(frozen=True)
class AnswerExample:
    """A document: the end of its prompt, the right answer, and the outputs."""

    doc_id: int
    question: str
    target: str
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Disagreements:
    """Where one method does better or worse than another in one unit.

    Attributes:
        task: the target task.
        language: the code of its language.
        unit: the experts.
        one, other: the labels of the two methods' rows.
        better, worse: the number of reported documents on which `one` does better, and worse.
        examples: some of each, evenly spaced.
    """

    task: str
    language: str | None
    unit: Unit
    one: str
    other: str
    better: int
    worse: int
    examples: tuple[AnswerExample, ...]


def disagreements(run: Run, task: TaskInfo, shown: Sequence[Choice]) -> Disagreements | None:
    """Where the first two of `shown` disagree, and the outputs of all; None if they cannot be compared."""
    common = _cells(shown, task)
    if common is None:
        return None
    unit, cells = common

    # The documents on which the first is better, and worse
    first, second = (cell.results[task.name].docs for cell in cells[:2])
    sign = 1 if task.higher_is_better else -1
    better = []
    worse = []
    for doc in reported(task):
        if doc in first and doc in second:
            difference = sign * (first[doc] - second[doc])
            if difference > 0:
                better.append(doc)
            elif difference < 0:
                worse.append(doc)

    labels = [choice.label for choice in shown]
    documents = [*_spaced(better), *_spaced(worse)]
    examples: list[AnswerExample] = []
    if documents:
        examples = _examples(run, task, cells, labels, documents)
    return Disagreements(task.name, task.language, unit, labels[0], labels[1], len(better), len(worse), tuple(examples))


def _cells(shown: Sequence[Choice], task: TaskInfo) -> tuple[Unit, list[CellResult]] | None:
    """The first unit that all of `shown` have, and their cells in it."""
    if len(shown) < 2:
        return None
    for unit in shown[0].cells:
        cells = []
        for choice in shown:
            matched = [choice.cells[other] for _, _, other in matching([unit], choice.cells)]
            if matched and matched[0].results[task.name].docs:
                cells.append(matched[0])
        if len(cells) == len(shown):
            return unit, cells
    return None


def _examples(
    run: Run, task: TaskInfo, cells: Sequence[CellResult], labels: Sequence[str], documents: Sequence[int]
) -> list[AnswerExample]:
    """What the cells answered on these documents; empty if their folders do not have it."""
    questions = run.questions(task.name, cells[0].cell)
    if questions is None:
        return []
    samples = []  # of each cell: document → its line
    for cell in cells:
        rows = run.samples(cell.cell)
        if rows is None:
            return []
        samples.append({row["doc_id"]: row for row in rows if row["task"] == task.name})

    examples = []
    for doc in documents:
        answers = [by_doc[doc] for by_doc in samples if doc in by_doc]
        if len(answers) == len(cells):
            examples.append(_example(doc, questions.get(doc), labels, answers, cells, task))
    return examples


def _spaced(documents: list[int]) -> list[int]:
    """At most `_EACH_WAY` of the documents, evenly spaced."""
    if len(documents) <= _EACH_WAY:
        return documents
    return [documents[place * len(documents) // _EACH_WAY] for place in range(_EACH_WAY)]


def _example(
    doc: int,
    question: tuple[str, tuple[str, ...]] | None,
    labels: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Sequence[CellResult],
    task: TaskInfo,
) -> AnswerExample:
    """What the cells answered on a document; `rows` are their samples."""
    prompt, choices = question or ("", ())
    outputs = []
    for label, row, cell in zip(labels, rows, cells, strict=True):
        likelihoods = _likelihoods(row["output"])
        answers = {}
        if not likelihoods:
            answers = {str(name): _text(answer) for name, answer in row["answers"].items()}
        score = cell.results[task.name].docs.get(doc)
        scored = _scored(choices, likelihoods, task.primary[0])
        outputs.append(Output(label, _text(row["output"]), answers, score, scored))

    target = _text(rows[0]["target"])
    if target.isdecimal() and int(target) < len(choices):  # the harness reads a number as the place of a choice
        target = choices[int(target)]

    # Of a prompt, only the question after the shots
    last = prompt.rstrip().rpartition("\n\n")[2]
    if len(last) > _LONGEST:
        last = f"…{last[-_LONGEST:]}"
    return AnswerExample(doc, last, target, tuple(outputs))


def _scored(choices: Sequence[str], likelihoods: Sequence[tuple[float, bool]], metric: str) -> tuple[ScoredChoice, ...]:
    """The choices with their likelihoods; empty if they do not belong together."""
    if not choices or len(choices) != len(likelihoods):
        return ()

    # `acc` compares log-likelihoods, `acc_norm` those per character. The first of equal choices is chosen.
    compared = []
    for text, (likelihood, _) in zip(choices, likelihoods, strict=True):
        if metric == "acc_norm" and text:
            compared.append(likelihood / len(text))
        else:
            compared.append(likelihood)
    chosen = compared.index(max(compared))

    scored = []
    for place, text in enumerate(choices):
        likelihood, _ = likelihoods[place]
        scored.append(ScoredChoice(text, likelihood, place == chosen))
    return tuple(scored)


def _likelihoods(output: Any) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding produces it) of each continuation, as lm-eval records likelihoods.

    Empty if the output is something else.
    """
    pairs = [output]
    if isinstance(output, list) and output and isinstance(output[0], list):
        pairs = output

    likelihoods = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], bool):
            return []
        likelihoods.append((float(pair[0]), pair[1]))
    return likelihoods


def _text(value: Any) -> str:
    """An output as text, cut at `_LONGEST`; log-likelihoods as a line for each choice."""
    likelihoods = _likelihoods(value)
    if likelihoods:
        lines = []
        for place, (likelihood, is_greedy) in enumerate(likelihoods):
            line = f"log-likelihood {likelihood:.2f}"
            if is_greedy:
                line += ", greedy"
            if len(likelihoods) > 1:
                line = f"choice {place}: {line}"
            lines.append(line)
        return "\n".join(lines)

    text = value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return text


REPORT_FORMAT = "adapterswap-report/1"
_LEADS = ("layer_swap", "layer swap")


@dataclass(frozen=True)
class Labels:
    """What a report calls things, where the names in the run are not for readers.

    Attributes:
        title: the heading of the page; by default the name of the run.
        tasks, experts: name → label.
    """

    title: str | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)

    def check(self, run: Run) -> None:
        """Refuse labels of what the run does not have."""
        experts: dict[str, None] = {}
        for cell in run.cells:
            for side in cell.unit:
                if side is not None:
                    experts |= dict.fromkeys(side.split("+"))

        problems = Problems(ArgumentError)
        kinds = (("task", self.tasks, list(run.tasks)), ("expert", self.experts, list(experts)))
        for kind, labels, names in kinds:
            for name in labels:
                if name not in names:
                    remedy = did_you_mean(name, names, f"Use some of: {', '.join(names)}")
                    problems.add(f"The run has no {kind} {name!r}", remedy, parameter=f"{kind}_label")
        problems.raise_if_any()

    def task(self, name: str) -> str:
        """A task's label, or its name."""
        return self.tasks.get(name, name)

    def expert(self, name: str) -> str:
        """The label of an expert, or its name; of several on a side, which + joins, of each."""
        return "+".join(self.experts.get(part, part) for part in name.split("+"))

    def unit(self, unit: Unit) -> str:
        """A pair of experts or a seed as text."""
        labels = []
        for part in unit:
            if part is not None:
                labels.append(self.expert(part))
        return " + ".join(labels) or "–"


@dataclass(frozen=True)
class Report:
    """The content of a report.

    Attributes:
        name: the name of the run's folder, or the names of several: `swahili + ties`.
        kind, units, remarks: see `ReportSource`.
        reference: the family with which the others are compared.
        lead: the family whose landscape, indicators and examples are shown first.
        cells, finished: the number of cells in the run, and of finished ones.
        missing: family → the number of its unfinished cells.
        targets: a table for each target task.
        ranking: over all targets and units; None if too few settings are complete.
        indicators: correlations of experts' own scores with their compositions'.
        grids: landscapes of bottom and top layers, and of pairs of checkpoints.
        curves: the course of each selection, by number of configurations.
        truncations: the errors and scores of compositions that were reduced to a lower rank.
        disagreements: by target task.
        commands: the commands that run it again.
        compositions: (row, command to compose, command to evaluate) for each cell of the lead's last row.
        preregistration: what was registered before the run, and what differs from it; None if nothing was registered.
        experts, recipe, settings, versions: as recorded by the run.
        labels: what it calls tasks and experts.
    """

    name: str
    kind: str
    units: str
    remarks: tuple[str, ...]
    reference: str
    lead: str
    cells: int
    finished: int
    missing: Mapping[str, int]
    targets: tuple[Target, ...]
    ranking: Ranking | None
    indicators: tuple[Indicator, ...]
    grids: tuple[ZoneGrid, ...]
    curves: tuple[SelectionCurve, ...]
    truncations: tuple[Truncations, ...]
    disagreements: tuple[Disagreements, ...]
    commands: tuple[str, ...]
    compositions: tuple[tuple[str, str, str], ...]
    preregistration: Preregistration | None
    experts: Mapping[str, Any]
    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    labels: Labels = Labels()

    def __repr__(self) -> str:
        tasks = ", ".join(target.task for target in self.targets)
        return f"<Report of {self.name!r}: {self.finished} of {self.cells} cells; {tasks}; against {self.reference!r}>"

    @property
    def lacking_figures(self) -> dict[str, str]:
        """The kinds of figures that it has no data for, and what is missing."""
        from adapterswap.experiments.reporting.figures import plan_figures

        return plan_figures(self)[1]

    @property
    def untested(self) -> list[str]:
        """Why p-values and intervals are missing, in sentences."""
        lines = []
        if self.ranking is not None:
            ranks = self.ranking.ranks
            if ranks.p is None and ranks.statistic is not None:
                lines.append(f"No p-values: {ranks.settings} settings, at least {MIN_UNITS} are needed")
        if self.why_no_wilcoxon:
            lines.append(self.why_no_wilcoxon)

        for target in self.targets:
            lines += [f"{self.labels.task(target.task)}: {sentence}" for sentence in target.untested]
        return lines

    @property
    def setting(self) -> str:
        """What a setting of the ranks is, in sentences without the last full stop; empty without ranks."""
        ranked = self.ranking
        if ranked is None:
            return ""
        if ranked.over_groups:
            text = f"A setting is one of the {ranked.group}; its score is the mean over its documents and {self.units}"
            other: str | None = self.units
        else:
            text = f"A setting is a target task and one of the {self.units}"
            other = ranked.group
        if ranked.has_both:
            text += f". It could be one of the {other} too, over which the methods differ more clearly"
        return text

    @property
    def why_no_wilcoxon(self) -> str:
        """Why there is no p of Wilcoxon's test; empty if there is one, or if too few settings allow no test at all."""
        if self.ranking is None:
            return ""
        ranks = self.ranking.ranks
        if ranks.settings < MIN_UNITS or ranks.least <= LEVEL:
            return ""
        least = f"{ranks.least:.2g}"
        if ranks.tested > 1:
            least += f" after Holm's correction for {ranks.tested} comparisons"
        return (
            f"With {ranks.settings} settings, the p of Wilcoxon's test is at least {least}, "
            "whatever the scores are, so it is left out"
        )

    def as_json(self) -> dict[str, Any]:
        """The content of summary.json: all numbers, but not the examples, whose text is not trusted."""
        content = asdict(self)
        for disagreement in content["disagreements"]:
            del disagreement["examples"]
        return {"format": REPORT_FORMAT, "adapterswap_version": __version__, **content}


def make_report(
    source: ReportSource,
    *,
    reference: str | None = None,
    methods: Sequence[str] | None = None,
    units: Sequence[str] | None = None,
    labels: Labels | None = None,
) -> Report:
    """Compute the report of a run.

    Args:
        source: from `open_source`.
        reference: a family of the run; by default the task expert, or soup if `methods` leaves it out.
        methods: the families to rank and test, see `included_methods`; tables show all.
        units: the pairs, experts or seeds to compute everything over, see `with_units`.
        labels: what the report calls tasks and experts.

    Raises:
        ArgumentError: the run has no such family or unit, or nothing that a label names; fewer than two methods are
            left; or more than one of several runs was registered.
        DataError: no target task of the run is finished, or a file of samples or the pre-registration is damaged.
        DependencyError: the `report` extra is not installed.
    """
    require("report")
    labels = labels or Labels()
    labels.check(source.run)

    # What enters it
    recorded = with_units(source.run, units)
    source = replace(source, run=with_units(source.run.as_reported, units))
    run = source.run
    families = families_of(run)
    ranked = included_methods(run, methods)
    if reference is None:
        reference = Preregistration.default_reference(ranked)
    if reference not in families:
        raise ArgumentError(
            f"The run has no method {reference!r}", f"Use one of: {', '.join(families)}", parameter="reference"
        )
    lead = _lead(run, families, reference)
    targets = [task for task in run.tasks.values() if task.role == "target" and choices(run, task)]
    if not targets:
        raise DataError(
            f"No target task of {source.name} is finished",
            "Run the sweep again; it resumes where it stopped",
            parameter="run",
        )

    # What is computed for each target
    tables = [target_table(run, task, reference) for task in targets]
    landscapes: list[ZoneGrid] = []
    all_indicators: list[Indicator] = []
    curves: list[SelectionCurve] = []
    reduced: list[Truncations] = []
    compared: list[Disagreements] = []
    for task in targets:
        landscapes += grids(run, task)
        all_indicators += indicators(recorded, recorded.tasks[task.name])
        curves += selection_curves(run, task)
        reduced += truncations(run, task)
        disagreement = disagreements(run, task, _shown(choices(run, task), lead, reference))
        if disagreement is not None:
            compared.append(disagreement)
    if source.development and units is None:  # this landscape is a mean over all seeds
        landscapes.append(_development(source))

    remarks = source.remarks
    if units is not None:
        remarks = *remarks, f"This report covers only some of the run's {source.units}: {', '.join(units)}."
    missing = Counter(cell.family for cell in run.unfinished)
    described = run.described
    return Report(
        name=source.name,
        kind=source.kind,
        units=source.units,
        remarks=remarks,
        reference=reference,
        lead=lead,
        cells=len(run.cells),
        finished=len(run.results),
        missing=dict(missing),
        targets=tuple(tables),
        ranking=ranking(run, targets, reference, ranked),
        indicators=tuple(all_indicators),
        grids=tuple(landscapes),
        curves=tuple(curves),
        truncations=tuple(reduced),
        disagreements=tuple(compared),
        commands=(*source.commands, _command(source, reference, methods, units)),
        compositions=tuple(_compositions(run, tables, lead)),
        preregistration=_registered(source, reference, ranked, units),
        experts=described.get("experts", {}),
        recipe=described.get("recipe", {}),
        settings=described.get("settings", {}),
        versions=described.get("versions", {}),
        labels=labels,
    )


def _registered(
    source: ReportSource, reference: str, methods: Sequence[str], units: Sequence[str] | None
) -> Preregistration | None:
    """The pre-registration of the run. Of several runs, at most one may have one."""
    if source.kind != "sweep":
        return None

    registered: dict[int, Preregistration] = {}
    for place, run in enumerate(source.parts or (source.run,)):
        registration = Preregistration.read(run.folder, run.described, reference, methods, units)
        if registration is not None:
            registered[place] = registration
    if len(registered) > 1:
        raise ArgumentError(
            f"{len(registered)} of the runs were registered separately",
            "Report each on its own",
            parameter="run",
        )

    for place, registration in registered.items():
        if not source.parts:
            return registration
        others = [*source.names[:place], *source.names[place + 1 :]]
        together = f"it is reported together with {', '.join(others)}"
        return replace(registration, differences=(*registration.differences, together))
    return None


def _command(source: ReportSource, reference: str, methods: Sequence[str] | None, units: Sequence[str] | None) -> str:
    """The `adapterswap report` that makes this report."""
    words = ["adapterswap", "report", *source.names, "--reference", reference]
    for name in methods or ():
        words += ["--methods", name]
    for name in units or ():
        words += ["--units", name]
    return shlex.join(words)


def _lead(run: Run, families: list[str], reference: str) -> str:
    """Layer swap by its usual names, or else the composition, or else the family, with the most cells."""
    for name in _LEADS:
        if name in families and name != reference:
            return name

    candidates = [family for family in families if family != reference] or families
    single = single_families(run)
    composed = [family for family in candidates if family not in single] or candidates
    counts = Counter(result.cell.family for result in run.results)
    return max(composed, key=lambda family: counts[family])


def _shown(all_choices: list[Choice], lead: str, reference: str) -> list[Choice]:
    """The lead, the reference, and a third method for orientation: the first other one of the references."""
    shown = []
    for name in dict.fromkeys([lead, reference, *Preregistration.REFERENCES]):
        choice = table_choice(all_choices, name)
        if choice is not None:
            shown.append(choice)
        elif name in (lead, reference):
            return []
    return shown[:3]


def _development(source: ReportSource) -> ZoneGrid:
    """The landscape of a lab run on its development problems."""
    task = next(iter(source.run.tasks))
    votes: Counter[str] = Counter()
    for result in source.run.results:
        if result.cell.family in _LEADS:
            votes[result.cell.configuration] += 1

    cells = []
    for (bottom, top), mean in sorted(source.development.items()):
        cells.append(GridCell(bottom, top, mean, sum(votes.values()), votes[f"bottom={bottom},top={top}"]))
    return ZoneGrid(task, "layer swap", "development problems", tuple(cells))


def _compositions(run: Run, tables: list[Target], lead: str) -> list[tuple[str, str, str]]:
    """(row, command to compose, command to evaluate) for each cell of the lead's last rows."""
    by_id = {result.cell.cell: result.cell for result in run.results}
    compositions: dict[str, tuple[str, str, str]] = {}
    for table in tables:
        rows = [row for row in table.rows if row.family == lead]
        if not rows:
            continue
        for chosen in rows[-1].chosen:
            cell = by_id[chosen.cell]
            command = compose_command(run, cell)
            if command is not None and chosen.cell not in compositions:
                compositions[chosen.cell] = cell.short, command, evaluate_command(run, cell)
    return list(compositions.values())
