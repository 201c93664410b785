"""The callbacks in trainings of the real libraries, each in a process of its own and seeded as they seed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import Any, Self

import pytest

from stages.processes import PROGRAMS

pytest.importorskip("hivemind", reason="hivemind is not installed: no real peer can be tested")
LIMIT = 240  # seconds: then a hanging process is ended, and its test fails
QUICK: dict[str, Any] = {"run": "test", "ready_timeout": 40.0, "join_patience": 60.0}
NEEDS = {"transformers": ("transformers", "accelerate"), "lightning": ("lightning",)}


class Training:
    """One training in a process of its own."""

    def __init__(self, kind: str, *, options: dict[str, Any], **told: Any) -> None:
        told = {"seed": 42, "steps": 12, "every": 2, "options": QUICK | options} | told
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        command = ["timeout", "--signal=KILL", str(LIMIT), sys.executable, PROGRAMS / "trained_peer.py", kind]
        self.popen = subprocess.Popen(
            [*command, json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            start_new_session=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.communicate()
        self._said.close()

    def hear(self) -> dict[str, Any]:
        """Its next word; other lines are the libraries' own."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith("{") and line.endswith("}\n") and line[1] == '"':
                return json.loads(line)
        self._said.seek(0)
        pytest.fail(f"it said nothing more, but:\n{self._said.read()}")

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_trainings_with_one_seed_meet_a_late_one_takes_step_and_schedule_and_who_stops_early_says_goodbye(kind: str):
    missing = [name for name in NEEDS[kind] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: the callback for {kind} is not tested")
    with ExitStack() as stack:
        options = {"expected": 2}
        one = stack.enter_context(Training(kind, gate=4, saves=kind == "transformers", options=options))
        first = one.hear()
        join = {"join": first["addresses"]}
        two = stack.enter_context(Training(kind, gate=4, stop=10, options=options | join))
        assert two.hear()["id"] != first["id"], "they took the same seed"
        assert [training.hear()["at"] for training in (one, two)] == [4, 4]
        late = stack.enter_context(Training(kind, options=join))
        begun = late.hear()
        assert (begun["step"], begun["iteration"]) == (4, 2)
        one.go()
        two.go()
        ends = [training.hear() for training in (one, two, late)]
        assert [end["step"] for end in ends] == [12, 10, 12]
        assert [outcome[1:] for outcome in ends[0]["outcomes"][:2]] == [["committed", 2]] * 2
        numbers, statuses, averaged = zip(*ends[0]["outcomes"], strict=True)
        assert numbers == (1, 2, 3, 4, 5, 6), "gradients are accumulated: a step is two batches"
        assert set(statuses) == {"committed"}
        assert max(averaged[2:5]) == 3, "the late one counts; when it is slow, in a later average"
        assert averaged[5] <= 2, "one has stopped early"
        assert ends[2]["outcomes"][-1][0] == 6
        assert ends[0]["hash"] == ends[2]["hash"]
        assert ends[0]["saved"] == ends[1]["saved"]
        assert ends[0]["rate"] == pytest.approx(ends[2]["rate"])
        assert ends[0]["logged"][-1] == 2
        if kind == "transformers":
            assert ends[0]["kept"] == ends[0]["saved"], "what is saved after an average is the average"
        assert [training.popen.wait(60) for training in (one, two, late)] == [0, 0, 0]
