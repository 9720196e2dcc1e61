"""Verbs that ask a model: `chat`, `run` and `decide`, and how its model is made ready.

A daemon that a verb starts if none runs, and that ends with the verb.

A model made ready for a conversation: found or downloaded, made known to the daemon, and loaded.

`mlxctl chat`: a conversation in the terminal.

`mlxctl run`: downloads, loads and chats with a model in one step.

`mlxctl decide`: one question about a text, answered with probabilities.
"""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer
from msgspec import Struct

from gateway.command_failed import CommandFailed
from gateway.config.settings import ConfigError
from gateway.control_types import CommandDone, ModelStatus, ReloadResult
from gateway.ctl import client, offline
from gateway.ctl.client import stream_chat
from gateway.ctl.hub import download, is_repository, print_info
from gateway.ctl.offline import (
    ServedModel,
    available_bytes,
    complete_downloaded,
    folder_of,
    model_argument,
    naming_models_here,
    read_config,
    served_models,
)
from gateway.ctl.tables import Json, harmless, print_json, print_result, progress_bar
from gateway.model_files.hub_cache import MAIN, cached_models, split_revision
from gateway.model_files.metadata import Unreadable, inspect

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

START_TIMEOUT_S: Final = 60.0
# This is long, because the daemon drains first and its workers must release their memory.
END_TIMEOUT_S: Final = 120.0
_DAEMON_POLL_S: Final = 0.1


@contextmanager
def running_daemon(echo: Callable[[str], None]) -> Generator[None, None, None]:
    """Use the running daemon, or start one that ends with the block. Raises `CommandFailed` if it cannot start."""
    if offline.daemon() is not None:
        yield
        return
    with tempfile.TemporaryFile() as output:
        _end_with_signals()
        # The daemon gets its own session, so that Ctrl-C reaches only the conversation.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway.main"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_ready(process, output)
            echo("no mlxd runs: one is started, which ends with the conversation (mlxctl serve keeps one)")
            yield
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_with_signals() -> None:
    """Let SIGHUP from a closed terminal, or SIGTERM, leave the `with` block and so end the daemon, instead of killing
    this process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_until_ready(process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
    """Wait until the daemon is ready. If it exits, raises `CommandFailed` with its last line of output."""
    end = time.monotonic() + START_TIMEOUT_S
    while offline.daemon() is None:
        if process.poll() is not None:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise CommandFailed(
                lines[-1].removeprefix("mlxd: ") if lines else "mlxd did not start", process.returncode or 1
            )
        if time.monotonic() > end:
            raise CommandFailed(f"mlxd did not start within {START_TIMEOUT_S:.0f} s")
        time.sleep(_DAEMON_POLL_S)


_SUGGESTED: Final = 5
_POLL_S: Final = 0.2


def resolved(name: str, yes: bool) -> str:
    """Return the path of a model on this machine, or the name of a model that the daemon serves. Raises
    `CommandFailed`.
    """
    if name.startswith((".", "/", "~")) and _served(name) is None:
        return str(_checked_folder(name, yes))
    if _served(name) is None and not is_repository(name):
        name = _known_here(name) or _searched(name)
    if (served := _served(name)) is None:
        return _downloaded(name, yes)
    if not _is_here(served.path) and is_repository(served.path):
        _downloaded(served.path, yes)
    return served.name


def _known_here(word: str) -> str | None:
    """Return the served or downloaded repository whose name ends with `word`, if there is exactly one. Does not ask the
    hub.
    """
    paths = {model.path for model in served_models()} | set(cached_models())
    found = [path for path in paths if path.rpartition("/")[2].lower() == word.lower()]
    return found[0] if len(found) == 1 else None


def _served(model: str) -> ServedModel | None:
    """Return the model with that name, alias or path, as the daemon serves it or would serve it."""
    models = served_models()
    return next((served for served in models if model in (served.name, served.path, *served.aliases)), None)


def _is_here(path: str) -> bool:
    try:
        return folder_of(path).is_dir()
    except Unreadable:
        return False


def _checked_folder(name: str, yes: bool) -> Path:
    """Return the folder of a model and check that the model fits. Raises `CommandFailed`."""
    try:
        folder = folder_of(name)
        info = inspect(folder, "auto", 0, available_bytes())
    except Unreadable as error:
        raise CommandFailed(str(error)) from None
    print_info(name, info, echo_stderr)
    if not info.fits and not yes:
        raise CommandFailed(f"{name} {info.verdict}; --yes tries it anyway")
    return folder


def _searched(word: str) -> str:
    """Search the hub for the repository whose name ends with `word`. Raises `CommandFailed` with similar names."""
    from gateway.model_files.search import search

    found = [model.repository for model in search([word], available_bytes()) if model.is_usable]
    for repository in found:
        if repository.rpartition("/")[2].lower() == word.lower():
            return repository
    near = ", ".join(found[:_SUGGESTED])
    raise CommandFailed(f"there is no model {word!r} here{f'; the hub has {near}' if near else ' or on the hub'}")


def _downloaded(name: str, yes: bool) -> str:
    """Download a repository and return its name, or the folder of a revision. Raises `CommandFailed`."""
    repository, revision = split_revision(name)
    if revision == MAIN and repository in cached_models():
        _checked_folder(repository, yes)
        return repository
    pulled = download(name, None, yes, echo_stderr)
    return repository if revision == MAIN else str(pulled.path)


def made_known(path: str, yes: bool) -> str:
    """Return the name under which the daemon serves `path`. Adds it to the configuration if needed. Raises
    `CommandFailed`.
    """
    if (served := _served(path)) is not None:
        return served.name
    # The daemon serves all downloaded models if none is configured, and a reload finds the new one.
    client.post("/v1/config/reload", {}, ReloadResult)
    if (served := _served(path)) is not None:
        return served.name
    name = _add_table(client.status().config_path, path, _agreed if not yes else lambda _: None)
    client.post("/v1/config/reload", {}, ReloadResult)
    return name


def _agreed(question: str) -> None:
    """Ask the user to confirm. Exits if the user declines. Raises `CommandFailed` if there is no terminal."""
    if not sys.stdin.isatty():
        raise CommandFailed(f"{question} Not without --yes.")
    if not typer.confirm(question, default=True, err=True):
        raise typer.Exit(1)


def echo_stderr(line: str) -> None:
    """Print a line to stderr, because stdout carries the answer."""
    typer.echo(line, err=True)


def _add_table(config_path: str, path: str, agree: Callable[[str], None]) -> str:
    """Append `[models.NAME]` for a path and return the name. The old file is kept as `.bak`. Raises `CommandFailed`.

    `agree` is called before the file is written; by raising, it prevents the write.
    """
    file = Path(config_path)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    name = _free_name(path, read_config(file if file.exists() else None).models)
    # Every JSON string is a valid TOML string.
    table = f"[models.{dumps(name)}]\npath = {dumps(path)}\n"
    agree(f"{file} names the models that are served. Add {name} to it?")
    kept = file.with_name(f"{file.name}.bak")
    try:
        kept.write_text(before, encoding="utf-8")
        kept.chmod(0o600)
        with file.open("a", encoding="utf-8") as out:
            out.write(("" if not before or before.endswith("\n") else "\n") + ("\n" if before else "") + table)
        read_config(file)
    except ConfigError as error:
        file.write_text(before, encoding="utf-8")
        raise CommandFailed(f"{file} would be invalid with {name} ({error}); it is as it was") from None
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}") from None
    return name


def _free_name(path: str, taken: Collection[str]) -> str:
    """Return the path's last part in lower case, with a number appended if another model has that name."""
    base = split_revision(path)[0].rstrip("/").rpartition("/")[2].lower()
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def load(model: str) -> None:
    """Load a model, with a progress bar for people, and return when it is ready. Raises `CommandFailed`."""
    from rich.progress import TimeElapsedColumn

    with progress_bar(TimeElapsedColumn()) as bar:
        task = bar.add_task(f"loading {model}", total=None)
        done = _start_load(model)
        while not wait([done], _POLL_S).done:
            if not bar.disable:
                _show_progress(bar, task, model)
        done.result()


def _start_load(model: str) -> Future[CommandDone]:
    """Send the load command from a daemon thread, so that Ctrl-C does not wait for it. The load continues in the
    daemon.
    """
    done: Future[CommandDone] = Future()

    def ask() -> None:
        try:
            done.set_result(client.post("/v1/models/load", {"model": model}, CommandDone))
        except Exception as error:  # The reader of the future raises the error.
            done.set_exception(error)

    threading.Thread(target=ask, name="load", daemon=True).start()
    return done


def _show_progress(bar: "Progress", task: "TaskID", model: str) -> None:
    status = next((one for one in client.status().models if one.name == model), None)
    if status is not None:
        bar.update(
            task, description=_progress_text(status), total=status.total_bytes or None, completed=status.loaded_bytes
        )


def _progress_text(model: ModelStatus) -> str:
    if model.is_waiting:
        return f"{model.name} waits for memory"
    return f"{model.stage or model.state} {model.name}"


System = Annotated[str | None, typer.Option(help="System message.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens in an answer.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is deterministic.")]

DIM = "\x1b[2m"
RESET = "\x1b[0m"


class ChatAnswer(Struct, frozen=True):
    """One answer of a model. `reasoning` is empty for a model without reasoning output."""

    content: str
    reasoning: str


class ChatOptions(Struct, frozen=True):
    """Options of a conversation, as on the command line; None means the model's default."""

    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


def talk(model: str, prompt: str | None, options: ChatOptions, *, json: bool = False) -> None:
    """Print the answer to a prompt or to piped input. If there is neither, hold a conversation. Raises
    `CommandFailed`.
    """
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    request: dict[str, Any] = {"model": model, "stream": True}
    request |= {name: value for name, value in sampling.items() if value is not None}
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if prompt is None and (json or not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is None:
        converse(request, messages)
        return
    messages.append({"role": "user", "content": prompt})
    request["messages"] = messages
    if json:
        print_json(whole(request))
    else:
        answer(request, sys.stdout)


def whole(request: dict[str, Any]) -> ChatAnswer:
    """Return one complete answer. Raises `CommandFailed`."""
    deltas = list(stream_chat(request))
    content, reasoning = ("".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content"))
    return ChatAnswer(content, reasoning)


def answer(request: dict[str, Any], out: TextIO) -> str:
    """Stream one answer to `out` and return its text. Ctrl-C ends the answer but not the conversation."""
    text: list[str] = []
    shown = harmless if out.isatty() else str
    # Reasoning is shown only on a terminal; a pipe gets only the answer.
    shows_reasoning = out.isatty()
    is_dim = is_begun = False
    try:
        for delta in stream_chat(request):
            is_begun = True
            if shows_reasoning and (reasoning := delta.get("reasoning_content")):
                out.write(("" if is_dim else DIM) + shown(reasoning))
                is_dim = True
            if content := delta.get("content"):
                out.write((f"{RESET}\n\n" if is_dim else "") + shown(content))
                is_dim = False
                text.append(content)
            out.flush()
    except KeyboardInterrupt:
        is_begun = True
    finally:
        # A request that was refused has no line to end.
        if is_begun:
            out.write(f"{RESET}\n" if is_dim else "\n")
            out.flush()
    return "".join(text)


def converse(request: dict[str, Any], messages: list[dict[str, str]]) -> None:
    """Hold a conversation until the end of input; `/new` starts it over."""
    opening = list(messages)
    print("Ctrl-D or /exit ends, /new starts over, Ctrl-C stops an answer.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = list(opening)
        elif line:
            messages = [*messages, {"role": "user", "content": line}]
            try:
                text = answer(request | {"messages": messages}, sys.stdout)
            except CommandFailed as error:
                print(f"mlxctl: {error}", file=sys.stderr)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})


def run(
    model: Annotated[
        str,
        model_argument(
            "A model's name or alias, a folder, a repository (ORG/NAME[@REVISION]), or the last part of its name.",
            complete=complete_downloaded,
        ),
    ],
    prompt: Annotated[str | None, typer.Argument(help="Prompt to answer before exiting.", show_default=False)] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
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
        path = resolved(model, yes)
    with running_daemon(echo_stderr):
        name = made_known(path, yes)
        load(name)
        talk(name, prompt, ChatOptions(system, max_tokens, temperature), json=json)


class CliDecision(Struct, frozen=True):
    """Answer to one question; the fields of other types of answers are empty."""

    type: str
    probability: float | None = None
    choice: str | None = None
    score: float | None = None
    confidence: float | None = None
    probabilities: list[dict[str, Any]] = []


class CliDecisions(Struct, frozen=True):
    """Answer of `POST /v1/decisions`."""

    answers: list[CliDecision]


def decide(
    model: Annotated[str, typer.Argument(help="Name or alias of a model.")],
    question: Annotated[str, typer.Argument(help="Question, or statement that is true or false.")],
    text: Annotated[
        str | None, typer.Option("--input", help="Text to decide about; without it, piped input.", show_default=False)
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option to choose from; repeat it.")] = None,
    level: Annotated[list[str] | None, typer.Option(help="Level of a score, the lowest first; repeat it.")] = None,
    json: Json = False,
) -> None:
    """Decide about a text: yes or no, one of the options, or a level.

    Example: mlxctl decide demo "Does the customer want money back?" --input "I was charged twice."
    """
    if option and level:
        raise CommandFailed("--option and --level exclude each other")
    if text is None and sys.stdin.isatty():
        raise CommandFailed("there is nothing to decide about: set --input, or pipe a text")
    asked: dict[str, Any] = {"type": "predicate", "instructions": question}
    if option:
        asked |= {"type": "choice", "choices": [{"value": each} for each in option]}
    if level:
        asked |= {"type": "score", "levels": [{"label": each} for each in level]}
    body = {"model": model, "input": sys.stdin.read() if text is None else text, "questions": [asked]}
    (answer,) = client.post("/v1/decisions", body, CliDecisions).answers
    print_result(answer, _shown(answer), json)


def _shown(answer: CliDecision) -> str:
    rows = [(harmless(str(each.get("value"))), each["probability"]) for each in answer.probabilities]
    match answer.type:
        case "predicate":
            return f"yes {answer.probability:.3f}"
        case "choice":
            head = f"{harmless(answer.choice or '')} (confidence {answer.confidence:.3f})"
        case "score":
            head = f"{answer.score:.2f} (confidence {answer.confidence:.3f})"
            rows = [
                (f"{each['value']} {harmless(each['label'])}", each["probability"]) for each in answer.probabilities
            ]
        case _:
            return "refused: the question does not fit the model's context"
    return "\n".join([head, *(f"  {share:.3f}  {name}" for name, share in rows)])
