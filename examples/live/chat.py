"""A streaming chat that changes its language in the middle of a session.

    python examples/live/chat.py
    python examples/live/chat.py --base-model BASE --task math=experts/math \
        --language swahili=experts/swahili --language telugu=experts/telugu

Type a message, `/language telugu` to change the language, `/restart` to forget the conversation, `/quit` to leave.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

from adapterswap import AdapterswapError
from adapterswap.engines.live import LiveComposer, load_expert


class Chat:
    """A conversation with one task expert and several languages.

    The whole conversation is processed again for every answer: the key-value cache was computed with the composition
    that was active then, and is not valid for the new one.
    """

    def __init__(self, composer: LiveComposer, tokenizer: PreTrainedTokenizerBase, task: str, language: str) -> None:
        self.composer, self.tokenizer, self.task = composer, tokenizer, task
        self.messages: list[dict[str, str]] = []
        self.speak(language)

    def speak(self, language: str) -> None:
        """Change the language, which takes milliseconds and no memory."""
        self.composer.set(f"{self.task}+{language}")

    def answer(self, message: str, max_new_tokens: int) -> str:
        """Print the answer word by word, and return it."""
        self.messages.append({"role": "user", "content": message})
        prompt = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.composer.model.device)
        output = self.composer.model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        text: str = self.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        return text


def open_chat(base_model: str, task: tuple[str, str], languages: Sequence[tuple[str, str]]) -> Chat:
    """Load the base, the whole task expert, and of each language expert the layers that are used."""
    base = AutoModelForCausalLM.from_pretrained(base_model, dtype="auto", use_safetensors=True).eval()
    composer = LiveComposer(load_expert(base, task[1], task[0]))
    for name, folder in languages:
        composer.load_expert(folder, name, compositions=[f"{task[0]}+{name}"])
    return Chat(composer, AutoTokenizer.from_pretrained(base_model), task[0], languages[0][0])


def expert(text: str) -> tuple[str, str]:
    """`name=folder` or `name=org/name`."""
    name, _, folder = text.partition("=")
    if not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model")
    parser.add_argument("--task", type=expert)
    parser.add_argument("--language", type=expert, action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=12)
    options = parser.parse_args(arguments)
    if (options.base_model is None) != (options.task is None) or bool(options.base_model) != bool(options.language):
        parser.error("give --base-model, --task and --language together, or none of them")
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        if options.base_model is None:
            sys.path.insert(0, str(Path(__file__).parent))
            from pico import make_pico

            made = make_pico(Path(place))
            languages = [(name, str(made[name])) for name in ("swahili", "telugu")]
            chat = open_chat(str(Path(place) / "base"), ("math", str(made["math"])), languages)
        else:
            chat = open_chat(options.base_model, options.task, options.language)
        talk(chat, options.max_new_tokens)


def talk(chat: Chat, max_new_tokens: int) -> None:
    """Read lines until `/quit` or the end."""
    for line in map(str.strip, sys.stdin):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/restart":
            chat.messages.clear()
        elif command == "/language":
            try:
                chat.speak(rest)
            except AdapterswapError as error:  # an unknown language is reported, and the conversation continues
                print(error, file=sys.stderr)
        elif line:
            chat.answer(line, max_new_tokens)


if __name__ == "__main__":
    main()
