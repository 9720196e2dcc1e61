"""Load of a model with a progress bar."""

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final

from gateway.control_types import CommandDone, ModelStatus
from gateway.ctl import client

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_POLL_S: Final = 0.2


def load(model: str) -> None:
    """Load a model, with a progress bar for people, and return when it is ready. Raises `CommandFailed`."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {model}", total=None)
        done = _order(model)
        while not wait([done], _POLL_S).done:
            if console.is_terminal:
                _show(bar, task, model)
        done.result()


def _order(model: str) -> Future[CommandDone]:
    """Order the load on a daemon thread, which Ctrl-C does not wait for: the load continues in the daemon."""
    done: Future[CommandDone] = Future()

    def ask() -> None:
        try:
            done.set_result(client.post("/v1/models/load", {"model": model}, CommandDone))
        except Exception as error:  # root of the thread: its reader raises it
            done.set_exception(error)

    threading.Thread(target=ask, name="load", daemon=True).start()
    return done


def _show(bar: "Progress", task: "TaskID", model: str) -> None:
    status = next((one for one in client.status().models if one.name == model), None)
    if status is not None:
        bar.update(task, description=_words(status), total=status.total_bytes or None, completed=status.loaded_bytes)


def _words(model: ModelStatus) -> str:
    if model.is_waiting:
        return f"{model.name} waits for memory"
    return f"{model.stage or model.state} {model.name}"
