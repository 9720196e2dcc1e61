"""Prints samples of the training data, one JSON object per line: `python -m deploy.demo_model.corpus 5`."""

import json
import sys

from .generate import SEED, training_sample

if __name__ == "__main__":
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
        shown = training_sample(SEED, 0, number)
        print(
            json.dumps(
                {
                    "category": shown.category,
                    "thinking": shown.thinking,
                    "tools": shown.tools,
                    "messages": shown.messages,
                },
                ensure_ascii=False,
            )
        )
