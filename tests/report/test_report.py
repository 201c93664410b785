"""Reports: what is pooled, what a label says, what the page holds, and one clear line for what cannot be drawn."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from marfl import cli
from marfl.errors import InputError
from marfl.report import draw, without_copies
from marfl.report.figures import drawings
from marfl.report.series import accuracy_line, bytes_sent, iterations, series_of, splits_of, virtual_time
from marfl.runs import RunDir, open_run
from stages.made_up_runs import config_of, make_run, one_line, rows_of, summary_of

VOID = {"meta", "img"}


class Outline(HTMLParser):
    """What a page is made of; fails on a tag that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in {"src", "href"}]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def drawn(tmp_path: Path, *runs: Path, title: str | None = None) -> tuple[set[str], str]:
    """The names of the figures, and the page."""
    report = draw([open_run(run) for run in runs], tmp_path / "report", title=title)
    names = {path.stem for path in report.figures}
    assert {path.name for path in report.figures} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.stat().st_size for path in report.figures)
    return names, report.page.read_text()


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- what is drawn ---


def test_figures_appear_when_there_is_data_for_them(tmp_path):
    def names(*runs: Path) -> set[str]:
        series = series_of([open_run(run) for run in runs])
        return {drawing.name for drawing in drawings(series, splits_of(series))}

    bare = make_run(tmp_path / "bare", peers=8)
    always = {"accuracy-iterations", "accuracy-bytes", "accuracy-time", "bytes-techniques"}
    assert names(bare) == always
    larger = make_run(tmp_path / "larger", peers=27, split=True)
    assert names(bare, larger) == always | {"bytes-peers", "split"}
    other = make_run(tmp_path / "other", peers=9, split=True)
    assert names(larger, other) == always | {"bytes-peers", "split-1", "split-2"}


def test_a_run_killed_before_its_first_iteration_is_in_the_table_and_in_no_figure(tmp_path):
    figures, page = drawn(tmp_path, make_run(tmp_path / "killed", until=0))
    assert figures == set()
    assert "Unfinished, drawn as far as they got: killed." in page


def test_an_unfinished_run_is_drawn_as_far_as_it_got_and_marked(tmp_path):
    whole, cut = make_run(tmp_path / "whole"), make_run(tmp_path / "cut", until=12)
    series = series_of([open_run(whole), open_run(cut)])
    assert [each.label for each in series] == ["MAR", "MAR (unfinished)"]
    assert accuracy_line(series[1], iterations, positive=False).x == (5, 10)


def test_runs_that_differ_only_in_the_seed_give_their_mean_and_a_band(tmp_path):
    runs = [open_run(make_run(tmp_path / str(seed), seed=seed)) for seed in range(3)]
    (series,) = series_of(runs)
    line = accuracy_line(series, iterations, positive=False)
    curves = [[row["test_accuracy"] for row in each.rows if row["test_accuracy"] is not None] for each in runs]
    assert series.label == "MAR (mean of 3 runs)"
    assert line.x == (5, 10, 15, 20, 25, 30)
    assert line.y == pytest.approx([sum(at) / 3 for at in zip(*curves, strict=True)])
    assert line.band == (tuple(map(min, *curves)), tuple(map(max, *curves)))


def test_accuracy_lies_over_the_bytes_and_the_time_that_had_passed(tmp_path):
    (series,) = series_of([open_run(make_run(tmp_path / "run"))])
    rows = rows_of(config_of())
    tested = [row for row in rows if row["test_accuracy"] is not None]
    assert accuracy_line(series, bytes_sent, positive=True).x == tuple(row["bytes_total"] for row in tested)
    passed = [sum(row["virtual_seconds"] for row in rows[: row["iteration"]]) for row in tested]
    assert accuracy_line(series, virtual_time, positive=True).x == pytest.approx(passed)


def test_labels_name_what_differs_once_and_nothing_else(tmp_path):
    settings = [
        {},
        {"semantics": "paper", "exchange": "full", "plan": "keys"},  # the exchange follows from the semantics here
        {"technique": "fedavg", "churn": {"participation": 0.5}},
        {"technique": "fedavg", "churn": {"participation": 1.0}},
    ]
    runs = [open_run(make_run(tmp_path / str(index), **each)) for index, each in enumerate(settings)]
    assert [each.label for each in series_of(runs)] == [
        "MAR · exact · participation 1.0",
        "MAR · paper · participation 1.0",
        "FedAvg · exact · participation 0.5",
        "FedAvg · exact · participation 1.0",
    ]
    assert [each.label for each in series_of(runs[:1])] == ["MAR"]


def test_an_exchange_is_named_for_mar_alone(tmp_path):
    settings = [{"exchange": "grid"}, {"exchange": "full"}, {"technique": "fedavg"}]
    runs = [open_run(make_run(tmp_path / str(index), **each)) for index, each in enumerate(settings)]
    assert [each.label for each in series_of(runs)] == ["MAR · grid", "MAR · full", "FedAvg"]


def test_series_come_by_technique_then_by_peers_whatever_the_order_given(tmp_path):
    cases = [("rdfl", 9), ("mar", 100), ("fedavg", 9), ("mar", 9)]
    runs = [open_run(make_run(tmp_path / f"{name}{peers}", technique=name, peers=peers)) for name, peers in cases]
    found = [(each.technique, each.facts[0].peers) for each in series_of(runs)]
    assert found == [("mar", 9), ("mar", 100), ("fedavg", 9), ("rdfl", 9)]


# --- the page ---


def test_the_page_holds_everything_and_loads_nothing(tmp_path):
    runs = [make_run(tmp_path / name, technique=name, split=True) for name in ("mar", "fedavg")]
    figures, page = drawn(tmp_path, *runs)
    outline = Outline(page)
    assert len(outline.images) == len(figures) == 5
    assert all(link.startswith("data:image/svg+xml;base64,") for link in outline.links)
    assert "http" not in page
    assert "<script" not in page
    assert all(image["alt"] for image in outline.images)
    assert 'name="viewport"' in page
    assert "color-scheme: light dark" in page


def test_the_table_says_what_came_out(tmp_path):
    rows = rows_of(config_of())
    texts = Outline(drawn(tmp_path, make_run(tmp_path / "first"))[1]).texts
    assert {"first", "MAR", "exact", "grid", "125", "30", "finished"} <= {*texts}
    assert {f"{rows[-1]['test_accuracy']:.2%}", "29.9 MB", "2", "00000000"} <= {*texts}
    assert "187.5 kB" in texts  # control, of all peers and iterations


def test_the_tables_say_how_wide_values_were_and_what_went_back(tmp_path):
    config = config_of(wire="int4")
    rows = [{**row, "bits_up": 4, "bits_down": 8, "payload_down": 1000} for row in rows_of(config)]
    with RunDir.create(tmp_path / "few", config) as made:
        for row in rows:
            made.append_row(row)
        made.write_summary(summary_of(config, rows, wire="int4"))
    texts = Outline(drawn(tmp_path, tmp_path / "few")[1]).texts
    assert {"wire", "int4: 4 bits, 8 back", "payload back", "30.0 kB"} <= {*texts}
    before = Outline(drawn(tmp_path, make_run(tmp_path / "before"))[1]).texts
    assert not {"payload back"} & {*before}, "runs of earlier versions do not say"


def first_table(page: str) -> list[list[str]]:
    """Heads and rows, without the colours."""
    table = page.split("<table>")[1].split("</table>")[0]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)[1:] for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_the_page_begins_with_a_table_of_what_differs_seeds_pooled_with_their_range(tmp_path):
    runs = [
        make_run(tmp_path / f"{share}-{seed}", seed=seed, churn={"participation": share})
        for share in (0.5, 1.0)
        for seed in (0, 1, 2)
    ]
    page = drawn(tmp_path, *runs)[1]
    heads, *rows = first_table(page)
    assert heads[:2] == ["participation", "final accuracy"]
    assert (heads[-1], [row[-1] for row in rows]) == ("seeds", ["0–2"] * 2)
    assert [row[0] for row in rows] == ["0.5", "1.0"]
    assert re.fullmatch(r"[\d.]+% \([\d.]+% to [\d.]+%\)", rows[0][1])
    assert "iterations" not in heads, "all have the same"
    assert page.index("<table>") < page.index("<figure>")
    assert "All runs: task" in page
    assert "disagreement" not in heads
    sent, curves = (re.findall(rf"{start}[^<]*", page) for start in ("Bytes that all peers send", "Test accuracy over"))
    assert sent
    assert all("a grey line from the lowest to the highest" in caption for caption in sent)
    assert curves
    assert all("a band from the lowest to the highest" in caption for caption in curves)


def test_the_same_run_in_two_directories_weighs_once(tmp_path, capsys):
    runs = [make_run(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1), ("again", 0))]
    assert cli.main(["report", *map(str, runs), "--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert f"{runs[2]}: the same run as {runs[0]}, counted once" in said
    assert "2 runs" in said
    page = (tmp_path / "report" / "index.html").read_text()
    heads, row = first_table(page)
    assert (heads[-1], row[-1]) == ("seeds", "0, 1")


def test_runs_that_ended_on_other_models_are_no_copies(tmp_path):
    one, other = (open_run(make_run(tmp_path / name)) for name in ("one", "other"))
    changed = replace(other, summary=replace(other.summary, model_hash="ff" * 32))
    assert without_copies([one, changed]) == ([one, changed], [])
    under_way = replace(other, summary=None)
    assert without_copies([one, under_way, under_way])[1] == []


def test_beside_the_page_lies_a_csv_with_a_line_for_each_run_and_all_settings(tmp_path):
    runs = [make_run(tmp_path / name, technique=name) for name in ("mar", "fedavg")]
    drawn(tmp_path, *runs)
    with (tmp_path / "report" / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["run"] for line in lines] == ["mar", "fedavg"]
    assert lines[0]["setting.peers"] == "125"
    assert int(lines[0]["bytes_payload"]) == 30 * 992_000


def test_texts_from_runs_and_titles_are_escaped(tmp_path):
    path = make_run(tmp_path / "<b>bold", until=5, task="<script>alert(1)</script>")
    page = drawn(tmp_path, path, title='<img src="http://evil">')[1]
    assert "<script>" not in page
    assert "<b>bold" not in page
    assert '<img src="http' not in page
    assert "&lt;img src=" in page
    Outline(page)


def test_the_same_runs_give_the_same_bytes(tmp_path):
    runs = [open_run(make_run(tmp_path / "run", split=True))]
    first, second = draw(runs, tmp_path / "first"), draw(runs, tmp_path / "second")
    for one, other in zip([first.page, *first.figures], [second.page, *second.figures], strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_files_of_others_in_the_output_directory_stay(tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "notes.txt").write_text("keep me")
    drawn(tmp_path, make_run(tmp_path / "run", until=0))
    assert (tmp_path / "report" / "notes.txt").read_text() == "keep me"


# --- the command ---


def test_the_command_takes_a_directory_of_runs_and_says_where_the_page_is(tmp_path, capsys):
    for name in ("mar", "fedavg"):
        make_run(tmp_path / "runs" / name, technique=name)
    make_run(tmp_path / "runs" / "cut", until=3, technique="rdfl")
    code, out, err = run(capsys, "report", tmp_path / "runs", "--out", tmp_path / "out", "--title", "Three of them")
    assert (code, err) == (0, "")
    assert "cut: unfinished, drawn as far as it got (3 iterations)" in out
    assert f"{tmp_path / 'out' / 'index.html'}: 3 runs, 4 figures" in out
    assert "<title>Three of them</title>" in (tmp_path / "out" / "index.html").read_text()


def test_a_run_named_twice_is_drawn_once_and_json_is_for_programs(tmp_path, capsys):
    make_run(tmp_path / "runs" / "mar")
    twice = [tmp_path / "runs", tmp_path / "runs" / "mar"]
    code, out, _ = run(capsys, "report", *twice, "--out", tmp_path / "out", "--json")
    shown = json.loads(out)
    assert code == 0
    assert [each["run"] for each in shown["runs"]] == ["mar"]
    assert shown["runs"][0]["bytes_by_kind"]["payload"] == 30 * 992_000
    assert all(Path(path).is_file() for path in [shown["page"], *shown["figures"]])


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("metrics.jsonl", '{"iteration": 7', "(", "metrics.jsonl, line 7: is not valid JSON"),
        ("summary.json", '"final_accuracy": 0', '"final_accuracy": 1', "final_accuracy is 1."),
        ("config.toml", "peers = 125", "peers = 64", "of other settings than config.toml has"),
    ],
)
def test_a_run_edited_by_hand_is_one_line_and_nothing_is_drawn(tmp_path, capsys, name, old, new, problem):
    file = make_run(tmp_path / "run") / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    code, out, err = run(capsys, "report", tmp_path / "run", "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert problem in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["technique = 7", 'peers = "many"', "peers = -3", ""])
def test_an_unfinished_run_whose_settings_were_edited_is_one_line(tmp_path, capsys, line):
    file = make_run(tmp_path / "run", until=5) / "config.toml"
    name = line.split(" ")[0] or "technique"
    kept = [each for each in file.read_text().splitlines() if not each.startswith(f"{name} =")]
    file.write_text("\n".join([line, *kept]))
    code, _, err = run(capsys, "report", tmp_path / "run", "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "config.toml: " in err
    assert name in err


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path, problem in (("missing", "there is no such run directory"), ("empty", "is not a run directory")):
        code, out, err = run(capsys, "report", tmp_path / path, "--out", tmp_path / "out")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert problem in err


def test_an_output_directory_that_cannot_be_written_is_one_line(tmp_path, capsys):
    make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "report", tmp_path / "run", "--out", tmp_path / "file")
    assert (code, err.count("\n")) == (2, 1)
    assert "file: cannot be written (File exists)" in err


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "marfl.report.figures"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError) as error:
        draw([open_run(make_run(tmp_path / "run"))], tmp_path / "out")
    assert "matplotlib" in one_line(error)
    assert "pip install 'marfl[plots]'" in one_line(error)
    assert not (tmp_path / "out").exists()


def test_a_report_needs_a_run(tmp_path):
    with pytest.raises(InputError, match="there is no run to draw"):
        draw([], tmp_path / "out")


def test_the_page_says_of_a_private_run_what_its_privacy_is_worth_less_for(tmp_path):
    config = config_of()
    rows, warning = rows_of(config), "delta = 0.02 is above 0.01: so often nothing at all may be hidden"
    with RunDir.create(tmp_path / "first", config) as run:
        for row in rows:
            run.append_row(row)
        run.write_summary(summary_of(config, rows, privacy={"mode": "sound", "warnings": [warning]}))
    assert f"{warning} ({len(rows)} ×)" in Outline(drawn(tmp_path, tmp_path / "first")[1]).texts


def test_the_page_says_which_way_the_engine_took_and_what_the_checks_found(tmp_path):
    found, config = "peer 3: its update is not finite, so it abstains", config_of()
    rows = [row | {"checks": [found] if row["iteration"] < 3 else []} for row in rows_of(config)]
    with RunDir.create(tmp_path / "first", config) as run:
        for row in rows:
            run.append_row(row)
        run.write_summary(summary_of(config, rows, engine="fast", engine_reason="one pooled batch"))
    texts = Outline(drawn(tmp_path, tmp_path / "first")[1]).texts
    assert {"fast", "one pooled batch", f"{found} (2 ×)"} <= {*texts}
