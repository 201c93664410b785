"""A setting is written once: flags, `--set`, the library's signatures and the docs say what its field says."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field

import marfl
from marfl.cli import app, main
from marfl.commands import flags
from marfl.config import Config, load
from marfl.errors import InputError
from marfl.peer.options import PeerOptions
from marfl.protocol.protocol_settings import Settings
from marfl.schema import Checked, Setting, settings_of, validated
from marfl.settings import Churn, Joining, Network, Optimizer, Patience, Privacy, Reach, RunTerms, Sessions

TINY = ("--task", "synthetic", "--option", "samples=200", "--peers", "4", "--iterations", "1")
COMMANDS = {  # what each command that takes `--set` needs besides
    "simulate": TINY,
    "swarm": TINY,
    "peer": ("--index", "0", "--of", "2"),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses its input."""
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    return error


# --- every class of settings ---


@pytest.mark.parametrize("model", [Config, Network, PeerOptions, RunTerms, Joining])
def test_every_setting_has_a_help_and_a_default_that_it_allows(model: type) -> None:
    for name, setting in settings_of(model).items():
        assert setting.help, f"{name} has no help"
        assert not setting.help.endswith("."), f"{name}: a help is a phrase"
        if name not in ("churn.sessions.up", "churn.sessions.down"):  # only whoever asks for sessions has any
            setting.check(setting.default)


def test_the_same_name_means_the_same_wherever_it_stands() -> None:
    seen: dict[str, Setting] = {}
    for model in (Config, Network, PeerOptions):
        for name, setting in settings_of(model).items():
            same = seen.setdefault(name, setting)
            if name in ("exchange", "wire", "privacy", "strategy"):
                continue  # a config's depend on its semantics, and a peer has its privacy and its strategy as one thing
            assert (same.default, same.allowed, same.help) == (setting.default, setting.allowed, setting.help), name


def test_virtual_peers_differ_from_real_ones_in_three_times_and_have_no_slowest_link() -> None:
    real, virtual = asdict(Network()), asdict(Settings())
    differ = {name for name in asdict(Patience()) if real[name] != virtual[name]}
    assert differ == {"ready_timeout", "call_timeout", "phase_timeout", "slowest_link"}
    assert virtual["slowest_link"] == float("inf")
    differ.remove("slowest_link")
    assert all(virtual[name] < real[name] for name in differ)


def test_a_network_table_is_the_patience_and_the_reach_and_two_of_its_own() -> None:
    names = {field.name for field in fields(Network)}
    assert Network().patience() == asdict(Patience())
    assert Network().reach() == asdict(Reach())
    assert names - asdict(Patience()).keys() - asdict(Reach()).keys() == {"start_timeout", "refresh"}


@dataclass(frozen=True)
class Example(Checked):
    """A class of settings for these tests."""

    share: Annotated[float, Field(gt=0, le=1, description="a share")] = 0.5
    names: Annotated[tuple[str, ...], Field(description="some names")] = ()
    much: Annotated[float, Field(lt=2**62, allow_inf_nan=False)] = 1.0
    inner: Sessions | None = None


def test_a_setting_says_what_it_allows_and_parses_a_text() -> None:
    settings = settings_of(Example)
    assert list(settings) == ["share", "names", "much", "inner.up", "inner.down"]
    assert settings["share"].allowed == "a number, above 0, at most 1"
    assert settings["much"].allowed == "a finite number, below 2**62"
    assert (settings["share"].parse("0.25"), settings["names"].parse("a,b")) == (0.25, ("a", "b"))
    with pytest.raises(ValueError):
        settings["share"].parse("2")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Example(share=2), "share = 2: must be a number, above 0, at most 1"),
        (lambda: Example(much=float("inf")), "much = inf: must be a finite number, below 2**62"),
        (lambda: Example(names=(1,)), "names = (1,): must be a list of texts"),  # type: ignore[arg-type]
        (lambda: validated(Example, {"shore": 1}), "config: shore is not a setting; did you mean share?"),
        (lambda: validated(Example, {"inner": {"up": 1}}), "config: inner.down is missing; must be a finite number"),
        (lambda: validated(Example, {"inner": 1}), "inner = 1: must be a table"),
        (lambda: validated(Example, {"names": [1]}), "names.0 = 1: must be a list of texts"),
        (lambda: validated(Example, {"share": "x"}, "table."), "table.share = 'x': must be a number, above 0"),
    ],
)
def test_a_wrong_value_is_one_line_with_what_is_allowed(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(says)


# --- the command line ---


def parameters(command: str) -> dict[str, Any]:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {flag: parameter for parameter in commands[command].params for flag in parameter.opts}


@pytest.mark.parametrize("command", ["simulate", "swarm", "peer"])
def test_a_flag_has_the_type_the_default_and_the_help_of_its_setting(command: str) -> None:
    found = parameters(command)
    flag_of = {"peers": "--of" if command == "peer" else "--peers", "optimizer.learning_rate": "--learning-rate",
               "distill.iterations": "--distill", "privacy.mode": "--privacy"}  # fmt: skip
    for name, flag in flag_of.items():
        setting = settings_of(Config)[name]
        assert setting.help.lower() in found[flag].help.lower()
        assert setting.range in found[flag].help
        assert found[flag].show_default == (str(setting.default) if setting.default is not None else False)
        assert found[flag].default is None, "what is not typed is the file's to say"
    assert found["--privacy"].metavar == "NAME", "its choices are too long to stand beside it"
    assert all(choice in found["--privacy"].help for choice in ("off", "sound", "paper"))
    assert "--set" in found


@pytest.mark.parametrize("name", flags.LEARNING + flags.OF_MANY)
def test_every_flag_names_a_setting(name: str) -> None:
    assert name == "churn.sessions" or name in settings_of(Config)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("partcipation=0.5", "partcipation is not a setting; did you mean churn.participation?"),
        ("optimizer.learning_rat=1", "optimizer.learning_rat is not a setting; did you mean optimizer.learning_rate?"),
        ("zzz=1", "zzz is not a setting; docs/config.md lists them all"),
        ("optimizer.decay=much", "optimizer.decay must be a number, at least 0, below 1"),
        ("optimizer.decay=1.5", "optimizer.decay must be a number, at least 0, below 1"),
        ("batch=0", "batch must be a whole number, at least 1"),
        ("engine=warp", "engine must be one of bitwise, fast, protocol"),
        ("task_options=3", "task_options must be a table"),
        ("batch", "must be name=value"),
        ("=3", "must be name=value"),
    ],
)
def test_set_refuses_what_cannot_be(
    command: str, pair: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, command, *COMMANDS[command], "--set", pair) == f"marfl: --set {pair}: {says}\n"


@pytest.mark.parametrize("command", ["swarm", "peer"])
@pytest.mark.parametrize("how", [("--network", "phase_timeout=-1"), ("--set", "network.phase_timeout=-1")])
def test_set_takes_the_settings_of_the_network_where_peers_are_real(
    command: str, how: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, command, *COMMANDS[command], *how)
    assert said == f"marfl: {how[0]} {how[1]}: network.phase_timeout must be a number, above 0\n"


def test_set_of_the_network_is_refused_where_no_peer_is_real(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "simulate", *TINY, "--set", "network.phase_timeout=1")
    assert "network.phase_timeout is not a setting" in said


def test_set_reaches_the_run_and_wins_over_the_flag_the_file_and_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "config.toml", tmp_path / "run"
    file.write_text("batch = 8\n[optimizer]\ndecay = 0.7\n")
    sets = ("--set", "optimizer.decay=0.5", "--set", "seed=3", "--set", "task_options.classes=3", "--set", "seed=4")
    assert main(["simulate", "--config", str(file), *TINY, "--seed", "1", *sets, "--out", str(out)]) == 0
    capsys.readouterr()
    ran = load(path=out / "config.toml")
    assert (ran.optimizer.decay, ran.batch, ran.seed) == (0.5, 8, 4)
    assert ran.task_options == {"samples": 200, "classes": 3}


def test_what_is_given_to_a_command_is_what_was_typed_and_nothing_else() -> None:
    seen: list[dict[str, Any]] = []

    @flags.takes_settings("peers", "privacy.masks", "churn.sessions", "churn.trace", network=True)
    def command(given: flags.Given, other: int = 7) -> None:
        seen.append(given | {"other": other})

    small = typer.Typer()
    small.command()(command)
    small(["--peers", "3", "--masks", "--sessions", "20,5", "--network", "poll=1", "--set", "network.relay=yes",
           "--privacy-setting", "clip=2"], standalone_mode=False)  # fmt: skip
    small(["--other", "8", "--set", "network.announce=/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.5/tcp/1"], standalone_mode=False)
    assert seen == [
        {"peers": 3, "privacy.masks": True, "churn.sessions": {"up": 20.0, "down": 5.0}, "privacy.clip": 2.0,
         "network.poll": 1.0, "network.relay": True, "other": 7},
        {"network.announce": ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.5/tcp/1"), "other": 8},
    ]  # fmt: skip


# --- the library ---


def signature_of(function: Callable[..., Any], but: set[str]) -> dict[str, Any]:
    """The defaults of all arguments except these."""
    found = inspect.signature(function).parameters
    return {name: argument.default for name, argument in found.items() if name not in but}


def documented(function: Any) -> dict[str, str]:
    """What a docstring says about each argument."""
    lines = inspect.getdoc(function).split("Args:\n")[1].splitlines()  # type: ignore[union-attr]
    text = "\n".join(lines).replace("\n        ", " ")
    return dict(re.findall(r"^    (\w+): (.*)$", text, re.MULTILINE))


def options_of_a_peer() -> Iterator[tuple[str, Setting]]:
    for name, setting in {**settings_of(PeerOptions), **settings_of(Network)}.items():
        if not name.startswith("network."):
            yield name, setting


@pytest.mark.parametrize("peer", [marfl.Peer, marfl.AsyncPeer])
def test_a_peer_has_the_options_the_defaults_and_the_help_of_its_settings(peer: type) -> None:
    expected = dict(options_of_a_peer())
    assert signature_of(peer, but={"model", "reset"}) == {name: each.default for name, each in expected.items()}
    said = documented(peer.__init__)  # type: ignore[misc]
    assert {name: said.get(name) for name in expected} == {name: each.help for name, each in expected.items()}
    assert {"model", "reset"} == said.keys() - expected.keys()


def test_simulate_has_the_settings_the_defaults_and_the_help_of_a_config() -> None:
    defaults = {name: getattr(Config(), name) for name in Config.model_fields}
    assert signature_of(marfl.simulate, but={"config", "on_row"}) == defaults
    said = documented(marfl.simulate)
    plain = {name: each.help for name, each in settings_of(Config).items() if "." not in name}
    assert {name: said.get(name) for name in plain} == plain
    assert said.keys() == defaults.keys() | {"config", "on_row"}


def test_simulate_takes_settings_by_name_or_a_config_and_not_both() -> None:
    rows: list[Any] = []
    small = {"task_options": {"samples": 200}, "peers": 4, "iterations": 2}
    by_name = marfl.simulate(on_row=rows.append, task="synthetic", optimizer=Optimizer(learning_rate=0.5), **small)
    config = load(overrides={"task": "synthetic", "optimizer.learning_rate": 0.5, **small})
    assert by_name["model_hash"] == marfl.simulate(config)["model_hash"]
    assert len(rows) == 2
    with pytest.raises(InputError, match="simulate: peers beside a config"):
        marfl.simulate(config, peers=16)
    with pytest.raises(InputError, match="peers = 0: must be a whole number, at least 1"):
        marfl.simulate(peers=0)


def test_a_peer_takes_its_privacy_as_settings_or_as_a_table(tmp_path: Path) -> None:
    table = {"noise_multiplier": 1.0, "shares": 16}
    made = [PeerOptions.of(privacy=given, state_dir=tmp_path) for given in (table, Privacy(**table))]  # type: ignore[arg-type]
    assert made[0] == made[1]


def test_an_unknown_option_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        marfl.Peer(None, nonsense=1)  # type: ignore[arg-type, call-arg]


def test_the_examples_import_nothing_from_inner_modules() -> None:
    for path in (Path(__file__).parents[1] / "examples").glob("*.py"):
        inner = r"^\s*(?:from|import) marfl\.(?!integrations)\S+"
        assert re.findall(inner, path.read_text(), re.MULTILINE) == [], path.name


def test_settings_survive_a_config_file(tmp_path: Path) -> None:
    config = load(overrides={"churn.sessions": {"up": 2, "down": 1}, "churn.dropout": 0.2, "privacy.masks": True})
    assert config.churn == Churn(dropout=0.2, sessions=Sessions(2, 1))
    assert Config.model_validate(json.loads(json.dumps(config.as_dict()))).resolved() == config
