"""A scripted worker of a group whose statistics are distinct numbers."""

import sys

import msgspec
from scripted import Scripted, main

from protocol.from_worker import GroupInfo, RankInfo, Ready
from protocol.stats import Stats
from tests.support.statistics import distinct


class Reporting(Scripted):
    def ready(self) -> Ready:
        group = GroupInfo("tensor", "ring", (RankInfo(0, "here", "h", 5, "gpu", 9),))
        return msgspec.structs.replace(super().ready(), group=group)

    def stats(self) -> Stats:
        return msgspec.structs.replace(distinct(), granted_bytes=self.orders[-1].memory_bytes)


if __name__ == "__main__":
    sys.exit(main(Reporting))
