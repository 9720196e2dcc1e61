"""A follower of a group that goes astray once a request's row has come: by its first argument."""

import ctypes
import os
import sys
import time
from dataclasses import replace

import mlx.core as mx

from protocol.group import InsertRow, TickPlan
from protocol.spec import read_spec
from worker.group.follower import Follower, follow
from worker.group.rank_agreement import Identity

# Rows of the self-check have smaller ones.
FIRST_RID = 1000


class Astray(Follower):
    """`fault`: what it does."""

    fault = ""
    has_begun = False

    def identity(self) -> Identity:
        own = super().identity()
        return replace(own, versions=type(own.versions)("0.0.9", "0", "0")) if self.fault == "version" else own

    def do(self, plan: TickPlan) -> None:
        is_first = not self.has_begun and any(isinstance(op, InsertRow) and op.rid > FIRST_RID for op in plan.ops)
        self.has_begun |= is_first
        match self.fault:
            case "slow" if self.has_begun:
                time.sleep(3.0 if is_first else 0.02)
            case "hang" if is_first:
                time.sleep(3600)
            case "hold" if self.has_begun and not is_first:  # Python's lock, as native code may
                ctypes.PyDLL(None).sleep(3600)
            case "extra" if is_first:
                mx.eval(mx.distributed.all_sum(mx.zeros(3)))
            case "greedy" if is_first:
                self.taken = mx.zeros(100 << 20)
                mx.eval(self.taken)
            case "budget" if is_first:
                self.cache.resize(0)
            case _:
                pass
        super().do(plan)
        if self.fault == "other" and is_first:
            self.crc ^= 1


if __name__ == "__main__":
    Astray.fault = sys.argv[1]
    os._exit(follow(Astray(read_spec("-"))))
