"""`marfl swarm`: real peers on one machine.

    fault_flags  whom to kill, stop or cut off, and when: what --kill, --stop and --partition say
    processes    groups of processes, their daemons and sockets
    namespaces   networks of our own, for partitions and slow links
    peers        one peer seen from outside
    run          all peers: started, watched, hurt as asked, and ended
    peer_rows    what the peers wrote, as the rows of one run
    record       the run directory: what peers read at their start, rows and the summary
"""

from marfl.peer.halts import Moment
from marfl.swarm.fault_flags import Faults, Kill, NetworkSplit, Stop, parse_kills, parse_partition, parse_stops
from marfl.swarm.run import Orders, Swarm

__all__ = [
    "Faults",
    "Kill",
    "Moment",
    "NetworkSplit",
    "Orders",
    "Stop",
    "Swarm",
    "parse_kills",
    "parse_partition",
    "parse_stops",
]
