"""A log that grows, is torn and is put away, read from outside while it does."""

import json
import math
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.errors import LockstepError
from lockstep.events import Event, EventLog, RunEnded, StepDone, encode
from lockstep.report import live
from lockstep.report.follow import Follower
from lockstep.report.live import Server, Watched, watch_web
from lockstep.report.phrases import describe_silence
from lockstep.report.watch import tame, watch_terminal
from tests.report.made_run import make_run, write_run
from tests.report.records import ended, evaluated, started, stepped

RUN: list[Event] = [started(), *(stepped(step, 1000 + step) for step in range(1, 200))]


def open_log(folder: Path, part_bytes: int = 1 << 20) -> EventLog:
    return EventLog(folder / "events.jsonl", warn=lambda notice: None, part_bytes=part_bytes)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    follower, log = Follower(tmp_path), None
    assert follower.poll() == []  # before the run has begun
    log = open_log(tmp_path)
    for place in range(0, len(RUN), 50):
        for event in RUN[place : place + 50]:
            log.emit(event)
        assert follower.poll() == RUN[place : place + 50]
    assert follower.poll() == []


def test_a_run_may_be_watched_before_its_folder_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    follower = Follower(folder)
    assert follower.poll() == []
    assert follower.path == folder / "events.jsonl"
    folder.mkdir()
    assert follower.poll() == []
    open_log(folder).emit(RUN[0])
    assert follower.poll() == RUN[:1]


def test_a_run_that_says_nothing_for_long_is_said_to_be_silent(tmp_path: Path) -> None:
    write_run(tmp_path, [started(time.time() - 700), stepped(10, time.time() - 600)])
    ending = threading.Timer(0.3, lambda: open_log(tmp_path).emit(ended(20, time.time(), 10.0)))
    ending.start()
    with (tmp_path / "out").open("w") as file:
        watch_terminal(tmp_path, Console(file=file), poll_s=0.02)
    ending.join()
    assert (tmp_path / "out").read_text().count("Nothing heard for 10:00: the run was killed") == 1
    assert describe_silence(time.time() - 30) == describe_silence(-math.inf) == ""


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    line = f"{encode(RUN[1])}\n".encode()
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    for cut in (1, 20, len(line) - 1):
        path.unlink(missing_ok=True)
        follower = Follower(path)
        path.write_bytes(line[:cut])
        assert follower.poll() == []
        with path.open("ab") as file:
            file.write(line[cut:])
        assert follower.poll() == [RUN[1]]


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(encode(RUN[1]).encode()[:30])
    follower = Follower(tmp_path)
    assert follower.poll() == []
    log = open_log(tmp_path)  # a resumed run ends the torn line first
    log.emit(RUN[2])
    assert follower.poll() == [RUN[2]]


@pytest.mark.parametrize("every", [1, 7, 60])
def test_full_parts_lose_nothing_that_was_read_in_time(tmp_path: Path, every: int) -> None:
    """With 16 records a part: looked at often, all records come; seldom, those that thinning leaves, and none twice."""
    log, follower = open_log(tmp_path, part_bytes=16 * len(encode(RUN[5]))), Follower(tmp_path)
    heard = []
    for place, event in enumerate(RUN):
        log.emit(event)
        if place % every == 0:
            heard += follower.poll()
    heard += follower.poll()
    assert len(list(tmp_path.glob("events-*.jsonl"))) > 5
    steps = [event.step for event in heard if isinstance(event, StepDone)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 199
    if every == 1:
        assert heard == RUN


def test_what_is_no_log_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(LockstepError, match=r"notes\.txt is no event log; give the folder of a run"):
        Follower(tmp_path / "notes.txt")
    with pytest.raises(LockstepError, match="is not there"):
        Follower(tmp_path / "none" / "events.jsonl")
    (tmp_path / "events.jsonl").write_text('{"kind":"StepDone","step":"x"}\n')
    with pytest.raises(LockstepError, match="not written by this version"):
        Follower(tmp_path).poll()
    (tmp_path / "events.jsonl").unlink()
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(LockstepError, match="not a plain file"):
        Follower(tmp_path).poll()


def test_the_terminal_follows_a_run_to_its_end(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.emit(RUN[0])
    rest: list[Event] = [stepped(10, 1005), evaluated(10, 1007, 0.5), ended(40, 1010, 10.0)]
    writer = threading.Timer(0.2, lambda: [log.emit(event) for event in rest])
    writer.start()
    with (tmp_path / "out").open("w") as file:
        watch_terminal(tmp_path, Console(file=file), poll_s=0.02)
    writer.join()
    text = (tmp_path / "out").read_text()
    assert "validation at epoch 1: top-1 50.0 %" in text
    assert "finished after 0:10" in text


def test_a_run_that_went_on_for_long_is_told_from_its_last_part(tmp_path: Path) -> None:
    write_run(
        tmp_path, [*RUN, started(5000, start_step=20), stepped(30, 5005), stepped(40, 5010), ended(40, 5011, 11.0)]
    )
    with (tmp_path / "out").open("w") as file:
        watch_terminal(tmp_path, Console(file=file), poll_s=0.02)
    text = (tmp_path / "out").read_text()
    assert "from step 20" in text
    assert text.count("loss") == 1


def test_the_useful_batch_is_that_of_all_steps(tmp_path: Path) -> None:
    scales = [100.0, 110.0, 120.0, 130.0, 900.0]
    steps = [replace(stepped(10 * at, 1000 + 5 * at), noise_scale=scale) for at, scale in enumerate(scales, 1)]
    write_run(tmp_path, [started(), *steps, ended(50, 1026, 26.0)])
    with (tmp_path / "out").open("w") as file:
        watch_terminal(tmp_path, Console(file=file), poll_s=0.02)
    text = (tmp_path / "out").read_text()
    assert "about 120, at the end 900" in text
    assert text.count("loss") == 1


def test_a_record_cannot_steer_the_terminal() -> None:
    event = started(run="\x1b]0;title\x07", versions={"a\x1b": "\x1b[2J"}, layers=["\x9b1m"])
    assert "\\x1b" not in repr(tame(event))
    assert "\\x9b" not in repr(tame(event))


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    watched = Watched(folder)
    with Server(watched, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            watched.close()


def ask(server: Server, path: str, host: str = "", method: str = "GET") -> tuple[int, bytes]:
    headers = {"Host": host} if host else {}
    request = urllib.request.Request(f"{server.address}{path}", headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_server_tells_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.0)
    with serve(tmp_path) as server:
        assert json.loads(ask(server, "state")[1]) == {"revision": 0}
        write_run(tmp_path, make_run(steps=100, ends=False, run="<b>mine</b>", begun_s=time.time()))
        state = json.loads(ask(server, "state?revision=0")[1])
        assert state["revision"] == 1
        assert "&lt;b&gt;mine&lt;/b&gt;" in state["header"]
        assert "Step 100 of 100 (100.0\N{NO-BREAK SPACE}%), after " in state["header"]
        assert "0.0\N{NO-BREAK SPACE}s left" in state["header"]
        assert {"loss", "accuracy", "throughput"} <= {chart["name"] for chart in state["charts"]}
        assert json.loads(ask(server, "state?revision=1")[1]) == {"revision": 1}
        assert json.loads(ask(server, "state?revision=%00'<")[1])["revision"] == 1


def test_the_page_of_a_run_that_was_killed_meanwhile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is new, nothing is drawn anew: it was only told to who looked for the first time."""
    monkeypatch.setattr(live, "LOOK_S", 0.0)
    folder = tmp_path / "run"
    with serve(write_run(folder, make_run(steps=100, ends=False, begun_s=time.time() - 200))) as server:
        assert json.loads(ask(server, "state?revision=0")[1])["revision"] == 1
        assert "Nothing heard for" in json.loads(ask(server, "state?revision=1")[1])["problem"]
        shutil.rmtree(folder)
        assert f"{folder} is gone" in json.loads(ask(server, "state?revision=1")[1])["problem"]
    with serve(write_run(folder, make_run(steps=100, begun_s=time.time() - 200))) as server:
        ask(server, "state?revision=0")
        assert json.loads(ask(server, "state?revision=1")[1]) == {"revision": 1}


def test_the_server_is_for_this_machine_alone(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}"):
            assert ask(server, "state", host)[0] == 403
        assert ask(server, "state", f"localhost:{port}")[0] == 200
        for path in ("events.jsonl", "../events.jsonl", "%2e%2e/etc/passwd", "/etc/passwd", "state/x"):
            assert ask(server, path)[0] == 404
        assert ask(server, "", method="POST")[0] == 501


def test_a_log_that_cannot_be_read_is_a_sentence_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind":"StepDone","step":"x"}\n')
    with serve(tmp_path) as server:
        assert "not written by this version" in json.loads(ask(server, "state")[1])["problem"]


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with serve(tmp_path) as server, pytest.raises(LockstepError, match="cannot be had"):
        watch_web(tmp_path, server.server_port)


def test_a_run_of_weeks_is_kept_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_STEPS", 50)
    write_run(tmp_path, [*RUN, RunEnded(**vars(ended(199, 1300, 300.0)))])
    watched = Watched(tmp_path)
    state = json.loads(watched.read_state(0))
    watched.close()
    loss = next(chart for chart in state["charts"] if chart["name"] == "loss")
    assert loss["traces"][0]["at"]["step"][-1] == 199
    assert len(loss["traces"][0]["y"]) == 100
