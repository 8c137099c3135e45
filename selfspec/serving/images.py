"""Images in messages: from what a request names to pictures, within limits."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from time import monotonic
from typing import Any
from urllib.request import urlopen

from selfspec.errors import one_line
from selfspec.serving.fields import RequestError

MAX_IMAGE_BYTES = 32 << 20  # Of all images of a request together, and so are the next two.
_MOST_PIXELS = 50_000_000
_MOST_IMAGES = 16
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PATIENCE = 10.0  # An address must answer within 10 seconds, and all of a request within 20.
_CHUNK = 1 << 16
_IN_DATA = re.compile(r"data:image/[\w.+-]+;base64,(?P<base64>.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of conversations for a model's processor; asks addresses if it `fetches`.

    Without a processor, `reason` says why there is none, and images are refused.
    """

    processor: Any = None
    reason: str = "it has no image processor"
    fetches: bool = False

    def fetched(self, prompt: Any, hold: Callable[[int], object] = int) -> Any:
        """The same prompt with what its addresses answer; `hold` hears how many bytes it has."""
        images, end = self._images_in(prompt), monotonic() + 2 * _PATIENCE
        urls = [part["image_url"]["url"] for _, part in images if "image_url" in part]
        num_others = sum(map(len, urls))
        num_bytes, parts = 0, list[dict[str, Any]]()
        for where, part in images:
            data = bytearray()
            if _is_address(part):
                for chunk in _fetched(where, part["image_url"]["url"], end):
                    data += chunk
                    num_bytes += len(chunk)
                    hold(num_others + num_bytes)
                    if num_bytes > MAX_IMAGE_BYTES:
                        raise _too_large(where, f"{MAX_IMAGE_BYTES} bytes")
            fetched = {"type": "data", "data": data, "where": where}
            parts.append(fetched if _is_address(part) else part)
        return _with_images(prompt, parts) if images else prompt

    def pictured(self, prompt: Any) -> Any:
        """The same prompt, with pictures where its messages have images.

        The sizes of all are checked before the first one is decoded.
        """
        images = self._images_in(self.fetched(prompt) if self.fetches else prompt)
        if not images:
            return prompt
        num_bytes = num_pixels = 0
        data = [(where, self._data(where, part)) for where, part in images]
        for where, picture in data:
            num_bytes += len(picture)
            if num_bytes > MAX_IMAGE_BYTES:
                raise _too_large(where, f"{MAX_IMAGE_BYTES} bytes")
            with _opened(where, picture) as image:
                num_pixels += image.width * image.height
            if num_pixels > _MOST_PIXELS:
                raise _too_large(where, f"{_MOST_PIXELS} pixels")
        return _with_images(
            prompt, [{"type": "image", "image": _decoded(*picture)} for picture in data]
        )

    def _images_in(self, prompt: object) -> list[tuple[str, dict[str, Any]]]:
        """The images of a prompt, not too many; a model that reads none refuses them."""
        images = list(_images_in(prompt))
        if images and self.processor is None:
            rule = "must be left out, since this model reads no images"
            raise _wrong(images[0][0], f"{rule} ({self.reason})")
        if len(images) > _MOST_IMAGES:
            rule = f"must be one of at most {_MOST_IMAGES} images of a request"
            raise _wrong(images[_MOST_IMAGES][0], f"{rule} (got {len(images)})")
        return images

    def _data(self, where: str, part: dict[str, Any]) -> bytes:
        if "data" in part:
            return bytes(part["data"])
        url = part["image_url"]["url"]
        if data_url := _IN_DATA.fullmatch(url):
            try:
                return base64.b64decode(data_url["base64"], validate=True)
            except ValueError as error:
                raise _wrong(where, f"must have whole base64 after its comma ({error})") from None
        if _is_address(part):
            rule = "must be a data URL, since this server fetches no addresses"
            raise _wrong(where, f"{rule} (got {url!r:.80}); selfspec serve has --fetch-images")
        form = "data:image/png;base64,..."
        raise _wrong(where, f"must be a data URL such as {form!r} (got {url!r:.80})")


def has_images(prompt: object) -> bool:
    return any(_images_in(prompt))


def has_addresses(prompt: object) -> bool:
    return any(_is_address(part) for _, part in _images_in(prompt))


def _is_address(part: dict[str, Any]) -> bool:
    url = part["image_url"]["url"] if "image_url" in part else ""
    return bool(url[:8].lower().startswith(("http://", "https://")))


def _images_in(prompt: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The images of a chat and where its request has them, which a part may say itself."""
    is_chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
    for number, message in enumerate(prompt if is_chat else ()):
        if isinstance(message["content"], list):
            for index, part in enumerate(message["content"]):
                if part["type"] != "text":
                    where = f"messages[{number}].content[{index}].image_url"
                    yield part.get("where", where), part


def _with_images(prompt: Any, images: Sequence[dict[str, Any]]) -> Any:
    """The same messages, with these parts in place of their images, in order."""
    left = iter(images)
    return [
        {**message, "content": [part if part["type"] == "text" else next(left) for part in parts]}
        if isinstance(parts := message["content"], list)
        else message
        for message in prompt
    ]


def _fetched(where: str, url: str, end: float) -> Iterator[bytes]:
    """What an address answers until a time, in chunks."""
    try:
        with urlopen(url, timeout=min(_PATIENCE, max(end - monotonic(), 0.001))) as response:
            while chunk := response.read1(_CHUNK):
                yield chunk
                if monotonic() > end:
                    raise TimeoutError("it took too long")
    except (OSError, ValueError, HTTPException) as error:
        rule = f"must be an address that answers with an image ({one_line(error):.120})"
        raise _wrong(where, rule) from None


def _decoded(where: str, data: bytes) -> Any:
    """A picture upright and in RGB, as transformers loads it from a file."""
    from PIL import ImageOps

    with _opened(where, data) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _opened(where: str, data: bytes) -> Iterator[Any]:
    """A picture of which the header was read. Inside, whatever goes wrong is its own fault."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(where, f"{_MOST_PIXELS} pixels") from None
    except Exception:  # Whatever a decoder finds wrong.
        rule = f"must be a picture as {', '.join(_FORMATS)}"
        raise _wrong(where, f"{rule} (got {len(data)} bytes that can't be read as one)") from None


def _too_large(where: str, most: str) -> RequestError:
    return _wrong(where, f"must leave the images of a request at most {most} together (got more)")


def _wrong(where: str, rule: str) -> RequestError:
    return RequestError(f"{where} {rule}", field=where)
