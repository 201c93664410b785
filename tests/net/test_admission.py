"""Tokens of closed runs: who gets past the gate, and who does not."""

from __future__ import annotations

import pytest

pytest.importorskip("base58", reason="base58 is not installed: nothing here is tested")

from marfl.cli import main
from marfl.errors import InputError
from marfl.net.libp2p.admission import (
    DAY,
    TOKEN_BYTES,
    TokenAdmission,
    authority_of,
    new_authority,
    parse_authority,
    read_token,
    sign_token,
)
from marfl.net.libp2p.identity import new_identity

NOW = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.time = NOW

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def authority(tmp_path):
    new_authority(tmp_path / "authority.key")
    return tmp_path / "authority.key"


@pytest.fixture
def gate(authority):
    return TokenAdmission(parse_authority(authority_of(authority)), "demo", b"", Clock())


PEER, OTHER = new_identity().peer, new_identity().peer


def token(authority, run="demo", peer=PEER, days=1.0):
    return bytes.fromhex(sign_token(authority, run, peer, days, now=NOW))


def test_a_peer_with_a_token_is_admitted_until_it_expires(authority, gate):
    assert not gate.admits(PEER)
    assert gate.admit(PEER, token(authority))
    assert gate.admits(PEER)
    gate.clock.time = NOW + DAY
    assert not gate.admits(PEER)


def test_an_expired_token_is_refused(authority, gate):
    gate.clock.time = NOW + 2 * DAY
    assert not gate.admit(PEER, token(authority))


def test_a_token_that_another_peer_shows_again_is_refused(authority, gate):
    assert not gate.admit(OTHER, token(authority))
    assert not gate.admits(OTHER)


def test_a_token_of_another_run_is_refused(authority, gate):
    assert not gate.admit(PEER, token(authority, run="another"))


def test_a_token_of_another_authority_is_refused(tmp_path, gate):
    new_authority(tmp_path / "forger.key")
    assert not gate.admit(PEER, token(tmp_path / "forger.key"))


@pytest.mark.parametrize("place", range(0, TOKEN_BYTES, 8))
def test_a_token_with_one_changed_bit_is_refused(authority, gate, place):
    changed = bytearray(token(authority))
    changed[place] ^= 1
    assert not gate.admit(PEER, bytes(changed))


@pytest.mark.parametrize("junk", [b"", b"x", bytes(TOKEN_BYTES), bytes(TOKEN_BYTES - 1), b"\xff" * TOKEN_BYTES])
def test_junk_is_no_token(gate, junk):
    assert not gate.admit(PEER, junk)


def test_an_authority_is_readable_by_its_owner_alone_and_never_overwritten(authority):
    assert authority.stat().st_mode & 0o077 == 0
    before = authority.read_bytes()
    with pytest.raises(InputError, match="never overwritten"):
        new_authority(authority)
    assert authority.read_bytes() == before


def test_the_command_line_makes_an_authority_and_a_token_that_its_gate_admits(tmp_path, capsys):
    key, file = tmp_path / "a.key", tmp_path / "peer.token"
    assert main(["swarm-key", "--out", str(key)]) == 0
    gate = TokenAdmission(parse_authority(capsys.readouterr().out.strip()), "demo", b"")
    assert main(["swarm-key", "--key", str(key), "--sign", PEER, "--run", "demo", "--days", "2"]) == 0
    file.write_text(capsys.readouterr().out)
    assert gate.admit(PEER, read_token(file))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either --out"),
        (["--sign", PEER], "needs --run"),
        (["--sign", "nobody", "--run", "demo"], "not a peer's id"),
        (["--sign", PEER, "--run", "demo", "--days", "0"], "--days"),
        (["--sign", PEER, "--run", "demo", "--key", "missing.key"], "no such file"),
    ],
)
def test_wrong_input_to_swarm_key_is_one_line_and_code_2(arguments, says, authority, capsys):
    given = arguments if "--key" in arguments else [*arguments, "--key", str(authority)]
    assert main(["swarm-key", *given]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_an_authority_that_is_not_a_key_is_refused():
    with pytest.raises(InputError, match="authority"):
        parse_authority("abc")


def test_a_file_without_a_token_is_refused(tmp_path):
    (tmp_path / "t").write_text("not hex")
    with pytest.raises(InputError, match="does not hold a token"):
        read_token(tmp_path / "t")
    with pytest.raises(InputError, match="cannot be read"):
        read_token(tmp_path / "none")
