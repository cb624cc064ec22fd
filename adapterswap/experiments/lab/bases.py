"""The lab's base models: their tokenizer, their pretraining, and the folders in which they are shipped.

Pretraining is a plain loop, the fastest way for 0.4 million parameters: about three minutes on one core. Experts are
trained by the library's own training instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from adapterswap.experiments.lab.scenes import Scene, pretraining_rows
from adapterswap.experiments.lab.tasks import LabRow
from adapterswap.experiments.lab.world import SPECIAL_TOKENS, VOCABULARY

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, _UNKNOWN = range(len(SPECIAL_TOKENS))
_IDS = {token: index for index, token in enumerate(VOCABULARY)}


def ids_of(text: str) -> list[int]:
    """The ids of the words of `text`, without special tokens, as `build_tokenizer` would give them."""
    return [_IDS[token] for token in text.split()]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer that splits at spaces and puts `<s>` before a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos, unknown = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.WordLevel(_IDS, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown
    )


NUM_LAYERS = 6
_HIDDEN, _FEED_FORWARD, _CONTEXT = 64, 192, 128
_HEADS, _HEAD_SIZE = 4, 32  # the smallest head size that vLLM serves on a CPU; it need not be width / heads
_LEARNING_RATE, _MAX_NORM = 3e-3, 1.0
_WARMUP = 0.05  # of all steps
_TOKENS_PER_BATCH = 768  # with padding
_SORTED_TOGETHER = 2000  # rows that are sorted by length before they are cut into batches
_IGNORED = -100

_Row = tuple[list[int], list[int]]  # ids and labels of a text, as many


def new_model(seed: int) -> LlamaForCausalLM:
    """A Llama with 6 layers, width 64 and tied embeddings, 0.43 million parameters; `seed` draws its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=_HIDDEN,
        intermediate_size=_FEED_FORWARD,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.7 / math.sqrt(_HIDDEN),
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def pretrain(
    scene: Scene, seed: int, *, progress: Callable[[int, int], None] = lambda done, steps: None
) -> LlamaForCausalLM:
    """A base for `scene`: one pass over its pretraining rows with AdamW, warmup and a cosine to zero.

    Args:
        seed: for the rows, their order and the initial weights.
        progress: called with the number of finished steps and the total.
    """
    import torch

    rows = [_row(example) for example in pretraining_rows(scene, seed)]
    batches = _batches(rows, Random(seed))
    steps = len(batches)

    def rate(step: int) -> float:
        """The learning rate as a share of the highest."""
        warmup = min(1.0, (step + 1) / (_WARMUP * steps))
        return warmup * (1 + math.cos(math.pi * step / steps)) / 2

    model = new_model(seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, _MAX_NORM)
        optimizer.step()
        schedule.step()
        progress(step + 1, steps)
    return model.eval()


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Rows of ids as one tensor (rows, longest), padded with `value` on the right."""
    import torch

    longest = max(map(len, rows))
    filled = []
    for row in rows:
        padding = [value] * (longest - len(row))
        filled.append([*row, *padding])
    return torch.tensor(filled)


def _row(example: LabRow) -> _Row:
    """Ids and labels; those of the prompt and of `<s>` are ignored."""
    prompt = [BOS, *ids_of(example.prompt)]
    completion = [*ids_of(example.completion), EOS]
    return prompt + completion, [_IGNORED] * len(prompt) + completion


def _batches(rows: list[_Row], rng: Random) -> list[list[_Row]]:
    """Batches of rows of similar length in random order, limited by their tokens with padding."""
    rng.shuffle(rows)
    batches: list[list[_Row]] = []
    for start in range(0, len(rows), _SORTED_TOGETHER):
        # The last row of a batch is its longest, to which the others are padded.
        batch: list[_Row] = []
        for row in sorted(rows[start : start + _SORTED_TOGETHER], key=lambda row: len(row[0])):
            if batch and (len(batch) + 1) * len(row[0]) > _TOKENS_PER_BATCH:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)

    rng.shuffle(batches)
    return batches


def _loss(model: LlamaForCausalLM, batch: list[_Row]) -> torch.Tensor:
    """Mean cross-entropy of the labelled tokens. Padding is on the right, so causal attention never sees it."""
    import torch

    ids = padded([row_ids for row_ids, _ in batch], PAD)
    labels = padded([row_labels for _, row_labels in batch], _IGNORED)[:, 1:]
    labelled = labels != _IGNORED

    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[labelled]), labels[labelled])


_TIED = "lm_head.weight"  # the same tensor as the embeddings, so it is left out of a file


def shipped_file(scene: Scene, seed: int) -> Path:
    """The path of the shipped weights of a scene and seed, whether they exist or not."""
    return Path(__file__).parent / "shipped" / f"{scene.name}-{seed}.safetensors"


def write_base(
    scene: Scene,
    seed: int,
    folder: Path,
    *,
    rebuild: bool = False,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> None:
    """Write the base of a scene and seed as a folder for transformers: config, float32 weights, tokenizer.

    A rebuilt base is rounded to bfloat16 like a shipped one. It equals the shipped one only on the machine that made
    that, because floating point differs elsewhere.

    Args:
        rebuild: pretrain it even if it is shipped. A base that is not shipped is always pretrained.
        progress: called with the number of finished steps and the total while pretraining.
    """
    import torch
    from safetensors.torch import load_file

    shipped = shipped_file(scene, seed)
    if rebuild or not shipped.exists():
        model = pretrain(scene, seed, progress=progress).to(torch.bfloat16)
    else:
        model = new_model(seed)
        state = load_file(shipped)
        model.load_state_dict({**state, _TIED: state["model.embed_tokens.weight"]})

    model.to(torch.float32).save_pretrained(folder)
    mode = (folder / "config.json").stat().st_mode
    (folder / "model.safetensors").chmod(mode)  # save_pretrained makes it readable by its owner only
    build_tokenizer().save_pretrained(folder)


def ship(scene: Scene, seed: int, folder: Path) -> Path:
    """Write the base in `folder` to the path of the shipped one, in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    state.pop(_TIED, None)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}

    target = shipped_file(scene, seed)
    target.parent.mkdir(exist_ok=True)
    save_file(rounded, target)
    target.chmod(0o644)  # save_file makes it readable by its owner only
    return target
