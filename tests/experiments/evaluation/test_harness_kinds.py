"""Every kind of task in lm-evaluation-harness, from the user's own files, against plain loops."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tolerances import near

from adapterswap.experiments.evaluation import EvaluationResult, Settings, evaluate_model
from adapterswap.experiments.evaluation.downloaded import is_flores
from adapterswap.experiments.evaluation.evaluator import preview
from adapterswap.experiments.evaluation.tasks import LoadedTasks
from adapterswap.kit.errors import ArgumentError

from .conftest import LAYERS, byte_tokenizer, pico_model

Model = tuple[Any, Any]

ROWS = [{"text": "Maji ni uhai. Haraka haraka haina baraka."}, {"text": "Haba na haba"}, {"text": "Asiyesikia la mkuu"}]
HEAD = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
metadata: {{version: 1}}
"""
TASKS = {
    "perplexity": """
task: pico_perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
""",
    "write": """
task: pico_write
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["."], do_sample: false, max_gen_toks: 6}}
filter_list:
  - {{name: first-word, filter: [{{function: regex, regex_pattern: "(\\\\w+)"}}, {{function: take_first}}]}}
  - {{name: as-is, filter: [{{function: take_first}}]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
""",
    "last": """
task: pico_last
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
""",
}
CHOICE = """
task: pico_choice_{name}
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["ndiyo", "hapana kabisa"]
doc_to_target: 0
process_docs: !function pico_docs.{name}
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
DOCS = "def short(docs):\n    return docs.select([1])\n\n\ndef all(docs):\n    return docs\n"
GROUP = """
group: pico_all
task:
  - pico_choice_short
  - group: pico_inner
    task: [pico_choice_all]
    aggregate_metric_list: [{metric: acc}]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
  - {metric: acc_norm, weight_by_size: false}
metadata: {version: 2}
"""
MIXED = "group: pico_mixed\ntask: [pico_choice_short, pico_choice_shots]\naggregate_metric_list: [{metric: acc}]\n"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("kinds"), tmp_path_factory.mktemp("data")
    (data / "rows.json").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    texts = TASKS | {name: CHOICE.replace("{name}", name) for name in ("short", "all")}
    texts["shots"] = texts["all"].replace("pico_choice_all", "pico_choice_shots") + "num_fewshot: 2\n"
    for name, text in texts.items():
        content = (HEAD + text).format(data=data / "rows.json")
        (folder / f"{name}.yaml").write_text(content, encoding="utf-8")
    (folder / "pico_docs.py").write_text(DOCS, encoding="utf-8")
    (folder / "group.yaml").write_text(GROUP, encoding="utf-8")
    (folder / "mixed.yaml").write_text(MIXED, encoding="utf-8")
    return folder


def run(byte_model: Model, kinds: Path, *names: str, **options: Any) -> EvaluationResult:
    return evaluate_model(*byte_model, names, Settings(include_path=kinds, trust_task_code=True, **options))


def likelihoods(model: Any, tokenizer: Any, context: str, text: str) -> tuple[float, bool]:
    """log p(text | context), summed over tokens, and whether greedy decoding would write it; no harness."""
    begin = len(tokenizer(context)["input_ids"]) if context else 1
    before = tokenizer(context)["input_ids"] if context else [tokenizer.bos_token_id]
    ids = torch.tensor([before + tokenizer(text)["input_ids"]])
    with torch.no_grad():
        logs = model(ids).logits[0].float().log_softmax(-1)
    greedy = all(int(logs[i - 1].argmax()) == int(ids[0, i]) for i in range(begin, ids.shape[1]))
    return sum(float(logs[i - 1, ids[0, i]]) for i in range(begin, ids.shape[1])), greedy


def test_the_likelihood_of_a_text_in_bfloat16_is_as_fine_as_its_logits(byte_model: Model, kinds: Path) -> None:
    model, tokenizer = deepcopy(byte_model[0]).bfloat16(), byte_model[1]
    task = run((model, tokenizer), kinds, "pico_perplexity", batch_size=1).tasks["pico_perplexity"]
    total = sum(likelihoods(model, tokenizer, "", row["text"])[0] for row in ROWS)
    size = sum(len(row["text"].encode()) for row in ROWS)
    assert math.log(task.score(metric="byte_perplexity").value) == near(-total / size, depth=LAYERS)


def test_perplexity_of_whole_texts(byte_model: Model, kinds: Path) -> None:
    task = run(byte_model, kinds, "pico_perplexity").tasks["pico_perplexity"]
    totals = [likelihoods(*byte_model, "", row["text"])[0] for row in ROWS]
    words = sum(len(re.split(r"\s+", row["text"])) for row in ROWS)
    size = sum(len(row["text"].encode()) for row in ROWS)
    assert math.log(task.score(metric="word_perplexity").value) == near(-sum(totals) / words, depth=LAYERS)
    assert math.log(task.score(metric="byte_perplexity").value) == near(-sum(totals) / size, depth=LAYERS)
    assert task.score(metric="bits_per_byte").value == near(-sum(totals) / size / math.log(2), depth=LAYERS)
    assert not any(score.higher_is_better for score in task.scores)
    assert (task.num_docs, task.cut) == (3, None)


def test_the_likelihood_of_a_last_word(byte_model: Model, kinds: Path, capfd: pytest.CaptureFixture[str]) -> None:
    LoadedTasks.load(["pico_last", "pico_perplexity"], Settings(include_path=kinds))
    capfd.readouterr()
    result = run(byte_model, kinds, "pico_last", "pico_perplexity")
    assert capfd.readouterr() == ("", "")  # the standard error of a perplexity is bootstrapped, with a bar
    result = run(byte_model, kinds, "pico_last")
    reports = []
    for row, sample in zip(ROWS, result.samples, strict=True):
        context, _, word = row["text"].rpartition(" ")
        reports.append(likelihoods(*byte_model, context, f" {word}"))
        assert sample.output[0] == near(reports[-1][0], depth=LAYERS)
    task = result.tasks["pico_last"]
    assert task.score(metric="acc").value == sum(greedy for _, greedy in reports) / 3
    mean = sum(total for total, _ in reports) / 3
    assert math.log(task.score(metric="perplexity").value) == near(-mean, depth=LAYERS)


def test_outputs_under_the_tasks_own_filters(byte_model: Model, kinds: Path) -> None:
    result = run(byte_model, kinds, "pico_write", batch_size=1)
    assert [score.filter for score in result.tasks["pico_write"].scores] == ["first-word", "as-is"]
    for sample in result.samples:
        word = re.search(r"\w+", sample.output)
        assert sample.answers == {"first-word": word[0] if word else "[invalid]", "as-is": sample.output}
        assert "." not in sample.output
    assert result.tasks["pico_write"].cut is not None


def test_the_tasks_own_limit_decides_where_outputs_are_cut(byte_model: Model, kinds: Path) -> None:
    result = run(byte_model, kinds, "pico_write", "pico_last")
    written = result.tasks["pico_write"]
    assert (written.cut, written.max_gen_toks) == (3, 6)
    assert (result.tasks["pico_last"].cut, result.tasks["pico_last"].max_gen_toks) == (None, None)


def test_a_group_whose_tasks_differ_in_shots_has_none(byte_model: Model, kinds: Path) -> None:
    assert run(byte_model, kinds, "pico_all").groups["pico_all"].num_fewshot == 0
    result = run(byte_model, kinds, "pico_mixed")
    assert [task.num_fewshot for task in result.tasks.values()] == [0, 2]
    assert result.groups["pico_mixed"].num_fewshot is None


def test_groups_within_groups_and_both_kinds_of_means(byte_model: Model, kinds: Path) -> None:
    result = run(byte_model, kinds, "pico_all")
    right: dict[str, list[tuple[bool, bool]]] = {"pico_choice_short": [], "pico_choice_all": []}
    for sample in result.samples:
        totals = [
            likelihoods(*byte_model, sample.doc["text"], f" {choice}")[0] for choice in ("ndiyo", "hapana kabisa")
        ]
        per_character = totals[0] / len("ndiyo") > totals[1] / len("hapana kabisa")
        right[sample.task].append((totals[0] > totals[1], per_character))
    assert [len(found) for found in right.values()] == [1, 3]
    means = {name: [sum(column) / len(found) for column in zip(*found, strict=True)] for name, found in right.items()}
    for name, (accuracy, normalised) in means.items():
        assert result.tasks[name].score(metric="acc").value == pytest.approx(accuracy)
        assert result.tasks[name].score(metric="acc_norm").value == pytest.approx(normalised)
    outer = result.groups["pico_all"]
    by_size = (means["pico_choice_short"][0] + 3 * means["pico_choice_all"][0]) / 4
    by_task = (means["pico_choice_short"][1] + means["pico_choice_all"][1]) / 2
    assert outer.score(metric="acc").value == pytest.approx(by_size)
    assert outer.score(metric="acc_norm").value == pytest.approx(by_task)
    assert outer.num_docs == 4
    (inner,) = [group for name, group in result.groups.items() if name.endswith("pico_inner")]
    assert inner.score(metric="acc").value == pytest.approx(means["pico_choice_all"][0])


def test_more_shots_than_there_are_rows_are_refused(byte_model: Model, kinds: Path) -> None:
    run(byte_model, kinds, "pico_choice_all", num_fewshot=2)
    with refused(ArgumentError, "num_fewshot", match="3 shots.*pico_choice_all has 2"):
        run(byte_model, kinds, "pico_choice_all", num_fewshot=3)


PAGE = Path(__file__).parents[3] / "docs" / "evaluate.md"


def test_the_names_on_the_page_exist(known_tasks: frozenset[str]) -> None:
    """The table of the papers' benchmarks: names in its second column, shots in its third."""
    section = PAGE.read_text(encoding="utf-8").partition("### The papers' benchmarks")[2].partition("\n### ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]
    names = [name for row in rows for name in re.findall(r"`([a-z]\w+(?:-\w+)?)`", row[1])]
    assert len(names) >= 12
    assert [name for name in names if name not in known_tasks and not is_flores(name)] == []
    assert all(re.search(r"\d", row[2]) for row in rows)


def test_a_choice_that_does_not_fit_is_refused_or_counted(kinds: Path) -> None:
    """The harness cuts off the beginning of a prompt without a word."""
    tokenizer, longest = byte_tokenizer(), max(len(row["text"].encode()) for row in ROWS)
    options: dict[str, Any] = {"include_path": kinds, "trust_task_code": True}
    whole = longest + len(" hapana kabisa")  # without a start token; the last token is only predicted
    fitting, tight = pico_model(layers=1, context=whole - 1), pico_model(layers=1, context=whole - 2)
    name = "pico_choice_all"
    assert evaluate_model(fitting, tokenizer, [name], Settings(**options)).tasks[name].truncated == 0
    assert [task.overlong for task in preview(tokenizer, fitting.config, [name], Settings(**options))] == [0]
    with refused(ArgumentError, "num_fewshot", match=rf"{name}: .* {whole} tokens, .* context of {whole - 2}"):
        evaluate_model(tight, tokenizer, [name], Settings(**options))
    assert evaluate_model(tight, tokenizer, [name], Settings(truncate=True, **options)).tasks[name].truncated == 1
    assert [task.overlong for task in preview(tokenizer, tight.config, [name], Settings(**options))] == [1]


def test_generation_settings_have_an_effect_or_are_refused(byte_model: Model, kinds: Path) -> None:
    """The harness takes its first name for a limit, and drops settings of sampling if the task does not sample."""
    for limit in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        result = run(byte_model, kinds, "pico_write", gen_kwargs={limit: 3, "until": []})
        task = result.tasks["pico_write"]
        assert (task.max_gen_toks, task.cut) == (3, 3)  # by the setting, of which all three outputs make use
    for odd in ({"temperature": 0.7}, {"top_p": 0.5, "temperature": 0}, {"do_sample": False, "top_k": 5}):
        with refused(ArgumentError, "gen_kwargs", match="pico_write takes the likeliest"):
            LoadedTasks.load(["pico_write"], Settings(include_path=kinds, gen_kwargs=odd))
    with refused(ArgumentError, "gen_kwargs", match="2 times: max_gen_toks, max_tokens"):
        LoadedTasks.load(["pico_write"], Settings(include_path=kinds, gen_kwargs={"max_tokens": 3, "max_gen_toks": 4}))
    drawn = Settings(include_path=kinds, gen_kwargs={"do_sample": True, "temperature": 0.7})
    own = LoadedTasks.load(["pico_write"], drawn).tasks["pico_write"].get_config("generation_kwargs")
    assert (own["do_sample"], own["temperature"], own["max_gen_toks"]) == (True, 0.7, 6)
