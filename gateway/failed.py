"""The root of what the operator is told."""


class Failed(Exception):
    """What cannot be done, in a sentence for the operator; `status` is what `mlxctl` exits with then."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
