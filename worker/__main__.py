"""Command `python -P -m worker NAME --epoch N --spec -`, with the specification on standard input."""

import sys

from worker.main import main

sys.exit(main())
