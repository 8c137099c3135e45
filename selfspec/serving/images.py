"""Images in messages: from the data URLs of a request to pictures, within limits."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from selfspec.serving.fields import RequestError

MAX_IMAGE_BYTES = 32 << 20  # Of all images of a request together; a body may be longer by these.
_MOST_PIXELS = 50_000_000  # These are of all images of a request, too.
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
        urls = [part["image_url"]["url"] for part in _images_in(prompt)]
        if not urls:
            return prompt
        names = [f"image {number} of {field}" for number in range(1, len(urls) + 1)]
        if self.processor is None:
            rule = f"must be left out, since this model reads no images ({self.reason})"
            raise RequestError(f"{names[0]} {rule}", field=field)
        if len(urls) > _MOST_IMAGES:
            rule = f"must be left out, since a request may have {_MOST_IMAGES} images"
            raise RequestError(f"{names[_MOST_IMAGES]} {rule} (got {len(urls)})", field=field)
        try:
            pictures = _pictures(dict(zip(names, urls, strict=True)))
        except ValueError as error:
            raise RequestError(str(error), field=field) from None
        return [_with_pictures(message, pictures) for message in prompt]


def has_images(prompt: object) -> bool:
    return any(_images_in(prompt))


def _images_in(prompt: Any) -> Iterator[dict[str, Any]]:
    """The parts of a chat that are images."""
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
    for message in prompt if is_chat else ():
        if isinstance(message["content"], list):
            yield from (part for part in message["content"] if part["type"] != "text")


def _with_pictures(message: Mapping[str, Any], pictures: Iterator[Any]) -> Mapping[str, Any]:
    """The same message, with the next pictures in place of its images."""
    parts = message["content"]
    if not isinstance(parts, list):
        return message
    pictured = [
        part if part["type"] == "text" else {"type": "image", "image": next(pictures)}
        for part in parts
    ]
    return {**message, "content": pictured}


def _pictures(urls: Mapping[str, str]) -> Iterator[Any]:
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
    return iter(pictures)


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
