"""`selfspec chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.shared.messages import Verbose
from selfspec.cli.shared.model_loading import check_template
from selfspec.cli.shared.opened import checked, loaded
from selfspec.cli.shared.options import (
    ChatOptions,
    DraftOptions,
    Knobs,
    MaxNewTokens,
    Sampling,
    unfolds,
)


@unfolds
def chat(
    loading: ChatOptions,
    sampling: Sampling,
    knobs: Knobs,
    drafts: DraftOptions,
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
    if loading.model is None:
        check_template(None, None)
    config = checked(loading, knobs, drafts)
    with loaded(loading, sampling, max_new_tokens, drafts, chats=True) as writer:
        from selfspec.cli.chat.terminal import Chat

        Chat(writer, config, system=system, show_drafts=show_drafts).run()
