"""The live page: what it shows, that it takes no input, and that a real browser draws it at desktop and phone width."""

from __future__ import annotations

import asyncio
import html
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from marfl.cli import main
from marfl.commands.watch import note
from marfl.errors import InputError
from marfl.live import Iteration, Page, Scene, read_page, scene_of_run, serve_pages, web
from marfl.peer.about import About, Last, Seen
from marfl.plan.grid import plan
from marfl.runs import RunDir
from marfl.runs.rows import ROW_FIELDS
from stages.made_up_runs import config_of, make_run, rows_of

T = TypeVar("T")
NAMES = ["12D3KooWAAAAAAAAaaaa", "12D3KooWBBBBBBBBbbbb", "12D3KooWCCCCCCCCcccc", "12D3KooWDDDDDDDDdddd"]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the page is not drawn by a browser")


def peer_line(iteration: int, present: list[str], missing: Mapping[str, str]) -> str:
    row = {name: None if "or null" in kind else 0 for name, kind in ROW_FIELDS.items()} | {
        "iteration": iteration, "status": "committed", "test_accuracy": iteration / 10,
        "model_hash": f"{iteration:064x}", "present": present, "missing": dict(missing), "sent": {}, "received": {},
        "checks": [], "exchange": "grid",
        "bytes_payload": 1000 * iteration, "wall_seconds": 0.5,
    }  # fmt: skip
    return json.dumps(row)


def swarm_run(path: Path) -> Path:
    """A swarm of four as it lies on the disk: one was lost in iteration 3."""
    config = config_of(peers=4, group_size=2)
    with RunDir.create(path, config) as run:
        for row in rows_of(config)[:3]:
            run.append_row(row)
    for index, name in enumerate(NAMES):
        folder = path / "peers" / str(index)
        folder.mkdir(parents=True)
        gone = {NAMES[3]: "did not answer"}
        lines = [peer_line(t, NAMES if t < 3 else NAMES[:3], {} if t < 3 else gone) for t in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("\n".join(lines[: 2 if index == 3 else 3]) + "\n")
        (folder / "address").write_text(f"/ip4/127.0.0.1/tcp/1/p2p/{name}\n")
    return path


def told(scene: Scene) -> dict[str, Any]:
    return json.loads(scene.as_json())


# --- what it shows ---


def test_a_swarms_directory_says_who_met_whom_and_who_is_missing_and_why(tmp_path: Path):
    shown = told(scene_of_run(swarm_run(tmp_path / "run")))
    assert [peer["id"] for peer in shown["peers"]] == NAMES
    assert [each["t"] for each in shown["iterations"]] == [1, 2, 3]
    assert shown["iterations"][2]["present"] == [0, 1, 2]
    assert shown["iterations"][2]["missing"] == [[3, "did not answer"]]
    assert shown["plans"]["4"] == [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    assert not shown["over"], "it has no summary yet"
    assert [peer["state"] for peer in shown["peers"]] == ["running"] * 3 + ["away"]


def test_bytes_of_an_iteration_that_not_all_have_written_down_are_not_shown(tmp_path: Path):
    run = swarm_run(tmp_path / "run")
    with (run / "peers" / "0" / "metrics.jsonl").open("a") as rows:
        rows.write(peer_line(4, NAMES[:3], {}) + "\n")
    *before, last = told(scene_of_run(run))["iterations"]
    assert all(each["sent"] is not None for each in before)
    assert (last["t"], last["sent"]) == (4, None)


def test_a_simulation_is_shown_by_its_numbers_and_its_groups(tmp_path: Path):
    shown = told(scene_of_run(make_run(tmp_path / "run", peers=9, group_size=3)))
    assert shown["over"]
    assert len(shown["peers"]) == 9
    assert len(shown["plans"]["9"]) == 2
    with pytest.raises(InputError, match="is not a run directory"):
        scene_of_run(tmp_path)


def test_a_damaged_row_of_a_peer_is_one_line(tmp_path: Path):
    run = swarm_run(tmp_path / "run")
    (run / "peers" / "1" / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(InputError, match=r"peers/1/metrics\.jsonl: lacks"):
        scene_of_run(run)


def test_a_live_run_is_put_together_from_what_peers_say_of_themselves():
    def seen(place: int, iteration: int, present: list[str]) -> Seen:
        last = Last(iteration, tuple(present), {}, "grid", "ab" * 32, 0.5, 100 + place, 0.5)
        about = About("demo", "1", "daemon", place, iteration, "training", "ab" * 32, group_size=2, sent=500, last=last)
        return Seen(NAMES[place], place, (), about)

    scene, sent = Scene("demo"), {}
    note(scene, [seen(0, 1, NAMES[:2]), seen(1, 1, NAMES[:2])], sent)
    note(scene, [seen(0, 2, NAMES[:1]), Seen(NAMES[1], 1, (), None, "no answer")], sent)
    shown = told(scene)
    assert [each["sent"] for each in shown["iterations"]] == [201, 100]
    note(scene, [seen(0, 3, NAMES[:2])], sent)
    assert told(scene)["iterations"][2]["sent"] is None, "who sent the rest was not heard yet"
    del scene.iterations[3]
    assert [peer["here"] for peer in shown["peers"]] == [True, False]
    assert shown["peers"][1]["why"] == "cannot be reached: no answer"
    note(scene, [seen(0, 2, NAMES[:1])], sent)
    assert told(scene)["peers"][1]["why"] == "is not here"


def test_a_long_run_keeps_its_newest_iterations():
    scene = Scene("long")
    for number in range(1, 2101):
        scene.add(Iteration(number))
    assert (len(scene.iterations), min(scene.iterations)) == (2000, 101)


# --- the server ---


def served(pages: Mapping[str, Page], ask: Callable[[str], T], **options: Any) -> T:
    """What a client in a thread finds while these pages are served."""

    async def scene() -> T:
        server = await serve_pages(0, pages, **options)
        async with server:
            return await asyncio.to_thread(ask, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(scene())


def status_of(url: str, data: bytes | None = None, **heads: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, heads), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_it_answers_get_of_its_own_paths_and_nothing_else():
    asked: list[str] = []
    data = Page("application/json", lambda: asked.append("x") or b"{}")
    pages = {"/": Page("text/html", lambda: b"<p>"), "/data": data}

    def ask(url: str) -> None:
        assert status_of(f"{url}/") == status_of(f"{url}/data?x=<script>") == 200
        assert status_of(f"{url}/other") == status_of(f"{url}/../etc/passwd") == 404
        assert status_of(f"{url}/data", b"input") == 404, "a POST is not heard"
        assert status_of(f"{url}/data", Host="evil.example") == 404, "no page from elsewhere reads it"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert len(asked) == 1

    served(pages, ask)


def test_a_browser_gets_the_page_where_programs_get_json():
    pages = {"/": Page("application/json", lambda: b"{}"), "/page": Page("text/html", read_page)}

    def ask(url: str) -> None:
        assert urllib.request.urlopen(url, timeout=10).read() == b"{}"
        request = urllib.request.Request(url, headers={"Accept": "text/html,*/*"})
        assert urllib.request.urlopen(request, timeout=10).read() == read_page()

    served(pages, ask, browsers="/page")


def test_the_page_loads_nothing_from_elsewhere_and_shows_texts_as_texts():
    page = read_page().decode()
    assert re.findall(r"(?:src|href)=", page) == []
    assert set(re.findall(r"https?://[^\"]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in page
    assert page.count("fetch(") == 1


@pytest.mark.parametrize("arguments", [["no-such-run"], ["/ip4/127.0.0.1/tcp/1/p2p/nobody"]])
def test_what_cannot_be_watched_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("hivemind", reason="hivemind is not installed: no live run can be watched")
    assert main(["watch", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- in a browser ---

FRAME = """<!doctype html><body><iframe id="f" src="/" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="out"></pre><script>
const wait = ms => new Promise(done => setTimeout(done, ms));
(async () => {{
  const view = () => document.getElementById("f").contentDocument;
  for (let tries = 0; tries < 50 && !(view() && view().querySelector("#peers table")); tries++) await wait(100);
  const page = view(), text = id => page.getElementById(id).textContent, found = {{}};
  found.title = text("title"); found.state = text("state"); found.count = text("count"); found.shown = text("shown");
  found.peers = page.querySelectorAll("#peers tr").length - 1; found.missing = text("missing");
  found.last = [...page.querySelectorAll("#peers tr")].map(row => row.lastChild.textContent);
  found.dots = page.querySelectorAll("#groups circle").length;
  found.charts = page.querySelectorAll("#accuracy polyline, #bytes polyline").length;
  found.overflow = page.documentElement.scrollWidth - {width};
  const lefts = [...page.querySelectorAll("main section")].map(each => each.getBoundingClientRect().left);
  found.columns = new Set(lefts).size;
  const cells = [...page.querySelectorAll("#peers td")].filter(each => each.getClientRects().length);
  const edges = [...page.querySelectorAll("#accuracy text, #bytes text")];
  found.hidden = cells.filter(each => each.getBoundingClientRect().right > {width}).length;
  const card = each => each.closest("section").getBoundingClientRect();
  found.cut = edges.filter(each => each.getBoundingClientRect().left < card(each).left + 2).length;
  page.getElementById("at").value = 0; page.getElementById("at").dispatchEvent(new page.defaultView.Event("input"));
  found.lastAtFirst = [...page.querySelectorAll("#peers tr")].map(row => row.lastChild.textContent);
  found.first = text("shown"); found.dotsAtFirst = page.querySelectorAll("#groups circle").length;
  page.getElementById("play").click(); found.playing = text("play"); await wait(1500); found.played = text("shown");
  document.getElementById("out").textContent = JSON.stringify(found);
}})();
</script></body>"""


@needs_browser
@pytest.mark.parametrize(("width", "columns"), [(1200, 2), (390, 1)])
def test_a_browser_draws_it_and_plays_it(width: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "POLICY", "frame-src 'self'")  # so that the test can look into it
    run = swarm_run(tmp_path / "run")
    rude = Scene("<img src=x onerror=alert(1)>", group_size=2)
    for peer in scene_of_run(run).peers.values():
        lost = {"here": False, "why": "killed in iteration 3 while training"} if peer["id"] == NAMES[3] else {}
        peer |= {"state": "all iterations done", "sent": 123_456_789, "accuracy": 0.5} | lost
        rude.meet(**{"peer" if name == "id" else name: value for name, value in peer.items()})
    for iteration in scene_of_run(run).iterations.values():
        rude.add(iteration)
    pages = {
        "/": Page("text/html; charset=utf-8", read_page), "/data": Page("application/json", rude.as_json),
        "/frame": Page("text/html; charset=utf-8", FRAME.format(width=width).encode),
    }  # fmt: skip

    def look(url: str) -> str:
        with tempfile.TemporaryDirectory() as profile:
            command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                       "--virtual-time-budget=15000", f"--window-size={width + 40},1000", "--dump-dom", f"{url}/frame"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
        return done.stdout

    dom = served(pages, look)
    shown = re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    assert shown is not None
    assert shown[1], dom[-2000:]
    found = json.loads(html.unescape(shown[1]))
    assert found["title"] == "<img src=x onerror=alert(1)>", "what others say is shown as text"
    assert (found["state"], found["peers"], found["shown"]) == ("live", 4, "iteration 3")
    assert found["missing"] == "3 (12D3…dddd): did not answer"
    assert found["last"] == ["in iteration 3", *["in the average"] * 3, "did not answer"]
    assert (found["dots"], found["dotsAtFirst"], found["charts"]) == (3 * len(plan(3, 2).rounds), 4 * 2, 2)
    assert found["lastAtFirst"] == ["in iteration 1", *["in the average"] * 4], "who was lost later was there then"
    assert found["overflow"] <= 0, "nothing is wider than the screen"
    assert (found["hidden"], found["cut"]) == (0, 0), "the whole table and all labels are to be seen"
    assert found["columns"] == columns
    assert (found["first"], found["playing"]) == ("iteration 1", "Stop")
    assert found["played"] != "iteration 1"
