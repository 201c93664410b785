"""A process with a library peer: it averages once for every line it reads, and says what came of it as JSON.

    python library_peer.py '{"identity": …, "join": […], …}'      options of `marfl.Peer`
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # hivemind's own
    import marfl.net.libp2p.transport  # noqa: F401 - while its warnings are ignored
import torch

from marfl import Peer
from marfl.errors import MarflError

sys.path[:0] = [str(Path(__file__).parents[2] / "peer")]
from test_api import small_model, train  # noqa: E402


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = small_model(9)
    try:
        with Peer(model, **json.loads(sys.argv[1])) as peer:
            say(id=peer.id, iteration=peer.iteration)
            for turn, _ in enumerate(sys.stdin):
                train(model, turn)
                outcome = peer.aggregate()
                say(status=outcome.status, iteration=outcome.iteration, present=outcome.present)
    except MarflError as error:
        say(error=str(error))
        sys.exit(2)
