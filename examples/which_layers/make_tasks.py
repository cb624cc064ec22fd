"""The lab's word problems as tasks for lm-evaluation-harness: lab_en and lab_xx, in a folder for `--include-path`.

    python examples/which_layers/make_tasks.py lab-tasks [--problems 100]

The problems come from the lab's development set. A problem counts as right if the greedy answer is right: a likelihood
task with one forward pass per problem, as the lab itself scores them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from adapterswap.experiments.lab.scenes import SCENES, draw_problems

TASK = """\
task: lab_{language}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {language}.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{' ' + answer}}}}"
num_fewshot: 0
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


def make_tasks(folder: Path, problems: int = 100, scene: str = "gap") -> None:
    """Write two tasks and their rows into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_problems(SCENES[scene], "development", problems)
    for language in ("en", "xx"):
        file = folder / f"{language}.jsonl"
        rows = ({"prompt": problem.prompt(language), "answer": problem.answer} for problem in drawn)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{language}.yaml").write_text(TASK.format(language=language), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=100)
    options = parser.parse_args()
    make_tasks(options.folder, options.problems)
