import sys
from pathlib import Path

# The recipe is not part of the installed packages.
REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY))
