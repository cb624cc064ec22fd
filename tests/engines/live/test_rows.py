"""One batch with a composition for every row equals one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS
from core.matrix.architectures import ARCHITECTURES, build
from peft import LoraConfig, get_peft_model
from pico_models import trained
from refusals import refused
from tolerances import close, rounded_once
from transformers import BartConfig, BartForConditionalGeneration, XLNetConfig, XLNetLMHeadModel

from adapterswap.engines.live import LiveComposer
from adapterswap.kit.errors import ArgumentError, CompositionError, UnsupportedError
from engines.live.conftest import state_of

Composers = Callable[..., LiveComposer]

NAMES: list[Any] = [
    "math+swahili@bottom=2,top=1",
    "math+telugu@bottom=1,top=1,bottom_transition=2",
    "base",
    "math+swahili@bottom=2,top=1",
    "math+swahili@bottom=1,top=1,bottom_transition=2,task_weight=3",
    None,
    "telugu",
]


def one_by_one(composing: LiveComposer, names: list[Any], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each row's logits alone, without padding."""
    outputs = []
    for name, row in zip(names, rows, strict=True):
        with composing.use(name), torch.no_grad():
            outputs.append(composing.model(row[None]).logits[0])
    return outputs


def prompts(count: int) -> list[torch.Tensor]:
    """Prompts of different lengths, padded."""
    return [(torch.arange(5 + row) * (row + 3) + row) % 95 + 1 for row in range(count)]


def padded(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    length = max(map(len, rows))
    tokens, mask = torch.zeros(2, len(rows), length, dtype=torch.long)
    for at, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(None, len(row))
        tokens[at, place], mask[at, place] = row, 1
    return {"input_ids": tokens, "attention_mask": mask}


def test_an_encoders_prompts_stay_where_they_are() -> None:
    """BART's positions count from the left, with padding, so its prompts are padded on the right."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    config = BartConfig(vocab_size=96, forced_eos_token_id=None, init_std=0.4, **sizes)
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    composing = LiveComposer(get_peft_model(BartForConditionalGeneration(config).eval(), options, "math"))
    rows = prompts(4)
    batch = padded(rows, "right")
    for compositions in ("math", ["math", "base", "base", "math"]):
        result = composing.generate(**batch, compositions=compositions, max_new_tokens=6, min_new_tokens=6)
        for row, tokens in enumerate(rows):
            name = compositions if isinstance(compositions, str) else compositions[row]
            alone = composing.generate(input_ids=tokens[None], compositions=name, max_new_tokens=6, min_new_tokens=6)
            assert torch.equal(result[row], alone[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "neox"])
def test_logits(architecture: str, side: str, composer: Composers) -> None:
    composing, rows = composer(architecture), prompts(len(NAMES))
    batch = padded(rows, side)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with composing.use_rows(NAMES), torch.no_grad():
        together = composing.model(**batch, position_ids=positions).logits
    for at, alone in enumerate(one_by_one(composing, NAMES, rows)):
        found = together[at][batch["attention_mask"][at].bool()]
        close(found, alone, depth=LAYERS)


def test_embeddings_and_heads(composer: Composers) -> None:
    composing = composer(target_modules=["embed_tokens", "lm_head", "q_proj", "down_proj"])
    rows = [row[:5] for row in prompts(len(NAMES))]
    for names in (NAMES, NAMES[::-1], ["math"] * 7, [NAMES[4]] * 7):
        with composing.use_rows(names), torch.no_grad():
            together = composing.model(torch.stack(rows)).logits
        for actual, alone in zip(together, one_by_one(composing, names, rows), strict=True):
            close(actual, alone, depth=LAYERS)


def test_a_scaled_embedding(base: Callable[..., Any], composer: Composers) -> None:
    """Gemma multiplies its embeddings by a constant; what LoRA adds is multiplied too."""
    composing = composer(target_modules=["embed_tokens", "q_proj"])
    composing.model.get_base_model().model.embed_tokens.base_layer.embed_scale = 3.0
    rows = [row[:5] for row in prompts(3)]
    with composing.use_rows(NAMES[:3]), torch.no_grad():
        together = composing.model(torch.stack(rows)).logits
    for actual, alone in zip(together, one_by_one(composing, NAMES[:3], rows), strict=True):
        close(actual, alone, depth=LAYERS)


def test_flattened_rows(composer: Composers) -> None:
    """Some models flatten rows and positions before their feed-forward layers, as OPT does."""
    composing = composer()
    mlp = composing.model.get_base_model().model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x.reshape(-1, x.shape[-1])).reshape(x.shape)
    rows = [row[:5] for row in prompts(len(NAMES))]
    with composing.use_rows(NAMES), torch.no_grad():
        together = composing.model(torch.stack(rows)).logits
    for actual, alone in zip(together, one_by_one(composing, NAMES, rows), strict=True):
        close(actual, alone, depth=LAYERS)


def test_bfloat16_base_with_float32_experts(composer: Composers) -> None:
    """The sum is taken in float32 and rounded once, as in PEFT's own layers."""
    composing = composer()
    composing.model.get_base_model().to(torch.bfloat16)
    for name, parameter in composing.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    rows = [row[:5] for row in prompts(len(NAMES))]
    layer = composing.model.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(len(NAMES), 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with composing.use_rows(NAMES), torch.no_grad():
        together = layer(x)
        assert composing.model(torch.stack(rows)).logits.dtype == torch.bfloat16
    for at, name in enumerate(NAMES):
        with composing.use(name), torch.no_grad():
            rounded_once(together[at], layer(x[at]), dtype=torch.bfloat16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_generation(options: dict[str, Any], side: str, composer: Composers) -> None:
    composing, rows = composer(), prompts(len(NAMES))
    composing.model.get_base_model().lm_head.weight.data.mul_(8)  # random logits would almost tie
    options = {"min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **options}
    batch = padded(rows, side)
    result = composing.generate(**batch, compositions=NAMES, **options)[:, batch["input_ids"].shape[1] :]
    alone = [
        composing.generate(
            input_ids=row[None], attention_mask=torch.ones_like(row)[None], compositions=name or "base", **options
        )[:, len(row) :]
        for name, row in zip(NAMES, rows, strict=True)
    ]
    assert torch.equal(result, torch.cat(alone))


def test_sampling(composer: Composers) -> None:
    """Rows sampled together have the logits of each text alone; equal rows sample the same as one composition."""
    composing, rows = composer(), prompts(len(NAMES))
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": True}
    batch = padded(rows, "left")
    drawn = composing.generate(**batch, compositions=NAMES, output_logits=True, return_dict_in_generate=True, **options)
    new = drawn.sequences[:, batch["input_ids"].shape[1] :]
    texts = [torch.cat([row, row_new]) for row, row_new in zip(rows, new, strict=True)]
    for at, alone in enumerate(one_by_one(composing, NAMES, texts)):
        result = torch.stack([step[at] for step in drawn.logits])
        close(result, alone[len(rows[at]) - 1 : -1], depth=LAYERS)
    outputs = []
    for compositions in ([NAMES[1]] * len(rows), NAMES[1]):
        torch.manual_seed(0)
        outputs.append(composing.generate(**batch, compositions=compositions, **options))
    assert torch.equal(*outputs)


def test_generation_settings_of_the_model_apply(composer: Composers) -> None:
    composing, rows = composer(), [row[:5] for row in prompts(2)]
    composing.model.generation_config.num_beams = 3
    tokens = torch.stack(rows)
    composing.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        compositions=NAMES[:2],
        max_new_tokens=2,
        pad_token_id=0,
    )


def test_rows_in_a_layer_are_computed_once_per_expert(composer: Composers) -> None:
    composing = composer()
    with composing.use_rows(NAMES):
        hooks = {
            name: hook
            for name, layer in composing._catalogue.inventory.layers.items()
            for hook in layer._forward_hooks.values()
        }
    middle = hooks["model.layers.4.mlp.up_proj"].shares  # math for four rows, telugu alone for one
    assert [len(range(7)[share.rows]) if isinstance(share.rows, slice) else len(share.rows) for share in middle] == [
        4,
        1,
    ]


def test_refusals(composer: Composers) -> None:
    composing = composer()
    before = state_of(composing.model)
    tokens = torch.ones(2, 5, dtype=torch.long)
    with (
        composing.use_rows(["math", "telugu", "base"]),
        refused(ArgumentError, "compositions", match="2 rows.* 3"),
    ):
        composing.model(tokens)
    with composing.use_rows(["math", "telugu"], repeat=2), refused(ArgumentError, "compositions", match="2 rows.* 4"):
        composing.model(input_ids=tokens)
    with refused(CompositionError, "experts"), composing.use_rows(["math+nobody", "base"]):
        pass
    composing.model.train()
    with composing.use_rows(["math", "base"]), refused(UnsupportedError):
        composing.model(tokens)
    composing.model.eval()
    assert state_of(composing.model) == before


def test_a_mixture_of_experts_is_refused(composer: Composers) -> None:
    composing = composer()
    layer = composing.model.get_base_model().model.layers[0]
    layer.mlp.experts = torch.nn.ModuleList([layer.mlp.up_proj])
    del layer.mlp.up_proj
    before = state_of(composing.model)
    rows = LiveComposer(composing.model)
    with refused(UnsupportedError, match="experts"), rows.use_rows(["math", "base"]):
        pass
    assert state_of(composing.model) == before


def test_nested_with_whole_compositions(composer: Composers) -> None:
    composing = composer()
    tokens = torch.stack([row[:5] for row in prompts(2)])

    def output() -> torch.Tensor:
        with torch.no_grad():
            return composing.model(tokens).logits

    with composing.use_rows(["math+swahili", "telugu"]):
        rows = output()
        with composing.use("swahili+math"):
            whole = output()
            with composing.use_rows(["telugu", "base"]):
                output()
            assert torch.equal(output(), whole)
        assert torch.equal(output(), rows)


def test_images_are_not_rows(tmp_path: Path) -> None:
    """The first of two rows has two images and the second none, so the tower sees two images and no rows."""
    architecture = ARCHITECTURES["llava"]
    base = build(architecture)
    base.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules="all-linear")
    experts = {
        name: trained(architecture.model_class.from_pretrained(tmp_path / "base"), lora, tmp_path / name, seed=seed)
        for seed, name in enumerate(("math", "swahili"))
    }
    composer = LiveComposer.from_experts(base.eval(), experts)
    size = base.config.vision_config.image_size
    tokens = base.model.get_image_features(torch.zeros(1, 3, size, size)).pooler_output[0].shape[0]
    image = base.config.image_token_id
    rows = [torch.tensor([image] * 2 * tokens + [1, 2]), torch.tensor([5] * 2 * tokens + [3, 4])]
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": torch.stack(rows), "pixel_values": pixels}
    shared = ["math+swahili@bottom=1,top=1,outside=task", "math"]  # the tower is math's in both
    with composer.use_rows(shared), torch.no_grad():
        together = composer.model(**batch).logits
    for row, name in enumerate(shared):
        with composer.use(name), torch.no_grad():
            images = {"pixel_values": pixels} if row == 0 else {}
            close(together[row], composer.model(input_ids=rows[row][None], **images).logits[0], depth=LAYERS)
    with composer.use_rows(["math", "swahili"]):
        composer.model(input_ids=torch.stack(rows)[:, -2:])  # without images
        with refused(UnsupportedError):
            composer.model(**batch)


def test_a_model_that_sees_positions_first() -> None:
    """Three prompts of three tokens: positions could be taken for rows."""
    config = XLNetConfig(vocab_size=32, d_model=16, n_layer=2, n_head=2, d_inner=32)
    model = get_peft_model(XLNetLMHeadModel(config), LoraConfig(r=2, target_modules=["layer_1"]), "math")
    with refused(UnsupportedError), LiveComposer(model.eval()).use_rows(["math", "base", "math"]):
        pass
