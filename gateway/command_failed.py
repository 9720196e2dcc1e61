"""Base class of the errors that an operator sees."""


class CommandFailed(Exception):
    """A command has failed. The message is for the operator; `status` is the exit status of `mlxctl`."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
