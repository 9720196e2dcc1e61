"""`python -P -m worker NAME --spec JSON`."""

import sys

from worker.main import main

sys.exit(main())
