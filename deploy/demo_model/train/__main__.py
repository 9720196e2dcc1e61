"""Trains the demo model: `python -m deploy.demo_model.train --out DIR`."""

from .training import main

if __name__ == "__main__":
    main()
