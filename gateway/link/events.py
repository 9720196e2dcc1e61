"""Events of the link, as its owner counts them."""

from typing import Protocol

from protocol.messages import Pong, Step


class LinkEvents(Protocol):
    """Called on the event loop: cheap, and never raises."""

    def step(self, model: str, step: Step) -> None: ...
    def pong(self, model: str, pong: Pong) -> None: ...
    def stale_message(self) -> None: ...
    def malformed_frame(self) -> None: ...
