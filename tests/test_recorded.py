"""The recorded runs: a part of them is run and compared, and the comparison itself sees what it must see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marfl.errors import InputError
from marfl.testing import recorded
from marfl.testing.recorded import CASES, FILE, SHORT, Record, chosen, differences, remark, rewritten, run, unrun


@pytest.fixture
def record():
    return Record.read(FILE)


@pytest.mark.parametrize("pattern", SHORT)
def test_runs_come_out_as_recorded(record, pattern):
    now, failed = run(chosen([pattern]))
    print(remark(record, now))
    assert failed + differences(record, now) == []


def test_every_run_is_recorded_and_every_record_is_run(record):
    assert record.runs.keys() == CASES.keys()
    assert unrun(record) == []
    assert unrun(Record("", {**record.runs, "gone": record.runs["resume/exact"]})) == [
        "gone: is recorded, but no longer run"
    ]


def test_engines_masks_processes_and_real_peers_end_on_the_recorded_models_of_their_twins(record):
    for pair in (
        ("technique/mar/bitwise", "technique/mar/protocol"),
        ("technique/mar/bitwise", "exchange/chunked/protocol"),
        ("technique/mar/bitwise", "training/processes/exact"),
        ("wire/fixed/grid-bitwise", "masks/grid/protocol"),
        ("privacy/sound/bitwise", "privacy/sound/protocol"),
        ("distill/group/bitwise", "distill/group/protocol"),
        ("churn/halved/bitwise", "churn/halved/protocol"),
        ("swarm/simulated", "swarm/real"),
    ):
        assert len({record.runs[name].model for name in pair}) == 1, pair


def test_a_number_that_changes_is_one_line_with_both_values():
    old = Record("m", {"a": outcome(), "b": outcome()})
    new = Record(
        "m", {"a": outcome(messages=8, epsilons={"outsider": 1.5}), "b": outcome(model="beef"), "c": outcome()}
    )
    assert differences(old, new) == [
        "c: is not recorded",
        "a: messages was 7, is 8",
        "a: epsilons was {'outsider': 1.0}, is {'outsider': 1.5}",
        "b: model was feed, is beef",
    ]
    assert differences(old, Record("m", {"a": outcome(test_loss=2.0 + 1e-12)})) != []


def test_another_machine_may_have_other_hashes_but_not_other_bytes_or_twins():
    old = Record("here", {"a": outcome(), "b": outcome(), "c": outcome(model="cafe")})
    there = Record(
        "there", {name: outcome(model=f"0{each.model}", test_loss=2.0001) for name, each in old.runs.items()}
    )
    assert differences(old, there) == []
    assert remark(old, there).endswith("hashes are not compared, 3 of 3 differ")
    there.runs["b"] = outcome(model="0dd", bytes={"payload": 1}, test_loss=2.1)
    assert differences(old, there) == [
        "b: bytes was {'payload': 40}, is {'payload': 1}",
        "b: test_loss was 2.0, is 2.1",
        "b: ended on the model of a, now on that of b",
    ]


def test_a_record_reads_back_as_it_was_written_a_line_for_each_run(tmp_path):
    path = tmp_path / "recorded.json"
    record = Record("m", {"b": outcome(), "a": outcome(messages=None, clip=0.1)})
    record.write(path)
    assert Record.read(path) == record
    assert [line.split('"')[1] for line in path.read_text().splitlines()[1:-1]] == ["a", "b"]


def test_writing_loses_no_run_and_mixes_no_machines(tmp_path, monkeypatch):
    path = tmp_path / "recorded.json"
    monkeypatch.setattr(recorded, "CASES", dict.fromkeys("ab"))
    assert rewritten(path, Record("m", {"a": outcome()})).runs == {"a": outcome()}
    Record("m", {"a": outcome(), "b": outcome()}).write(path)
    assert rewritten(path, Record("m", {"b": outcome(messages=9)})).runs == {"a": outcome(), "b": outcome(messages=9)}
    with pytest.raises(InputError, match="of another machine"):
        rewritten(path, Record("other", {"b": outcome()}))
    monkeypatch.setattr(recorded, "CASES", {"a": None})
    with pytest.raises(InputError, match="b would get lost"):
        rewritten(path, Record("m", {"a": outcome()}))


def test_a_run_that_fails_is_a_line_and_a_name_that_matches_none_is_refused(monkeypatch):
    broken = replace(CASES["resume/exact"], settings={**CASES["resume/exact"].settings, "group_size": 1})
    monkeypatch.setitem(recorded.CASES, "resume/exact", broken)
    why = "marfl: group_size = 1: must be a whole number, at least 2"
    assert run(["resume/exact"])[1] == [f"resume/exact: fails: code 2: {why}"]
    with pytest.raises(InputError, match="--only nothing: is none of the"):
        chosen(["nothing"])


def outcome(**changed):
    plain = recorded.Outcome("feed", 3, 33, {"payload": 40}, 7, 0, 2.0, 0.0, None, {"outsider": 1.0}, None)
    return replace(plain, **changed)
