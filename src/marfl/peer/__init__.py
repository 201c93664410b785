"""The real peer: the library's `Peer`, and the daemon behind `marfl peer`.

    api              `Peer` and `AsyncPeer`, and what they return (`Aggregated`); their options are in options
    daemon           `marfl peer`: the life of a peer, and its status page
    logs             a daemon's log, as lines or as JSON
    loop             a daemon's iterations with votes; in paper_loop as the paper coordinates them
    halts            moments at which a daemon stops itself, to be hit by those who test
    trainer          local updates of a `Task`, bit for bit those of the simulator
    discovery        the way into a swarm: keep trying, remember who was met, say who is here, compare clocks
    about            what a peer says of itself to whoever asks, and a run as a guest sees it
    checkup          what may keep a peer from taking part, looked for before it tries; the network in checkup_network
    compatibility    which settings all peers of a run must share, and that they train the same model
    voter            a participant that remembers its votes on the disk before it casts them
    state_dir        what is on the disk: the state directory, and the log of votes beside the key
    narrator         what a peer says while it works: who is waited for, what came of it
    prometheus       its numbers for a monitor
    privacy_ledger   what a private peer has given away, and what the library's peer sends then
    record_privacy   what it sends where single records are hidden: `RecordData`, the data and the loss of one
"""
