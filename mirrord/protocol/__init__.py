"""The messages of the socket, one class each, shared by the daemon and the client. No I/O.

Times are aware UTC, durations are seconds, sizes are bytes.
"""

from .checkouts import *
from .codec import *
from .daemon import *
from .environments import *
from .mirrors import *
