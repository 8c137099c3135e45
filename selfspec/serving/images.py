"""Images in messages: from the data URLs of a request to pictures, within limits."""

from __future__ import annotations

import base64
import copy
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        """The same prompt, with pictures where its messages have images; `field` is its name.

        The sizes of all are checked before the first one is decoded.
        """
        if not has_images(prompt):
            return prompt
        prompt = copy.deepcopy(prompt)
        parts = {f"image {n} of {field}": part for n, part in enumerate(_images_in(prompt), 1)}
        try:
            self._check(list(parts))
            pictures = _pictures({name: part["image_url"]["url"] for name, part in parts.items()})
        except ValueError as error:
            raise RequestError(str(error), field=field) from None
        for part, picture in zip(parts.values(), pictures, strict=True):
            part.clear()
            part.update(type="image", image=picture)
        return prompt

    def _check(self, names: list[str]) -> None:
        if self.processor is None:
            rule = f"must be left out, since this model reads no images ({self.reason})"
            raise ValueError(f"{names[0]} {rule}")
        if len(names) > _MOST_IMAGES:
            rule = f"must be left out, since a request may have {_MOST_IMAGES} images"
            raise ValueError(f"{names[_MOST_IMAGES]} {rule} (got {len(names)})")


def has_images(prompt: object) -> bool:
    return any(_images_in(prompt))


def _images_in(prompt: Any) -> Iterator[dict[str, Any]]:
    """The parts of a chat that are images."""
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
    for message in prompt if is_chat else ():
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if part["type"] != "text")


def _pictures(urls: Mapping[str, str]) -> list[Any]:
    """The pictures of named data URLs, upright and in RGB, as transformers has them."""
    from PIL import ImageOps

    data, num_pixels = {name: _data(name, url) for name, url in urls.items()}, 0
    for name in urls:
        with _opened(name, data[name]) as image:
            num_pixels += image.width * image.height
        if num_pixels > _MOST_PIXELS:
            raise _too_large(name)
    pictures = []
    for name in urls:
        with _opened(name, data[name]) as image:
            pictures.append(ImageOps.exif_transpose(image).convert("RGB"))
    return pictures


def _data(name: str, url: str) -> bytes:
    if not (data_url := _DATA_URL.fullmatch(url)):
        form = "a data URL such as 'data:image/png;base64,...', since no addresses are fetched"
        raise ValueError(f"{name} must be {form} (got {url!r:.80})")
    try:
        return base64.b64decode(data_url["base64"], validate=True)
    except ValueError as error:
        raise ValueError(f"{name} must have whole base64 after its comma ({error})") from None


@contextmanager
def _opened(name: str, data: bytes) -> Iterator[Any]:
    """A picture of which the header was read. Inside, whatever goes wrong is its own fault."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(name) from None
    except Exception:  # Whatever a decoder finds wrong.
        rule = f"must be a picture as {', '.join(_FORMATS)}"
        raise ValueError(f"{name} {rule} (got {len(data)} bytes that can't be read)") from None


def _too_large(name: str) -> ValueError:
    rule = f"must leave the images of a request at most {_MOST_PIXELS} pixels together"
    return ValueError(f"{name} {rule} (got more)")
