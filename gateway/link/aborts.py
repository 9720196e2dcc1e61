"""Aborts that a worker was sent and has not answered: a number that grows is a worker that does not let go."""

from collections.abc import Iterable


class Aborts:
    """The rids by the epoch of their worker. Owned by the link."""

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}

    def sent(self, epoch: int, rids: Iterable[int]) -> None:
        self._open.setdefault(epoch, set()).update(rids)

    def ended(self, epoch: int, rid: int) -> None:
        """A sequence without a waiting client has ended."""
        if rids := self._open.get(epoch):
            rids.discard(rid)

    def forget(self, epoch: int) -> None:
        """This worker is gone."""
        self._open.pop(epoch, None)

    @property
    def count(self) -> int:
        return sum(map(len, self._open.values()))
