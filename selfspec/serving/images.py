"""Images in messages: from the data URLs of a request to pictures, within limits."""

from __future__ import annotations

import base64
import copy
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.serving.fields import RequestError

MAX_IMAGE_BYTES = 32 << 20  # Of all images of a request; added to what a body may have.
_MOST_PIXELS = 50_000_000  # Also of all images of a request.
_MOST_IMAGES = 16
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,(?P<base64>.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of conversations for a model's processor.

    Without a processor, `reason` says why there is none, and images are refused.
    """

    processor: Any = None
    reason: str = "it has no image processor"

    def pictured(self, prompt: Any, field: str = "messages") -> Any:
        """The same prompt, with pictures where its messages have images; `field` is its name."""
        if not has_images(prompt):
            return prompt
        prompt, num_left = copy.deepcopy(prompt), _MOST_PIXELS
        for number, part in enumerate(list(_images_in(prompt)), 1):
            try:
                picture = self._picture(number, part["image_url"]["url"], num_left)
            except ValueError as error:
                raise RequestError(f"image {number} of {field} {error}", field=field) from None
            num_left -= picture.width * picture.height
            part.clear()
            part.update(type="image", image=picture)
        return prompt

    def _picture(self, number: int, url: str, most_pixels: int) -> Any:
        """The picture of a data URL, upright and in RGB, as transformers has it."""
        if self.processor is None:
            raise ValueError(f"must be left out, since this model reads no images ({self.reason})")
        if number > _MOST_IMAGES:
            rule = f"must be left out, since a request may have {_MOST_IMAGES} images"
            raise ValueError(f"{rule} (got more)")
        if not (data_url := _DATA_URL.fullmatch(url)):
            form = "a data URL such as 'data:image/png;base64,...', since no addresses are fetched"
            raise ValueError(f"must be {form} (got {url!r:.80})")
        try:
            data = base64.b64decode(data_url["base64"], validate=True)
        except ValueError as error:
            raise ValueError(f"must have whole base64 after its comma ({error})") from None
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                if image.width * image.height <= most_pixels:
                    return ImageOps.exif_transpose(image).convert("RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            pass
        except Exception:  # Whatever a decoder finds wrong.
            rule = f"must be a picture as {', '.join(_FORMATS)}"
            raise ValueError(f"{rule} (got {len(data)} bytes that can't be read)") from None
        rule = f"must leave the images of a request at most {_MOST_PIXELS} pixels together"
        raise ValueError(f"{rule} (got more)")


def has_images(prompt: object) -> bool:
    return any(_images_in(prompt))


def _images_in(prompt: Any) -> Iterator[dict[str, Any]]:
    """The parts of a chat that are images."""
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
    for message in prompt if is_chat else ():
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if part["type"] != "text")
