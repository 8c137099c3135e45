"""`--ray`: workers in processes of their own do what one process does, also if some are killed."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from selfspec.building.progress import Bar
from selfspec.errors import BuildError, FleetError
from selfspec.fleet import Fleet, Lost, Share, cluster, divided
from tests.tiny import LINES
from tests.waiting import free_port

ray = pytest.importorskip("ray", reason="needs the extra: pip install ray")
pytestmark = pytest.mark.long

PATIENCE = 10  # seconds, in which processes must end
HALF = Share(num_cpus=0.5, num_gpus=0)
ON_RAY = ("--ray", "local", "--num-workers", "2")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """One Ray for all tests, which commands with `--ray local` use."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100_000_000,
    )
    yield
    children = psutil.Process().children(recursive=True)
    rays = [child for child in children if is_of_ray(child)]
    ray.shutdown()
    _, left = psutil.wait_procs(rays, timeout=PATIENCE)
    assert not left, "Ray leaves nothing running"


def is_of_ray(process: psutil.Process) -> bool:
    """Whether Ray started it; other tests may have left a process of their own."""
    with suppress(psutil.Error):
        return "ray" in " ".join(process.cmdline())
    return False


def fleet_of(work: Any, **options: Any) -> Fleet[Any]:
    """Workers that do each job by a function; it must not need this module."""

    @contextmanager
    def opened() -> Iterator[Any]:
        yield lambda jobs: [(number, work(job)) for number, job in jobs]

    return Fleet(opened, 2, HALF, **options)


@pytest.mark.slow
def test_a_job_that_kills_its_worker_is_given_up_and_the_rest_is_done(local_ray, caplog) -> None:
    """What a worker logs and raises is told here."""

    def work(job: int) -> int:
        import logging

        from selfspec.errors import BuildError

        if job == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if job == 99:
            logging.getLogger("selfspec").warning("looked at %d", job - 1)
            raise BuildError("data must be good (got 99)")
        return job * job

    with fleet_of(work) as fleet:
        results = list(fleet.results(enumerate(range(8))))
        assert sorted(results) == [(job, Lost(3) if job == 3 else job * job) for job in range(8)]
        assert "another one takes its place" in caplog.text
        others = range(10, 30)
        assert list(fleet.in_order(others)) == [(job, job * job) for job in others]
        with pytest.raises(BuildError, match="must be good"):
            list(fleet.in_order([98, 99, 100]))


@pytest.mark.slow
def test_workers_that_never_get_ready_are_given_up(local_ray) -> None:
    @contextmanager
    def opened() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield None

    with (
        Fleet(opened, 1, HALF) as fleet,
        pytest.raises(FleetError, match=r"must get ready \(3 ended"),
    ):
        fleet.wait()


LISTENING = """
import psutil
from selfspec.fleet import connected
with connected("local"):
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [each for process in processes for each in process.net_connections("tcp")]
for each in found:
    if each.status == "LISTEN":
        print(each.laddr.ip.removeprefix("::ffff:"))
"""


@pytest.mark.slow
def test_a_ray_of_its_own_listens_at_loopback_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Ray listens at all" not in done.stderr
    assert set(done.stdout.split()) == {"127.0.0.1"}


def test_a_ray_that_listens_everywhere_is_warned_of(caplog) -> None:
    node = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "192.0.2.7"))
    cluster._warn_if_wide(node)
    assert "Ray listens at all addresses of this machine (as 192.0.2.7)" in caplog.text


@pytest.mark.long
def test_shares(local_ray) -> None:
    assert divided(None, "auto") == (1, Share(2.0, 0))
    assert divided(4, "cpu") == (4, Share(0.5, 0))
    with pytest.raises(FleetError, match="--device must be auto or cpu"):
        divided(1, "cuda")


@pytest.mark.long
def test_forty_prompts_and_a_worker_killed(
    local_ray, run, chat_folder, tmp_path, monkeypatch
) -> None:
    """Each is answered once, with the text of one process; what was learned is in the folder."""
    given = tmp_path / "in.jsonl"
    prompts = [{"prompt": f"{LINES[n % 3][:12]} {n}"} for n in range(40)]
    given.write_text("".join(f"{json.dumps(each)}\n" for each in [*prompts, {"prompt": ""}]))
    options = ("--model", chat_folder, "--max-new-tokens", "6", "--max-rows", "2")
    run("batch", given, tmp_path / "one.jsonl", *options)
    advance, moves = Bar.advance, []

    def killing(bar: Bar, amount: int, tokens: int = 0) -> None:
        advance(bar, amount, tokens)
        moves.append(amount)
        if len(moves) == 8:
            os.kill(pids_of_workers()[0], signal.SIGKILL)

    monkeypatch.setattr(Bar, "advance", killing)
    memory = ("--remember", tmp_path / "memory")
    result = run("batch", given, tmp_path / "two.jsonl", *options, *memory, *ON_RAY)
    assert result.exit_code == 1
    assert "warning: a worker was killed or ran out of memory" in result.stderr
    assert "1 of 41 lines have no answer" in result.stderr
    assert "prompt must not be empty" in (tmp_path / "two.errors.jsonl").read_text()
    answers = read(tmp_path / "two.jsonl")
    assert sorted(each["line"] for each in answers) == list(range(1, 41))
    assert texts(answers) == texts(read(tmp_path / "one.jsonl"))
    assert (tmp_path / "memory" / "memory").is_dir()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts(answers: list[dict[str, Any]]) -> dict[int, str]:
    return {each["line"]: each["text"] for each in answers}


def pids_of_workers() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [each.pid for each in children if each.name().startswith("ray::Worker")]


@pytest.fixture
def given(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\n')
    return path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--num-workers", "2"), "--num-workers needs --ray (got 2 and no --ray)"),
        (("--ray", "local", "--num-workers", "0"), "--num-workers"),
        (("--ray", "nowhere"), "--ray must be local, auto, or the host:port"),
        (("--ray", "127.0.0.1:{closed}"), "--ray must be the address of a Ray that runs"),
        (("--ray", "local", "--device", "cuda:1"), "--device must be auto, cpu or cuda"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    options, said, fails, chat_folder, tmp_path, given
) -> None:
    options = [each.format(closed=free_port()) for each in options]
    command = ("batch", given, tmp_path / "out.jsonl", "--model", chat_folder)
    assert said in fails(*command, *options)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_address_at_which_something_else_listens(fails, tmp_path, chat_folder, given) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=answer_as_a_web_server, args=(server,))
        thread.start()
        said = fails("batch", given, tmp_path / "o", "--model", chat_folder, "--ray", address)
        thread.join()
    assert "what listens there is no Ray" in said


def answer_as_a_web_server(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_without_the_extra_the_command_names_it(
    fails, tmp_path, chat_folder, monkeypatch, given
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = fails("batch", given, tmp_path / "out.jsonl", "--model", chat_folder, "--ray", "local")
    assert "--ray needs the package ray: pip install ray" in said
