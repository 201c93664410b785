"""The figures: colours that everybody can tell apart, labelled axes, and nothing that hides anything else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from marfl.report.figures import Drawing, byte_ticks, coinciding, drawings, plot, time_ticks, widths_of
from marfl.report.series import LOOKS, OTHER_COLOUR, OURS, Line, colours_of, growth_lines, look_of, series_of
from marfl.runs import Split, open_run
from stages.made_up_runs import make_run

# Machado, Oliveira and Fernandes 2009, severity 1.0: what remains of linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deuteranopia": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "tritanopia": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = XYZ.sum(axis=1)
SAME_MODEL = ("mar", "fedavg", "arfl", "rdfl", "ring", "butterfly")


def linear(colour: str) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB, in which distances are about as large as they look."""
    ratio = XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def figures_of(tmp_path: Path, *settings: dict, splits: Sequence[tuple[str, Split]] = ()) -> dict[str, Drawing]:
    paths = [make_run(tmp_path / str(index), **each) for index, each in enumerate(settings)]
    return {each.name: each for each in drawings(series_of([open_run(path) for path in paths]), splits)}


def pixels_of(drawing: Drawing, colour: str) -> int:
    """How many pixels of the axes have exactly this colour."""
    image = imread(io.BytesIO(drawing.rendered("png")), format="png")[..., :3]
    box = drawing.figure.axes[0].get_position()
    height, width = image.shape[:2]
    inside = image[int((1 - box.y1) * height) : int((1 - box.y0) * height), int(box.x0 * width) : int(box.x1 * width)]
    return int((np.abs(inside - np.array(to_rgb(colour))).max(axis=-1) < 0.01).sum())


# --- colours ---


@pytest.mark.parametrize("sight", SIGHT)
def test_no_two_techniques_look_alike_to_anybody(sight):
    seen = {name: lab(SIGHT[sight] @ linear(look.colour)) for name, look in (LOOKS | {"ours": OURS}).items()}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)


def test_every_technique_has_a_look_of_its_own_and_strangers_keep_their_name():
    assert set(LOOKS) == {*SAME_MODEL, "saps", "braintorrent", "gossip"}
    assert len({look.colour for look in LOOKS.values()}) == len({look.marker for look in LOOKS.values()}) == 9
    assert look_of("mine")[:2] == ("mine", OTHER_COLOUR)


def test_a_setting_has_the_same_colour_in_every_figure_and_no_other_has_it(tmp_path):
    names = ("rdfl", "mar", "fedavg")
    settings = [{"technique": name, "peers": peers} for name in names for peers in (16, 64)]
    found = figures_of(tmp_path, *settings)
    colours: dict[str, str] = {}
    for figure in ("accuracy-iterations", "accuracy-bytes", "accuracy-time"):
        for line in found[figure].figure.axes[0].lines:
            assert colours.setdefault(line.get_label(), line.get_color()) == line.get_color(), figure
    assert len(set(colours.values())) == 6, "two settings of one technique are told apart by colour"
    for name in names:
        (first, *_) = [colour for label, colour in colours.items() if label.startswith(LOOKS[name].name)]
        assert first == LOOKS[name].colour
        growth = found["bytes-peers"].figure.axes[0].lines
        assert {x.get_color() for x in growth if x.get_label().startswith(LOOKS[name].name)} == {LOOKS[name].colour}


def test_when_there_are_more_settings_than_colours_they_come_again():
    found = colours_of([look_of("mar")] * 12 + [look_of("fedavg")])
    assert len(set(found)) == len(LOOKS) + 1
    assert (found[0], found[-1]) == (LOOKS["mar"].colour, LOOKS["fedavg"].colour)
    assert colours_of([look_of("mar"), look_of("mine")])[1] == OTHER_COLOUR


def test_what_techniques_send_is_bars_from_zero_or_dots_on_a_log_axis(tmp_path):
    near, far = (
        figures_of(tmp_path / other, {"technique": "mar"}, {"technique": other})["bytes-techniques"].figure.axes[0]
        for other in ("fedavg", "rdfl")
    )
    assert (near.get_xscale(), near.get_xlim()[0], len(near.patches)) == ("linear", 0.0, 2)
    assert (far.get_xscale(), len(far.patches), len(far.lines)) == ("log", 0, 2)
    bars = [to_rgb(bar.get_facecolor()) for bar in near.patches]
    assert bars == [to_rgb(LOOKS[name].colour) for name in ("mar", "fedavg")]


# --- nothing hidden ---


def test_techniques_that_give_the_same_model_are_all_visible(tmp_path):
    drawing = figures_of(tmp_path, *({"technique": name} for name in SAME_MODEL))["accuracy-iterations"]
    for name in SAME_MODEL:
        assert pixels_of(drawing, LOOKS[name].colour) > 150, name
    assert "one inside the other: MAR, FedAvg, AR-FL, RDFL, ring all-reduce, butterfly." in drawing.caption


def line(*points: tuple[float, float]) -> Line:
    x, y = zip(*points, strict=True)
    return Line("", LOOKS["mar"], (0, None), x, y)


def test_lines_coincide_when_they_are_near_on_both_axes_as_far_as_the_shorter_goes():
    base = line((1, 0.0), (10, 0.5), (100, 1.0))
    near, short = line((1, 0.005), (10.1, 0.5), (100, 0.995)), line((1, 0.0), (10, 0.5))
    higher = line((1, 0.1), (10, 0.6))
    aside = line((1.2, 0.0), (12, 0.5), (100, 1.0))
    assert coinciding([base, near, short, higher, aside]) == [[0, 1, 2], [3], [4]]
    assert coinciding([base, aside], log_x=True) == [[0], [1]]


def test_covered_lines_are_wider_the_deeper_they_lie_within_bounds():
    for size in (1, 2, 6, 40):
        widths = widths_of(size)
        assert len(widths) == size
        assert widths == sorted(widths, reverse=True)
        assert len(set(widths)) == size
        assert widths[0] <= 12


def test_a_thin_line_is_never_below_a_wide_one():
    axes = Figure().subplots()
    rising, beside = line((1, 0.0), (100, 1.0)), line((1, 0.02), (100, 1.0))
    plot(axes, [beside, rising, rising, rising])
    drawn = sorted(axes.lines, key=lambda each: each.get_zorder())
    widths = [each.get_linewidth() for each in drawn]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_legend_names_every_line_and_lies_outside_the_axes(tmp_path, count):
    settings = [{"technique": name, "semantics": "paper"} for name in list(LOOKS)[:count]]
    for name, drawing in figures_of(tmp_path, *settings).items():
        if name == "bytes-techniques":
            continue
        figure = drawing.figure
        FigureCanvasAgg(figure).draw()
        (legend,) = figure.legends
        assert len(legend.get_texts()) == count
        assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())
        assert figure.bbox.contains(*legend.get_window_extent().min)
        assert figure.bbox.contains(*legend.get_window_extent().max)


def test_axes_say_what_they_show_in_which_unit(tmp_path):
    split = Split(("a", "b"), ((1, 2), (3, 4)))
    found = figures_of(tmp_path, {"peers": 16}, {"peers": 64}, splits=[("0", split)])
    axes = {name: each.figure.axes[0] for name, each in found.items()}
    assert {name: (each.get_xlabel(), each.get_ylabel()) for name, each in axes.items()} == {
        "accuracy-iterations": ("iteration", "test accuracy"),
        "accuracy-bytes": ("bytes sent by all peers (log scale)", "test accuracy"),
        "accuracy-time": ("virtual time", "test accuracy"),
        "bytes-techniques": ("bytes per iteration, all peers", ""),
        "bytes-peers": ("peers N (log scale)", "bytes per iteration, all peers\n(log scale)"),
        "split": ("peer", "label"),
    }
    assert axes["accuracy-bytes"].get_xscale() == "log"


def test_bars_name_the_amount_in_bytes_and_models(tmp_path):
    axes = figures_of(tmp_path, {"technique": "arfl"}, {})["bytes-techniques"].figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["MAR: 998.25 kB, 1.996 S", "AR-FL: 62.01 MB, 124 S"]
    assert axes.get_xscale() == "log"


def test_repeated_seeds_have_a_band(tmp_path):
    axes = figures_of(tmp_path, *({"seed": seed} for seed in range(3)))["accuracy-iterations"].figure.axes[0]
    assert len(axes.lines) == len(axes.collections) == 1


# --- bytes against peers ---


def test_growth_has_a_point_for_every_number_of_peers_in_order(tmp_path):
    settings = [{"technique": name, "peers": peers} for peers in (64, 16, 125) for name in ("mar", "arfl")]
    series = series_of([open_run(make_run(tmp_path / str(index), **each)) for index, each in enumerate(settings)])
    growth = {each.label: each for each in growth_lines(series)}
    assert {name: each.x for name, each in growth.items()} == {"MAR": (16, 64, 125), "AR-FL": (16, 64, 125)}
    assert growth["AR-FL"].y == pytest.approx([peers * ((peers - 1) * 4000 + 50) for peers in (16, 64, 125)])
    assert growth_lines(series[:1]) == []


# --- ticks ---


def tick_labels(ticks, low: float, high: float, *, log: bool) -> list[str]:
    axes = Figure().subplots()
    axes.set_xscale("log" if log else "linear")
    axes.set_xlim(low, high)
    ticks(axes.xaxis)
    axes.figure.draw_without_rendering()
    shown = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    return [label.get_text() for place, label in shown if low <= place <= high]


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 10, False, ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]),
        (0, 240, False, ["0 min", "1 min", "2 min", "3 min", "4 min"]),
        (0, 7200, False, ["0 h", "0.5 h", "1 h", "1.5 h", "2 h"]),
        (1, 300, True, ["1 s", "3 s", "10 s", "30 s", "1 min", "3 min"]),
        (0.01, 1e6, True, ["10 ms", "300 ms", "10 s", "3 min", "1 h", "1 d"]),
    ],
)
def test_times_are_in_units_that_people_use(low, high, log, expected):
    assert tick_labels(time_ticks, low, high, log=log) == expected


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 4e6, False, ["0 B", "1 MB", "2 MB", "3 MB", "4 MB"]),
        (4e6, 3e7, True, ["5 MB", "10 MB", "20 MB"]),
        (10.8e6, 19.2e6, True, ["12.5 MB", "15 MB", "17.5 MB"]),
        (4e6, 2e9, True, ["10 MB", "30 MB", "100 MB", "300 MB", "1 GB"]),
    ],
)
def test_bytes_are_in_si_units_with_enough_ticks(low, high, log, expected):
    assert tick_labels(byte_ticks, low, high, log=log) == expected
