"""Trains the demo model and its head for drafts: `python -m deploy.demo_model --out worker/demo_model`.

Training takes a quarter of an hour on one CUDA GPU. With `--smoke`, the same code runs on a CPU in a minute and writes
a model that knows nothing.
"""

import argparse
from pathlib import Path

from . import head, training


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets the model")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU, in a minute")
    options = parser.parse_args()
    device = "cpu" if options.smoke else "cuda"
    training.train(options.out, training.SMOKE if options.smoke else training.Recipe(), device)
    head.train(options.out, device)


if __name__ == "__main__":
    main()
