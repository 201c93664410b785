"""The real peer: the library's `Peer`, and the daemon behind `marfl peer`.

    link        the way into a swarm: keep trying, remember who was met, say who is here
    closed      the door of a closed run: only peers with a token of its authority
    steady      how a net is started, open or closed
    clock       whose clock is wrong
    terms       which settings all peers of a run must share
    voter       a participant that remembers its votes on the disk before it casts them, in the log of votes
    trainer     local updates of a `Task`, bit for bit those of the simulator
    store       the state directory
    status      a JSON page on loopback
    cast        who takes part in which iteration, when somebody else has drawn it
    course      a daemon's way through a run, whichever way its peers agree
    rounds      its iterations with votes; in paper_rounds as the paper coordinates them
    daemon      `marfl peer`
    library     `Peer` and `AsyncPeer`; their options are in options, what they return in aggregated
    account     what a private peer has given away; private: what the library's peer sends then
"""

from marfl.peer.aggregated import Aggregated
from marfl.peer.library import AsyncPeer, Peer

__all__ = ["Aggregated", "AsyncPeer", "Peer"]
