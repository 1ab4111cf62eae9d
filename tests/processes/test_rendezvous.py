"""All processes are there before jax starts, or everybody says who is not."""

import contextlib
import json
import socket
import threading
import time

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.processes import registry, rendezvous
from prunex_jax.processes.registry import LastStart
from prunex_jax.processes.rendezvous import register
from tests.helpers.common import free_port


def call_all(
    *ids,
    of,
    seconds=10.0,
    at_least=0,
    port=None,
    say=None,
    known=(),
    run="a",
    needs_name=False,
):
    """How many are there and the place of each process, or the text of its error."""
    results, port = {}, port or free_port()

    def call(key, process, num_processes):
        try:
            roster = register(
                f"127.0.0.1:{port}",
                num_processes,
                process,
                seconds=seconds,
                at_least=at_least,
                name=f"node{key}",
                say=say or (lambda text: None),
                last=LastStart(run[key % len(run)], known),
                needs_name=needs_name,
            )
            results[key] = roster.num_there, roster.place
        except UserError as error:
            results[key] = str(error)

    counts = of if isinstance(of, tuple) else (of,) * len(ids)
    threads = [
        threading.Thread(target=call, args=(key, process, count))
        for key, (process, count) in enumerate(zip(ids, counts, strict=True))
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_everybody_goes_on_when_all_are_there(order):
    results = call_all(*order, of=3)
    assert results == {key: (3, process) for key, process in enumerate(order)}


@pytest.mark.slow
def test_the_missing_are_named_to_all():
    results = call_all(0, 2, of=4, seconds=1.0)
    assert set(results.values()) == {results[0]}
    assert results[0].startswith("process 1, 3 of 4 did not come within 1 s")


def test_those_who_are_left_go_on_and_are_numbered_anew():
    said = []
    results = call_all(0, 2, 3, of=4, seconds=1.0, at_least=3, say=said.append)
    assert results == {0: (3, 0), 1: (3, 1), 2: (3, 2)}
    assert "going on without process 1 of 4" in said


@pytest.mark.slow
def test_too_few_are_refused():
    results = call_all(0, 2, of=4, seconds=1.0, at_least=3)
    assert all("process 1, 3 of 4 did not come" in text for text in results.values())


@pytest.mark.slow
def test_waiting_is_said(monkeypatch):
    monkeypatch.setattr(registry, "SAY_EVERY", 0.3)
    said = []
    call_all(0, 1, of=3, seconds=1.5, say=said.append)
    assert len(said) >= 4 and all("waiting for process 2 of 3, " in s for s in said)


def test_the_same_number_twice_names_both_machines():
    results = call_all(0, 1, 1, of=4)
    assert len(set(results.values())) == 1
    assert "process 1 is there twice, on node1 (127.0.0.1) and on node2" in results[0]


def test_another_number_of_processes_is_named():
    results = call_all(0, 1, of=(3, 2))
    assert "process 1 on node1 (127.0.0.1) was started as one of 2" in results[0]
    assert results[1] == results[0]


def test_nobody_at_the_address():
    results = call_all(1, of=2, seconds=0.8)
    assert "process 0 at 127.0.0.1:" in results[0]
    assert "cannot be reached within 1 s" in results[0]


def test_a_port_in_use_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        results = call_all(0, of=2, port=port)
    assert f"cannot listen at the coordinator's port {port}" in results[0]


def test_a_port_that_something_else_keeps_is_named_before_the_time_is_over(monkeypatch):
    monkeypatch.setattr(rendezvous, "STRANGER_SECONDS", 0.5)
    with socket.create_server(("", 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        stranger = threading.Thread(target=hang_up)
        stranger.start()
        began = time.monotonic()
        results = call_all(1, of=2, seconds=30, port=port)
        assert time.monotonic() - began < 10
        server.shutdown(socket.SHUT_RDWR)
        stranger.join(20)
    assert f"port {port} of 127.0.0.1 is taken" in results[0]
    assert f"another one than --coordinator=127.0.0.1:{port}" in results[0]


@pytest.mark.parametrize("means", ["127.0.1.1", "no address"])
def test_machines_whose_name_cannot_be_used_are_named(machines, monkeypatch, means):
    """As of Debian, which gives it 127.0.1.1; all on one machine may go on."""
    meanings = {socket.gethostname(): means}
    monkeypatch.setattr(rendezvous, "unusable_meaning", meanings.__getitem__)
    assert call_all(0, 1, of=2, needs_name=True) == {0: (2, 0), 1: (2, 1)}
    monkeypatch.setattr(
        registry.Registry, "_address_of", lambda self, connection: "10.0.0.2"
    )
    results = call_all(0, 1, of=2, needs_name=True)
    assert results[0] == results[1]
    assert f"process 0, node0, its own name means {means}, where jax" in results[0]
    assert call_all(0, 1, of=2) == {0: (2, 0), 1: (2, 1)}


def test_who_comes_again_after_it_has_left_is_one():
    port, done = free_port(), []
    first = threading.Thread(target=lambda: done.append(call_all(0, of=3, port=port)))
    first.start()
    time.sleep(0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        early = {"process": 2, "of": 3, "name": "early", "run": "", "unusable": ""}
        connection.sendall(json.dumps(early).encode() + b"\n")
        time.sleep(0.5)
    assert call_again(port, 2, 1) == {2: (3, 2), 1: (3, 1)}
    first.join(30)
    assert done == [{0: (3, 0)}]


def call_again(port, *ids):
    results = {}

    def call(process):
        roster = register(f"127.0.0.1:{port}", 3, process, seconds=10)
        results[process] = roster.num_there, roster.place

    threads = [threading.Thread(target=call, args=(process,)) for process in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_an_older_service_at_the_address_is_waited_out():
    """As that of the run before, after a restart."""
    port, results = free_port(), {}

    def call(process):
        roster = register(
            f"127.0.0.1:{port}", 2, process, seconds=10, say=lambda text: None
        )
        results[process] = roster.num_there, roster.place

    with socket.create_server(("", port)) as old:
        early = threading.Thread(target=call, args=(1,))
        early.start()
        for content in (b"\x00\x00\x12\x04binary\n", b""):
            connection, _ = old.accept()
            with connection:
                connection.sendall(content)
    first = threading.Thread(target=call, args=(0,))
    first.start()
    for thread in (early, first):
        thread.join(30)
    assert results == {0: (2, 0), 1: (2, 1)}


def test_strangers_do_no_harm():
    port = free_port()
    done = []
    thread = threading.Thread(
        target=lambda: done.append(call_all(0, 1, of=2, port=port))
    )
    for _ in range(2):
        if not thread.is_alive():
            thread.start()
        for content in (b"GET / HTTP/1.1\r\n\r\n", json.dumps([1]).encode() + b"\n"):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=2) as other:
                    other.sendall(content)
            except OSError:
                time.sleep(0.05)
    thread.join(30)
    assert done == [{0: (2, 0), 1: (2, 1)}]


def test_process_0_says_where_everybody_was_met():
    """Also those of its own machine, by the address that the others know."""
    port, rosters = free_port(), {}

    def call(process):
        rosters[process] = register(f"localhost:{port}", 3, process, seconds=10)

    run_together(call, 0, 1, 2)
    assert rosters[0].addresses == ("localhost",) * 3
    assert rosters[1].addresses == () and rosters[1].coordinator == f"localhost:{port}"


MACHINES = tuple(f"127.0.0.{number}" for number in range(1, 6))


@pytest.fixture
def machines(monkeypatch):
    """Addresses of this machine stand for machines: each has ports of its own."""

    def listen(port, host=""):
        server = socket.create_server((host, port))
        server.settimeout(registry.ACCEPT_SECONDS)
        return server

    monkeypatch.setattr(rendezvous, "listen", listen)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("delays", [(0, 0, 0), (1.0, 0, 0), (0, 0.5, 1.0)])
def test_the_others_meet_at_the_first_of_them(machines, delays):
    """Whoever comes first, and though each keeps a registry meanwhile."""
    port, rosters, said = free_port(), {}, []

    def call(process):
        time.sleep(delays[process - 2])
        rosters[process] = register(
            f"{MACHINES[0]}:{port}",
            5,
            process,
            seconds=2.5,
            at_least=3,
            last=LastStart("a", MACHINES),
            say=said.append,
        )

    run_together(call, 2, 3, 4)
    at = f"{MACHINES[2]}:{port}"
    assert {key: (each.num_there, each.place) for key, each in rosters.items()} == {
        2: (3, 0),
        3: (3, 1),
        4: (3, 2),
    }
    assert {roster.coordinator for roster in rosters.values()} == {at}
    # Where those were met who are missing is kept for the next start.
    assert rosters[2].addresses[:3] == MACHINES[:3]
    assert "going on without process 0, 1 of 5" in said


@pytest.mark.slow
def test_those_of_one_machine_meet_there_at_any_of_them(machines):
    """The first machine is lost with two processes, the second has two as well."""
    known = (*MACHINES[:1] * 2, *MACHINES[1:2] * 2, MACHINES[2])
    results = call_all(2, 3, 4, of=5, seconds=1.5, at_least=3, known=known)
    assert {there for there, _ in results.values()} == {3}
    assert sorted(place for _, place in results.values()) == [0, 1, 2]
    assert results[0][1] == 0 or results[1][1] == 0, "not at the second machine"


@pytest.mark.slow
def test_process_0_is_met_if_it_comes_late(machines):
    port, rosters = free_port(), {}

    def call(process):
        time.sleep(2.0 if process == 0 else 0)
        rosters[process] = register(
            f"{MACHINES[0]}:{port}",
            3,
            process,
            seconds=1.5,
            at_least=2,
            last=LastStart("a", MACHINES[:3]),
            say=lambda text: None,
        )

    run_together(call, 0, 1, 2)
    assert {each.coordinator for each in rosters.values()} == {f"{MACHINES[0]}:{port}"}
    assert {rosters[process].place for process in range(3)} == {0, 1, 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("there", "of", "at_least", "text"),
    [
        # Two parts of a run could both be as large as that.
        ((2, 3), 4, 2, "process 0 at 127.0.0.1:"),
        ((3, 4), 5, 3, "process 0, 1, 2 of 5 did not come"),
    ],
)
def test_no_two_parts_of_a_run_go_on(machines, there, of, at_least, text):
    known = MACHINES[:of]
    results = call_all(*there, of=of, seconds=1.0, at_least=at_least, known=known)
    assert all(text in said for said in results.values()), results


@pytest.mark.slow
def test_runs_that_look_for_others_at_the_same_machines_keep_apart(machines):
    """Of five processes of either, two and three are left."""
    results = call_all(
        *(2, 3, 4, 3, 4),
        of=5,
        seconds=2.0,
        at_least=3,
        known=MACHINES,
        run=("a", "a", "a", "b", "b"),
    )
    assert [results[key] for key in range(3)] == [(3, 0), (3, 1), (3, 2)]
    for key in (3, 4):
        assert isinstance(results[key], str), "met another run"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("known", [(), MACHINES[:2], ("", "", "")])
def test_nobody_meets_where_nobody_knows_where(machines, known):
    results = call_all(1, 2, of=3, seconds=0.6, at_least=2, known=known)
    assert all("process 0 at 127.0.0.1:" in said for said in results.values()), results


def run_together(call, *processes):
    threads = [threading.Thread(target=call, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
