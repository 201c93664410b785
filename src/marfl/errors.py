"""Every exception marfl raises on purpose.

    MarflError
    ├── InputError           the user asked for something that cannot be done: one clear line, exit code 2
    ├── WireError            bytes that are not a message of ours (too large, truncated, unknown version, …)
    │   └── BadPayload       a well-formed message whose tensor must not be used (NaN, wrong length, wrong layout)
    ├── NetError             the network did not do what was asked
    │   ├── PeerGone         the other side refused, vanished or cannot be reached
    │   │   └── Unreachable  nobody is there: no connection can be made, or it was closed
    │   └── DeadlineExceeded nothing happened before the deadline
    ├── SyncError            no donor could give the agreed state
    └── BrokenPromise        an invariant of the protocol does not hold: a bug, never churn

Peers that come and go are not exceptions: they are named in the `Outcome` of an iteration.
"""


class MarflError(Exception):
    """The root: catch this to catch everything marfl raises on purpose."""


class InputError(MarflError):
    """Wrong input from a user: the message is one line that says what is allowed."""


class WireError(MarflError):
    """Bytes from the wire that cannot be decoded."""


class BadPayload(WireError):
    """A decoded tensor that must never reach a model."""


class NetError(MarflError):
    """The network did not do what was asked."""


class PeerGone(NetError):
    """The other side refused, vanished or cannot be reached."""


class Unreachable(PeerGone):
    """Nobody is there: no connection can be made, or it was closed in the middle of an answer."""


class DeadlineExceeded(NetError):
    """Nothing happened before the deadline."""


class SyncError(MarflError):
    """No donor could give the agreed state."""


class BrokenPromise(MarflError):
    """An invariant of the protocol does not hold."""
