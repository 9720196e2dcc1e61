"""`mlxctl run`: downloads, loads and chats with a model in one step."""

from typing import Annotated

import typer

from gateway.ctl.complete import complete_downloaded, model_argument
from gateway.ctl.model_verbs.offline import naming_models_here
from gateway.ctl.talk import chat, ready_model
from gateway.ctl.talk.temporary_daemon import running_daemon


def run(
    model: Annotated[
        str,
        model_argument(
            "A model's name or alias, a folder, a repository (ORG/NAME[@REVISION]), or the last part of its name.",
            complete=complete_downloaded,
        ),
    ],
    prompt: Annotated[str | None, typer.Argument(help="Prompt to answer before exiting.", show_default=False)] = None,
    system: chat.System = None,
    max_tokens: chat.MaxTokens = None,
    temperature: chat.Temperature = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before downloading what does not fit, or writing to mlxd.toml."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one answer as JSON, with its reasoning.")] = False,
) -> None:
    """Download a model if it is not here, load it and chat with it. Says first whether it fits.

    Where no daemon runs, one is started for the conversation.

    Example: mlxctl run mlx-community/Qwen3-4B-4bit "Why is the sky blue?"
    """
    with naming_models_here():
        path = ready_model.resolved(model, yes)
    with running_daemon(ready_model.echo_stderr):
        name = ready_model.made_known(path, yes)
        ready_model.load(name)
        chat.talk(name, prompt, chat.ChatOptions(system, max_tokens, temperature), json=json)
