"""`marfl plan`: a program can replay its JSON, a person can read its table, and bad input is one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from marfl import cli
from marfl.errors import InputError
from marfl.plan.schedule import EXCHANGES
from marfl.secagg.graph import mask_cost
from marfl.settings import RunTerms


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(("peers", "group_size"), [(1, 2), (2, 2), (31, 2), (97, 5), (125, 5), (300, 10)])
def test_replaying_the_json_gives_every_peer_the_full_sum(capsys, peers, group_size):
    code, out, err = run(capsys, "plan", "--peers", str(peers), "--group-size", str(group_size), "--json")
    shown = json.loads(out)
    held = [1 << rank for rank in range(peers)]
    for groups in shown["rounds"]:
        for group in groups:
            total = sum(held[rank] for rank in group)  # a double count would carry into other bits
            for rank in group:
                held[rank] = total
    for spare, helper in shown["spares"]:
        held[spare] = held[helper]
    assert (code, err) == (0, "")
    assert held == [(1 << peers) - 1] * peers
    assert (shown["peers"], shown["group_size"]) == (peers, group_size)


def test_the_json_has_the_bytes_of_every_exchange_and_of_the_papers_rivals(capsys):
    _, out, _ = run(capsys, "plan", "--peers", "125", "--group-size", "5", "--model-bytes", "4000", "--json")
    shown = json.loads(out)
    assert {*EXCHANGES, "fedavg", "arfl", "rdfl"} <= shown["bytes_per_peer"].keys() == shown["bytes_total"].keys()
    assert shown["bytes_total"]["grid"] == 2 * 124 * 4000
    assert shown["bytes_per_peer"]["full"] == 12 * 4000
    assert shown["bytes_per_peer"]["arfl"] == shown["bytes_per_peer"]["rdfl"] == 124 * 4000
    assert shown["bytes_per_peer"]["fedavg"] == 2 * 4000


def test_masks_double_the_bytes_of_mar_and_name_what_they_add(capsys):
    plain, masked = (
        json.loads(run(capsys, "plan", "--peers", "125", "--group-size", "5", "--json", *more)[1])
        for more in ((), ("--masks",))
    )
    assert masked["bytes_total"]["grid"] == 2 * plain["bytes_total"]["grid"]
    assert masked["bytes_total"]["fedavg"] == plain["bytes_total"]["fedavg"]
    added = masked["masks"]
    cost = mask_cost(125, liars=RunTerms.liars).bytes_total
    assert (added["neighbours"], added["threshold"], added["bytes_total"]) == (40, 27, cost)
    assert "27 of them suffice" in run(capsys, "plan", "--peers", "125", "--group-size", "5", "--masks")[1]


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        (["--wire", "int8"], 0.56),
        (["--wire", "int4"], 0.29),
        (["--wire", "int4", "--wire-down", "8"], 0.42),
        (["--wire", "int8", "--masks"], 1.03),
        (["--wire", "int4", "--masks"], 1.03),
    ],
)
def test_small_integers_cost_what_radio_users_hope_for(capsys, flags, most):
    shown = json.loads(run(capsys, "plan", "--peers", "125", "--group-size", "5", *flags, "--json")[1])
    assert most - 0.04 < shown["bytes_per_peer"]["grid"] / shown["model_bytes"] <= most
    assert 0 < shown["bytes_down"]["grid"] < shown["bytes_total"]["grid"]
    assert shown["bytes_per_peer"]["fedavg"] < shown["bytes_per_peer"]["grid"], "it adds no partial sums up"
    assert shown["bytes_per_peer"]["arfl"] == 124 * shown["model_bytes"]


def test_the_line_of_a_small_wire_says_which_way_the_bytes_go(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("--peers", "125", "--group-size", "5", "--wire", "int4", "--wire-down", "8")
    out = run(capsys, "plan", *arguments)[1]
    assert "Integers of 4 bits" in out
    assert "of the result in 8 bits. The first iteration finds the scales\nin 32 bits: 9.5 MB per peer." in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--wire", "int3"], "must be one of fp32, fixed, int8, int4"),
        (["--wire", "int4", "--wire-down", "12"], "wire_down = 12: must be 4, 8 or 16"),
        (["--wire", "int4", "--wire-down", "2"], "at least 4"),
        (["--wire-down", "8"], "is for wire = int8 or int4, not for fp32"),
        (["--wire", "int8", "--noise-multiplier", "1"], "private runs take fixed"),
        (["--unit", "record", "--records", "500"], "privacy.unit = record: needs privacy.noise_multiplier"),
        (["--unit", "record", "--noise-multiplier", "1"], "privacy.unit = record: needs privacy.records"),
        (["--records", "500", "--noise-multiplier", "1"], "go with --unit record"),
        (["--batch", "8"], "go with --unit record"),
        (["--peers", "65537", "--wire", "int8"], "over at most 65,536; choose wire = fp32, or fewer peers"),
        (["--peers", "65537", "--masks"], "(wire = fixed) are over at most 65,536"),
    ],
)
def test_a_wire_that_there_is_not_is_one_line(capsys, flags, said):
    code, out, err = run(capsys, "plan", "--peers", "125", "--group-size", "5", *flags)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("masks", [[], ["--masks"]])
def test_private_sums_are_as_wide_as_their_noise_asks_for(capsys, masks):
    arguments = ("plan", "--peers", "125", "--group-size", "5", "--noise-multiplier", "1", *masks)
    shown = json.loads(run(capsys, *arguments, "--json")[1])
    assert shown["wire"] == {"name": "fixed", "bits_up": 32, "bits_down": 32}
    values = shown["model_bytes"] // 4 + 1  # and the clipping indicator
    assert shown["bytes_total"]["grid"] == 2 * 124 * 4 * values
    out = run(capsys, *arguments)[1]
    assert "Private integers of 32 bits" in out
    assert ("Masked: MAR's values take 4 bytes" in out) == bool(masks)


def test_the_line_of_masked_integers_names_the_width_of_their_masks(capsys):
    out = run(capsys, "plan", "--peers", "125", "--group-size", "5", "--wire", "int8", "--masks")[1]
    assert "Integers of 8 bits under masks of 16 bits: a peer sends 2.4 MB" in out
    many = ("plan", "--peers", "300", "--group-size", "5", "--wire", "int8", "--masks", "--json")
    shown = json.loads(run(capsys, *many)[1])
    assert shown["wire"] == {"name": "int8", "bits_up": 32, "bits_down": 32}, "300 · 127 does not fit 16 bits"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_table_marks_the_exchange_and_fits_an_ordinary_terminal(capsys, monkeypatch, exchange):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "plan", "--peers", "97", "--group-size", "5", "--exchange", exchange)
    assert code == 0
    assert f"> MAR {exchange}" in out
    assert out.count("> MAR") == 1
    assert "4×4×5 and 17 spares, exact after 3 rounds" in out
    assert all(name in out for name in ("FedAvg", "AR-FL", "RDFL", "80←0"))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--peers", "0", "at least 1"),
        ("--peers", "-3", "at least 1"),
        ("--peers", "many", "a whole number"),
        ("--peers", "9999999999", "at most 1000000"),
        ("--group-size", "1", "at least 2"),
        ("--group-size", "2.5", "a whole number"),
        ("--exchange", "foo", "one of grid, chunked, full"),
        ("--model-bytes", "7", "a multiple of 4"),
        ("--model-bytes", "0", "at least 4"),
        ("--model-bytes", "-4", "at least 4"),
    ],
)
def test_a_bad_value_is_one_line_with_the_flag_the_value_and_what_is_allowed(capsys, flag, value, allowed):
    options = {"--peers": "9", "--group-size": "3"} | {flag: value}
    code, out, err = run(capsys, "plan", *(word for option in options.items() for word in option))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(part in err for part in (flag, f"'{value}'", allowed))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "--peers", "9"], "--group-size"),
        (["plan", "--peers"], "--peers"),
        (["plan", "--peers", "9", "--group-size", "3", "--bogus"], "--bogus"),
        (["plan", "--peers", "9", "--group-size", "3", "stray"], "stray"),
        (["plann"], "plann"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_what_is_wrong(capsys, arguments, named):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("marfl: ")
    assert named in err


def test_version_and_help_succeed(capsys):
    assert run(capsys, "--version") == (0, "marfl 0.1.0\n", "")
    for arguments in ([], ["--help"], ["plan", "--help"]):
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
        assert "Usage: marfl" in out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(InputError("alpha = -1:\n must be positive"), 2, "marfl: alpha = -1: must be positive\n"),
     (typer.Abort(), 130, "marfl: stopped\n")],
)  # fmt: skip
def test_errors_of_any_command_end_as_one_line_and_an_exit_code(capsys, monkeypatch, error, code, line):
    def failing(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    assert run(capsys) == (code, "", line)


def test_the_installed_entry_point_reports_bad_input_without_a_traceback():
    entry = "import sys; from marfl.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", entry, "plan", "--peers", "0", "--group-size", "5"], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "marfl: Invalid value for '--peers': must be a whole number, at least 1, at most 1000000, not '0'"
    ]
