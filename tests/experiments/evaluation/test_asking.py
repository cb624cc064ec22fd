"""`ask` against the generation of transformers, on the base, on PEFT's own models and on the written composition."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from conftest import LAYERS
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import adapterswap as asw
from adapterswap.kit.errors import AdapterswapError, ArgumentError, UnsupportedError

PROMPTS = ["What is 7 + 5?", "Habari gani?", "a", "Marie a 17 pommes.\nCombien ?"]
TOKENS = 12
Folders = Mapping[str, Path]


@pytest.fixture(scope="module")
def folders(byte_base: Path, byte_expert: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The base, two experts and their composition, written."""
    pair = {name: byte_expert(name) for name in ("math", "swahili")}
    plan = asw.layer_swap(pair["math"], pair["swahili"], bottom=2, top=1, base_model=byte_base)
    return {"base": byte_base, **pair, "composition": plan.write(tmp_path_factory.mktemp("asked") / "math-swahili")}


def generated(folders: Folders, name: str, messages: list[dict[str, str]], *, seed: int = 0, **options: Any) -> str:
    """What transformers and PEFT generate, from the files of one subject."""
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    model: Any = AutoModelForCausalLM.from_pretrained(folders["base"], dtype=torch.float32).eval()
    if name != "base":
        model = PeftModel.from_pretrained(model, str(folders[name])).eval()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"do_sample": False, "max_new_tokens": TOKENS, **options}
    set_seed(seed)
    output = model.generate(prompt["input_ids"], attention_mask=prompt["attention_mask"], **settings)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def plan_of(folders: Folders) -> asw.Plan:
    return asw.layer_swap(folders["math"], folders["swahili"], bottom=2, top=1, base_model=folders["base"])


def texts(reply: asw.Reply) -> dict[str, str]:
    return {name: answer.text for name, answer in reply.answers.items()}


def test_all_subjects_answer_as_generate_does(folders: Folders) -> None:
    """In one batch: the base, both experts and the composition."""
    replies = asw.ask(plan_of(folders), PROMPTS, max_new_tokens=TOKENS)
    assert [reply.prompt for reply in replies] == PROMPTS
    for reply in replies:
        assert list(reply.answers) == ["base", "math", "swahili", "composition"]
        expected = {name: generated(folders, name, user(str(reply.prompt))) for name in reply.answers}
        assert texts(reply) == expected
        assert len({*expected.values()}) == len(expected)


def test_one_subject_answers_as_generate_does(folders: Folders) -> None:
    for name in folders:
        (reply,) = asw.ask(plan_of(folders), PROMPTS[0], only=[name], max_new_tokens=TOKENS)
        assert texts(reply) == {name: generated(folders, name, user(PROMPTS[0]))}


def test_a_folder_opens_its_own_base(folders: Folders) -> None:
    """And further adapters are asked beside it, under the names that they get."""
    further = {"my.expert": folders["math"]}
    (reply,) = asw.ask(folders["composition"], PROMPTS[0], experts=further, max_new_tokens=TOKENS)
    assert list(reply.answers) == ["base", "math-swahili", "my.expert"]
    names = zip(("base", "composition", "math"), texts(reply).values(), strict=True)
    assert all(text == generated(folders, name, user(PROMPTS[0])) for name, text in names)
    (alone,) = asw.ask(None, PROMPTS[0], base_model=folders["base"], max_new_tokens=TOKENS)
    assert texts(alone) == {"base": texts(reply)["base"]}


def test_names_that_differ_in_a_sign_are_different_experts(folders: Folders) -> None:
    """PEFT cannot hold a name with a dot, so both get another one."""
    further = {"my.expert-1": folders["math"], "my.expert.1": folders["swahili"]}
    (reply,) = asw.ask(None, PROMPTS[0], base_model=folders["base"], experts=further, max_new_tokens=TOKENS)
    expected = [generated(folders, name, user(PROMPTS[0])) for name in ("base", "math", "swahili")]
    assert list(texts(reply).values()) == expected


def test_drawn_answers_are_those_of_generate(folders: Folders) -> None:
    """From one seed for each subject, so the others do not matter; and torch's own random numbers stay."""
    drawing = {"temperature": 0.9, "top_p": 0.8}
    before = torch.random.get_rng_state()
    (reply,) = asw.ask(plan_of(folders), PROMPTS[0], max_new_tokens=TOKENS, sampling_seed=3, **drawing)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, text in texts(reply).items():
        assert text == generated(folders, name, user(PROMPTS[0]), seed=3, **{"do_sample": True, **drawing})
    (greedy,) = asw.ask(plan_of(folders), PROMPTS[0], max_new_tokens=TOKENS)
    assert texts(greedy) != texts(reply)


def test_conversations_and_system_messages(folders: Folders) -> None:
    turns = [*user("One?"), {"role": "assistant", "content": "Two."}, *user("Three?")]
    (reply,) = asw.ask(plan_of(folders), [turns], max_new_tokens=TOKENS, system_instruction="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert texts(reply) == {name: generated(folders, name, [system, *turns]) for name in reply.answers}


def test_plain_text_is_asked_as_it_stands(folders: Folders) -> None:
    (reply,) = asw.ask(folders["math"], "2 + 2 =", max_new_tokens=TOKENS, plain=True, only=["math"])
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders["base"]), str(folders["math"]))
    inputs = tokenizer("2 + 2 =", return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert texts(reply) == {"math": expected}


def test_what_no_batch_holds_is_answered_one_by_one(folders: Folders, tmp_path: Path) -> None:
    """DoRA is computed with the base's own output; TIES is written to a temporary folder."""
    base = AutoModelForCausalLM.from_pretrained(folders["base"], dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if "lora_" in key and "magnitude" not in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    model.save_pretrained(tmp_path / "dora", save_embedding_layers=False)
    found = {**folders, "dora": tmp_path / "dora"}
    (reply,) = asw.ask(
        None, PROMPTS[0], base_model=folders["base"], max_new_tokens=TOKENS,
        experts={"dora": found["dora"], "math": folders["math"]},
    )  # fmt: skip
    assert texts(reply) == {name: generated(found, name, user(PROMPTS[0])) for name in ("base", "dora", "math")}
    ties = asw.ties(folders["math"], folders["swahili"], density=0.5, base_model=str(folders["base"]))
    found = {**folders, "composition": ties.write(tmp_path / "ties", max_rank=4)}
    (reduced,) = asw.ask(ties, PROMPTS[0], max_new_tokens=TOKENS, max_rank=4, only=["composition", "math"])
    assert texts(reduced) == {name: generated(found, name, user(PROMPTS[0])) for name in ("composition", "math")}


def test_a_slice_is_not_asked_on_its_own(folders: Folders, tmp_path: Path) -> None:
    shell = asw.slice_layers(folders["swahili"], "0-1,5").write(tmp_path / "shell")
    plan = asw.layer_swap(folders["math"], shell, bottom=2, top=1, base_model=folders["base"])
    (reply,) = asw.ask(plan, PROMPTS[0], max_new_tokens=TOKENS)
    assert texts(reply) == {
        name: generated(folders, name, user(PROMPTS[0])) for name in ("base", "math", "composition")
    }


REFUSED: dict[str, tuple[type[AdapterswapError], str, dict[str, Any]]] = {
    "empty": (ArgumentError, "prompts", {"prompts": " "}),
    "no message": (ArgumentError, "prompts", {"prompts": [[{"role": "user"}]]}),
    "own message": (ArgumentError, "prompts", {"prompts": [[{"role": "assistant", "content": "x"}]]}),
    "nobody": (ArgumentError, "only", {"only": ["maths"]}),
    "no one": (ArgumentError, "only", {"only": []}),
    "temperature": (ArgumentError, "temperature", {"temperature": -1.0}),
    "top_p": (ArgumentError, "top_p", {"top_p": 0.5}),
    "tokens": (ArgumentError, "max_new_tokens", {"max_new_tokens": 0}),
    "system": (ArgumentError, "system_instruction", {"plain": True, "system_instruction": "x"}),
    "thinking": (ArgumentError, "enable_thinking", {"enable_thinking": True}),
    "rank": (ArgumentError, "max_rank", {"composition": None, "max_rank": 2}),
    "talk": (ArgumentError, "prompts", {"plain": True, "prompts": [[*user("a"), *user("b")]]}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(folders: Folders, case: str) -> None:
    kind, parameter, changes = REFUSED[case]
    arguments = {"composition": plan_of(folders), "prompts": "x", "base_model": folders["base"], **changes}
    with pytest.raises(kind) as refused:
        asw.ask(arguments.pop("composition"), arguments.pop("prompts"), **arguments)
    assert (type(refused.value), refused.value.parameter) == (kind, parameter)


def test_full_weights_are_asked_as_a_base(folders: Folders) -> None:
    with pytest.raises(UnsupportedError) as refused:
        asw.ask(folders["base"], "x")
    assert refused.value.parameter == "composition"


def test_the_command_shows_answers_side_by_side(run: Callable[..., Result], folders: Folders, tmp_path: Path) -> None:
    pair = ["-t", folders["math"], "-l", folders["swahili"], "--bottom", 2, "--top", 1]
    options = ["--max-new-tokens", TOKENS, "--base-model", folders["base"]]
    shown = run("ask", *pair, *options, PROMPTS[0], exit_code=0)
    as_json = json.loads(run("ask", *pair, *options, PROMPTS[0], "--json", exit_code=0).stdout)
    (reply,) = asw.ask(plan_of(folders), PROMPTS[0], max_new_tokens=TOKENS)
    assert as_json == reply.as_json()
    names = [line.split(" ")[0] for line in shown.stdout.splitlines() if not line.startswith(" ")]
    assert names == ["base", "math", "swahili", "composition"]
    assert "layers  ssmmms" in shown.stderr
    recipe = tmp_path / "recipe.yaml"
    experts = {name: str(folders[name]) for name in ("math", "swahili")}
    recipe.write_text(json.dumps({"experts": experts, "rules": ["swahili: 0-1,5", "math"]}))
    same = run("ask", recipe, PROMPTS[0], *options, "--json", exit_code=0)
    assert json.loads(same.stdout) == as_json
    folder = run("ask", folders["composition"], PROMPTS[0], "--max-new-tokens", TOKENS, "--json", exit_code=0)
    answers = json.loads(folder.stdout)["answers"]
    assert answers["math-swahili"] == as_json["answers"]["composition"]


def test_a_file_of_prompts_becomes_json_lines(run: Callable[..., Result], folders: Folders, tmp_path: Path) -> None:
    lines = ["What is 7 + 5?", "", json.dumps({"id": 7, "prompt": "a\nb"}), json.dumps({"messages": user("c")})]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    words = ["--prompts", tmp_path / "prompts.txt", "--only", "math-swahili", "--max-new-tokens", TOKENS]
    printed = run("ask", folders["composition"], *words, exit_code=0).stdout.splitlines()
    rows = [json.loads(line) for line in printed]
    answers = [row.pop("answers")["math-swahili"]["text"] for row in rows]
    assert rows == [{"prompt": "What is 7 + 5?"}, {"id": 7, "prompt": "a\nb"}, {"messages": user("c")}]
    assert answers == [generated(folders, "composition", user(text)) for text in ("What is 7 + 5?", "a\nb", "c")]


@pytest.mark.parametrize("line", ['{"prompt"', '{"text": "x"}', '{"prompt": 5}', '{"prompt": "x", "answers": {}}'])
def test_wrong_rows_are_refused(run: Callable[..., Result], folders: Folders, tmp_path: Path, line: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    result = run("ask", folders["composition"], "--prompts", tmp_path / "prompts.jsonl")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "line 1" in result.stderr


def test_a_conversation_remembers_each_subjects_own_answers(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from adapterswap.cli import main

    options = [str(folders["composition"]), "--chat", "--max-new-tokens", str(TOKENS), "--json"]
    typed = "One?\n\nTwo?\n/restart\nOne?\n/quit\nnot asked\n"
    result = CliRunner().invoke(main, ["ask", *options], input=typed)
    assert result.exit_code == 0, result.output
    first, second, again = (json.loads(line)["answers"] for line in result.stdout.splitlines())
    assert again == first
    for name, folder in (("base", "base"), ("math-swahili", "composition")):
        turns = [*user("One?"), {"role": "assistant", "content": first[name]["text"]}, *user("Two?")]
        assert first[name]["text"] == generated(folders, folder, user("One?"))
        assert second[name]["text"] == generated(folders, folder, turns)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["x"],
        ["a", "b", "c"],
        ["--chat", "--prompts", "x"],
        ["a", "b", "--chat"],
        ["a", "b", "--bottom", "2"],
        ["a", "b", "--top-p", "0.5"],
    ],
)
def test_wrong_usage(run: Callable[..., Result], words: list[str]) -> None:
    result = run("ask", *words)
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_terminal_shows_columns(folders: Folders, tmp_path: Path) -> None:
    """In a terminal of its own: the same words, in columns where they fit."""
    import os
    import pty
    import subprocess
    import sys

    leader, follower = pty.openpty()
    words = ["ask", str(folders["composition"]), PROMPTS[0], "--max-new-tokens", str(TOKENS)]
    environment = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "adapterswap", *words], stdout=follower, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(follower)
        printed = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            printed += chunk
        assert process.wait() == 0, process.stderr and process.stderr.read()
    os.close(leader)
    lines = printed.decode(errors="replace").splitlines()
    heads = [line for line in lines if "base" in line and "math-swahili" in line]
    assert heads


assert LAYERS == 6  # the zones above are of six layers
