"""Images in messages: from what a request names to pictures, within limits."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.request import urlopen

from selfspec.errors import one_line
from selfspec.serving.schema import RequestError

__all__ = ["MAX_IMAGE_BYTES", "ImageReader", "has_images"]

MAX_IMAGE_BYTES = 32 << 20  # Of all images of a request together, and so are the next two.
_MOST_PIXELS = 50_000_000
_MOST_IMAGES = 16
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PATIENCE = 10.0  # An address must answer within 10 seconds, and send all within 10 more.
_CHUNK = 1 << 16
_IN_DATA = re.compile(r"data:image/[\w.+-]+;base64,(?P<base64>.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of conversations for a model's processor.

    Without a processor, `reason` says why there is none, and images are refused. Addresses are
    asked only with `fetches`.
    """

    processor: Any = None
    reason: str = "it has no image processor"
    fetches: bool = False

    def pictured(self, prompt: Any) -> Any:
        """The same prompt, with pictures where its messages name images."""
        urls = list(_images_in(prompt))
        if not urls:
            return prompt
        if self.processor is None:
            rule = "must be left out, since this model reads no images"
            raise _wrong(urls[0][0], f"{rule} ({self.reason})")
        if len(urls) > _MOST_IMAGES:
            rule = f"must be one of at most {_MOST_IMAGES} images of a request"
            raise _wrong(urls[_MOST_IMAGES][0], f"{rule} (got {len(urls)})")
        left = {"bytes": MAX_IMAGE_BYTES, "pixels": _MOST_PIXELS}
        pictures = iter([self._picture(where, url, left) for where, url in urls])
        return [
            {**message, "content": [_shown(part, pictures) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in prompt
        ]

    def _picture(self, where: str, url: str, left: dict[str, int]) -> Any:
        """The picture, which takes its share of what is left for the request."""
        data = self._data(where, url, left["bytes"])
        if len(data) > left["bytes"]:
            raise _too_large(where, f"{MAX_IMAGE_BYTES} bytes")
        left["bytes"] -= len(data)
        return _decoded(where, data, left)

    def _data(self, where: str, url: str, most: int) -> bytes:
        if found := _IN_DATA.fullmatch(url):
            try:
                return base64.b64decode(found["base64"], validate=True)
            except ValueError as error:
                raise _wrong(where, f"must have whole base64 after its comma ({error})") from None
        if not url[:8].lower().startswith(("http://", "https://")):
            form = "data:image/png;base64,..."
            raise _wrong(where, f"must be a data URL such as {form!r} (got {url!r:.80})")
        if not self.fetches:
            rule = "must be a data URL, since this server fetches no addresses"
            raise _wrong(where, f"{rule} (got {url!r:.80}); selfspec serve has --fetch-images")
        return _fetched(where, url, most)


def has_images(prompt: Any) -> bool:
    """Does a conversation name any image?"""
    return any(_images_in(prompt))


def _images_in(prompt: Any) -> Iterator[tuple[str, str]]:
    """The place and the URL of each image in messages."""
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
    for number, message in enumerate(prompt if is_chat else ()):
        if isinstance(message["content"], list):
            for index, part in enumerate(message["content"]):
                if part["type"] == "image_url":
                    yield f"messages[{number}].content[{index}].image_url", part["image_url"]["url"]


def _shown(part: Any, pictures: Iterator[Any]) -> Any:
    """A part of a message, with the next picture in place of an image's URL."""
    return {"type": "image", "image": next(pictures)} if part["type"] == "image_url" else part


def _fetched(where: str, url: str, most: int) -> bytes:
    """What an address answers, up to one byte more than it may."""
    data, end = bytearray(), monotonic() + _PATIENCE
    try:
        with urlopen(url, timeout=_PATIENCE) as response:
            while (chunk := response.read1(_CHUNK)) and len(data) <= most:
                data += chunk
                if monotonic() > end:
                    raise TimeoutError("it took too long")
    except (OSError, ValueError) as error:
        rule = f"must be an address that answers with an image ({one_line(error):.120})"
        raise _wrong(where, rule) from None
    return bytes(data)


def _decoded(where: str, data: bytes, left: dict[str, int]) -> Any:
    """The picture upright and in RGB, as transformers loads it from a file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            left["pixels"] -= width * height
            if left["pixels"] < 0:
                raise _too_large(where, f"{_MOST_PIXELS} pixels")
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(where, f"{_MOST_PIXELS} pixels") from None
    except RequestError:
        raise
    except Exception:  # Whatever a decoder finds wrong.
        rule = f"must be a picture as {', '.join(_FORMATS)}"
        raise _wrong(where, f"{rule} (got {len(data)} bytes that can't be read as one)") from None


def _too_large(where: str, most: str) -> RequestError:
    return _wrong(where, f"must leave the images of a request at most {most} together (got more)")


def _wrong(where: str, rule: str) -> RequestError:
    return RequestError(f"{where} {rule}", field=where)
