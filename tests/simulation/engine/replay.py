"""One seed, and the command that replays it where it fails."""

import traceback

from tests.simulation.engine.world import World


def run(seed: int) -> bool:
    """Run one world and print its digest. Returns whether every promise was kept."""
    world = World(seed)
    try:
        digest = world.run()
    except Exception as error:  # whatever a world raises is a finding
        traceback.print_exception(error, limit=-4)
        print(f"{failure(seed)}\n{world.rates}\n{dict(world.counts)}")
        return False
    print(f"seed {seed}: {digest} {dict(world.counts)}")
    return True


def failure(seed: int) -> str:
    return f"engine seed {seed} failed; replay it with: python -m tests.simulation.engine {seed}"
