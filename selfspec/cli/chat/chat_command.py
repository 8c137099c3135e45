"""`selfspec chat`: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from selfspec.cli.shared.messages import Verbose
from selfspec.cli.shared.model_loading import check_template
from selfspec.cli.shared.opened import checked, loaded
from selfspec.cli.shared.options import Knobs, MaxNewTokens, WriteOptions, unfolds


@dataclass(frozen=True, kw_only=True)
class ChatOptions(WriteOptions):
    """The same for a model that must be named, since the embedded one can't chat."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of a chat model, such as HuggingFaceTB/SmolLM2-135M-Instruct. "
            "Required.",
        ),
    ] = None


@unfolds
def chat(
    asked: ChatOptions,
    knobs: Knobs,
    system: Annotated[
        str | None, typer.Option(help="The system message at the start of the conversation.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour the tokens that were drafted.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Talk with a chat model in the terminal."""
    if asked.model is None:
        check_template(None, None)
    config = checked(asked, knobs)
    with loaded(asked, max_new_tokens, chats=True) as writer:
        from selfspec.cli.chat.terminal import Chat

        Chat(writer, config, system=system, show_drafts=show_drafts).run()
