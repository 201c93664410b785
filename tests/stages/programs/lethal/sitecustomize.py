"""In the environment of a test swarm: one real peer kills itself with SIGKILL at an exact point of the protocol.

`MARFL_TEST_DEATH` is index:iteration:phase. Python imports this module by itself when its folder is on the path.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(phase: str, iteration: int) -> None:
    """Replace the function in which the phase begins (or, for "reduce", in which its first message has left)."""
    from marfl.protocol import masked_rounds as rounds
    from marfl.protocol.attempt import Attempt, Outgoing
    from marfl.protocol.masked_rounds import MaskedRounds
    from marfl.protocol.member import Verdicts
    from marfl.protocol.voting import Voting

    answers: dict[str, tuple[Any, str]] = {
        "voting": (Voting, "answer_propose"), "revealing": (MaskedRounds, "answer_reveal"),
    }  # fmt: skip
    calls = {"shares": (rounds, "_hand_over"), "before the first value": (rounds, "combined"),
             "after the sum": (MaskedRounds, "unmasked"), "finishing": (Verdicts, "report")}  # fmt: skip
    if phase in answers:
        owner, name = answers[phase]
        answer = getattr(owner, name)

        async def lethal_answer(self: Any, sender: Any, request: Any) -> Any:
            if self.standing.record.iteration + 1 == iteration:
                die()
            return await answer(self, sender, request)

        setattr(owner, name, lethal_answer)
    elif phase in calls:
        module, name = calls[phase]
        work = getattr(module, name)

        async def lethal(*arguments: Any, **options: Any) -> Any:
            found = [getattr(getattr(a, "roster", a), "iteration", None) for a in arguments]
            if iteration in found:
                die()
            return await work(*arguments, **options)

        setattr(module, name, lethal)
    else:
        send = Attempt._send

        async def lethal_send(self: Attempt, out: Outgoing, deadline: float) -> None:
            now = out.tag.channel == phase and self.roster.iteration == iteration
            if now and phase == "gather":
                die()
            await send(self, out, deadline)
            if now:
                die()

        Attempt._send = lethal_send  # type: ignore[method-assign]


death = os.environ.get("MARFL_TEST_DEATH")
if death and "peer" in sys.orig_argv and "--index" in sys.orig_argv:
    index, when, what = death.split(":")
    if sys.orig_argv[sys.orig_argv.index("--index") + 1] == index:
        arm(what, int(when))
