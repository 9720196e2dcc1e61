"""Measures the demo model: `python -m deploy.demo_model.evaluate`."""

from .measure import main

if __name__ == "__main__":
    main()
