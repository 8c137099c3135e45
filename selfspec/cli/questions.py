"""What `selfspec check` and `selfspec demo` ask: prompts that come with them, or the user's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.cli.prompt_files import PromptLine, read_prompts
from selfspec.serving.images import has_images
from selfspec.serving.settings import Settings
from selfspec.serving.translator import Encoded

if TYPE_CHECKING:
    from selfspec.cli.loading import Loaded

_PROMPTS = Path(__file__).parent / "prompts"


class Question(NamedTuple):
    name: str
    prompt: Any  # A text, or messages.
    is_turn: bool = False  # Is the text what a user would say to a model that can chat?

    @property
    def has_images(self) -> bool:
        return has_images(self.prompt)

    def encoded(self, loaded: Loaded) -> Encoded:
        prompt = self.prompt
        if self.is_turn and loaded.tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        return loaded.translator().encoded(prompt, Settings())


def snippets() -> list[Question]:
    """What the embedded model continues.

    Each ends in the middle of something that is frequent in Python's library, and what the model
    adds makes sense for about fifty tokens.
    """
    return [Question(str(line.name), line.prompt) for line in _lines_of("snippets")]


def questions_of(path: Path | None) -> list[Question]:
    """Those of the file, named by their lines. Without a file, one for every sort of work."""
    if path is None:
        lines = _lines_of("questions")
        return [Question(str(line.name), line.prompt, is_turn=True) for line in lines]
    lines = read_prompts(path, "--prompts")
    return [Question(f"prompt {line.number}", line.prompt) for line in lines]


def _lines_of(name: str) -> list[PromptLine]:
    return read_prompts(_PROMPTS / f"{name}.jsonl", name)
