"""A tiny model that reads images, with the processor that makes its inputs."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra: pip install '.[serve]'")

from PIL import Image
from transformers import AutoModelForImageTextToText, CLIPImageProcessor, LlavaProcessor

from tests.lossless.seeing import seeing_config
from tests.tiny import make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SIDE = {"height": 8, "width": 8}


def seeing_pair() -> tuple[Any, Any]:
    """A random model with its processor, which makes four tokens of an image."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size=_SIDE, crop_size=_SIDE),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    return _model(len(tokenizer), tokenizer.convert_tokens_to_ids("<image>")), processor


def _model(num_tokens: int, place: int) -> Any:
    config = seeing_config("llava")
    for part in (config, config.text_config):
        part.pad_token_id, part.eos_token_id = 0, 1
    config.image_token_index, config.text_config.vocab_size = place, num_tokens
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.pad_token_id = 0
    return model.eval()


def picture(seed: int = 0, size: tuple[int, int] = (12, 9)) -> Image.Image:
    """Random colours."""
    noise = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())


def data_url(image: Image.Image, form: str = "PNG") -> str:
    """The image as a request has it."""
    data = io.BytesIO()
    image.save(data, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"
