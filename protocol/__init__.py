"""Wire protocol between the gateway and its workers. Imports neither side."""

from typing import Final

__version__ = "0.1.0"

# Number of the wire protocol. Each change that a gateway or worker without it would misread, or ignore although the
# output depends on it, raises the number. A gateway replaces the workers of another number and adopts all others.
PROTOCOL: Final = 2
