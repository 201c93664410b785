"""`Net` over real sockets (libp2p), and who may speak there. hivemind is imported in this package alone.

    transport    `Libp2pNet`: messages, questions and DHT records of one real peer
    p2pd         the go-libp2p daemon behind it: its process, its control messages, its addresses
    streams      streams to other peers and from them, kept open; frames: what goes over one
    inbox        messages that arrived before anybody asked for them
    records      DHT records that their owner signed
    admission    who may speak: everybody, or the holders of a run's tokens
    identity     a peer's key is its name
    connection   where a peer listens, how it gets through routers, and what others may cost it
    cleanup      nothing outlives its peer: neither the daemon nor its files

Only `transport`, `p2pd` and `records` import hivemind, which takes a second.
"""
