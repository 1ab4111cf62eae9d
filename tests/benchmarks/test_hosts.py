"""Hosts on one machine: they carry, limit and count bytes, and nothing stays behind.

What needs a sandbox runs in one of its own, started by a supervisor in another process,
as root and unprivileged, where this machine allows it.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.links.links import FRAME_BYTES, PlainHosts, ShapedHosts
from prunex_jax.base.errors import UserError
from prunex_jax.compare.drill import sandbox
from tests.helpers.common import processes_with

ROOT = Path(__file__).parents[2]
NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups".split()
# If anything hangs, the supervisor is killed by its alarm, and the sandbox with it.
SUPERVISE = """
import signal, sys
from prunex_jax.compare.drill.sandbox import run_in_sandbox
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.alarm(40)
sys.exit(run_in_sandbox([sys.executable, "-c", sys.argv[1]], grace_seconds=GRACE))
"""
PRELUDE = """
import json, os, signal, socket, subprocess, sys, time
from benchmarks.links.links import ShapedHosts

PYTHON = [sys.executable, "-I", "-S", "-c"]
NAME = "import socket as s; print(s.gethostname(), s.gethostbyname(s.gethostname()))"
RECEIVE = '''
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("up", flush=True)
connection, _ = server.accept()
size = 0
while chunk := connection.recv(1 << 20):
    size += len(chunk)
connection.sendall(str(size).encode())
'''
SEND = '''
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
start = time.monotonic()
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(100).decode() == sys.argv[3]
print(start, time.monotonic())
'''

def start(hosts, host, *argv):
    command = hosts.command(host, [*PYTHON, *map(str, argv)])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

def transfer(hosts, size, *pairs):
    "Sends so many bytes from one host to another, all pairs at once; start and end."
    receivers = [start(hosts, to, RECEIVE, 5000 + source) for source, to in pairs]
    for receiver in receivers:
        receiver.stdout.readline()
    senders = [
        start(hosts, source, SEND, f"host{to}", 5000 + source, size)
        for source, to in pairs
    ]
    times = [list(map(float, sender.communicate()[0].split())) for sender in senders]
    for receiver in receivers:
        receiver.communicate()
    return times

def sent_again(hosts):
    "Segments that every host had to send twice so far, as its kernel counts them."
    counts = []
    for host in range(hosts.num_hosts):
        said = start(hosts, host, "print(open('/proc/net/snmp').read())")
        lines = said.communicate()[0].splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        counts.append(int(dict(zip(names, values))["RetransSegs"]))
    return counts
"""


@dataclasses.dataclass(frozen=True)
class User:
    """Somebody who may start sandboxes: a prefix of their commands, and a Python."""

    prefix: tuple[str, ...]
    python: str

    def supervisor(self, body: str, grace: float = 20.0) -> list[str]:
        script = SUPERVISE.replace("GRACE", str(grace))
        body = PRELUDE + textwrap.dedent(body)
        return [*self.prefix, self.python, "-W", "error", "-c", script, body]

    def run(self, body: str) -> dict:
        """Runs the body in a sandbox; what it has printed last, as JSON."""
        done = subprocess.run(
            self.supervisor(body),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["root", "user"])
def user(request: pytest.FixtureRequest) -> User:
    is_root = os.geteuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("not root")
    if request.param == "root" or not is_root:
        kind, reason = sandbox.sandbox_kind()
        if kind != request.param:
            pytest.skip(f"no sandbox as {request.param} here: {kind}, {reason}")
        return User((), sys.executable)
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv to give up the rights of root")
    return unprivileged()


def unprivileged() -> User:
    """Nobody, with a Python that nobody may use."""
    script = "from prunex_jax.compare.drill import hosts, sandbox as s; import sys;"
    script += "assert sys.version_info >= (3, 11); print(*s.sandbox_kind())"
    said = ""
    for python in (sys.executable, "/usr/bin/python3"):
        done = subprocess.run(
            [*NOBODY, "sh", "-c", 'exec "$0" -c "$1"', python, script],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0 and done.stdout.startswith("user"):
            return User(tuple(NOBODY), python)
        said += f"; {python}: {(done.stdout + done.stderr).strip()[-200:]}"
    pytest.skip(f"no sandbox without rights here{said}")


@pytest.mark.sampled(1)
def test_bytes_are_carried_and_counted_exactly(user: User) -> None:
    """Also: names and addresses agree, and hosts can be made again, more of them."""
    found = user.run(
        """
        found = {}
        for num_hosts in (2, 4):
            with ShapedHosts(num_hosts) as hosts:
                last = num_hosts - 1
                said = start(hosts, last, NAME).communicate()[0].split()
                before = hosts.sent_bytes()
                transfer(hosts, 20_000_000, (0, last), (last, 0))
                transfer(hosts, 10_000_000, (0, last))
                sent = [a - b for a, b in zip(hosts.sent_bytes(), before)]
                again = sent_again(hosts)
                found[num_hosts] = [said, hosts.address(last), sent, again]
        print(json.dumps(found))
        """
    )
    for num_hosts, (said, address, sent, again) in found.items():
        assert said == [f"host{int(num_hosts) - 1}", address]
        # On top come headers of what is sent, acknowledgements of what is received, and
        # on a busy machine packets that are sent twice, as these come late.
        for size, received, host in ((30e6, 20e6, 0), (20e6, 30e6, -1)):
            least, most = size, 1.008 * size + 0.004 * received
            assert least < sent[host] < most + 5000 + again[host] * FRAME_BYTES
        assert max(sent[1:-1], default=0) < 1000, "bystanders have sent something"


@pytest.mark.sampled(1)
def test_links_are_as_fast_as_asked_both_ways(user: User) -> None:
    """A busy machine makes transfers late, never early: the best of several counts."""
    found = user.run(
        """
        def both_ways(megabits, most_seconds):
            hosts.shape(megabits)
            size = int((megabits or 200) * 1e6 / 8 * 0.3)
            tries = []
            while len(tries) < 10:
                times = transfer(hosts, size, (0, 1), (1, 0))
                tries.append([end - start for start, end in times])
                if max(tries[-1]) < most_seconds:
                    break
            return tries

        with ShapedHosts(3) as hosts:
            found = {"5": both_ways(5, 0.5), "200": both_ways(200, 0.5)}
            found["unlimited"] = both_ways(None, 0.2)
            hosts.shape(20)
            found["one to two"] = transfer(hosts, 375_000, (0, 1), (0, 2))
            found["two to one"] = transfer(hosts, 375_000, (0, 1), (2, 1))
        print(json.dumps(found))
        """
    )
    for megabits in ("5", "200"):
        # Headers take 0.75 %; the first frame of either end needs no time.
        assert min(map(min, found[megabits])) > 0.27, "a link is too fast"
        best = min(map(max, found[megabits]))
        assert best < 0.5, "a link is too slow, or not equally fast both ways"
    assert min(map(max, found["unlimited"])) < 0.2, "still limited"
    for case in ("one to two", "two to one"):
        # Processes start when they can: that they are slow says nothing.
        starts, ends = zip(*found[case], strict=True)
        assert max(ends) - min(starts) > 0.27, "two transfers do not share a link"


def test_leaving_ends_what_runs_on_hosts(user: User) -> None:
    """Also: a command on a host is the process itself, and inherits open files."""
    found = user.run(
        """
        def lives(pid):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    return file.read().split()[2] != "Z"
            except OSError:
                return False

        read, write = os.pipe()
        daemon = f'''
        (setsid sleep 100 >&- 2>&- & echo $! >&{write})
        echo $$ >&{write}; read nothing
        '''
        try:
            with ShapedHosts(1) as hosts:
                child = subprocess.Popen(
                    hosts.command(0, ["sh", "-c", daemon]),
                    stdin=subprocess.PIPE, pass_fds=[write],
                )
                os.close(write)
                with open(read) as lines:
                    pids = [int(lines.readline()) for _ in range(2)]
                before = [lives(pid) for pid in pids]
                raise KeyError("out of the context")
        except KeyError:
            after = [lives(pid) for pid in pids]
        deadline = time.monotonic() + 5
        while os.path.exists(f"/proc/{pids[0]}"):  # process 1 is its parent now
            assert time.monotonic() < deadline, "an orphan stays a zombie"
            time.sleep(0.01)
        print(json.dumps([pids[1] == child.pid, before, after, os.listdir("/run")]))
        """
    )
    assert found == [True, [True, True], [False, False], ["netns"]]


# What is left of the sandbox, if anything, is on hosts, shaped, and has a daemon.
BUSY = """
hosts = ShapedHosts(2).__enter__()
hosts.shape(10)
argv = ["sh", "-c", "setsid sleep 100 & exec sleep 100"]
children = [subprocess.Popen(hosts.command(host, argv)) for host in range(2)]
received = []
print("ready", flush=True)
"""
SLEEP = "time.sleep(100)"
KILLED = 128 + signal.SIGKILL
# Name: body after `BUSY`; signals and to whom (0 supervisor, 1 unshare, 2 process 1);
# exit code, None if any but 0.
ENDS = {
    "end": ("sys.exit(3)", (), 3),
    "exception": ("raise KeyError('as wanted')", (), 1),
    "command killed": ("os.kill(os.getpid(), 9)", (), KILLED),
    "SIGINT": (SLEEP, ((0, signal.SIGINT),), 128 + signal.SIGINT),
    "SIGTERM": (SLEEP, ((0, signal.SIGTERM),), 128 + signal.SIGTERM),
    "SIGHUP": (SLEEP, ((0, signal.SIGHUP),), 128 + signal.SIGHUP),
    "SIGKILL": (SLEEP, ((0, signal.SIGKILL),), -signal.SIGKILL),
    "unshare killed": (SLEEP, ((1, signal.SIGKILL),), KILLED),
    "init killed": (SLEEP, ((2, signal.SIGKILL),), None),
}


@contextlib.contextmanager
def nothing_stays() -> Iterator[dict[str, str]]:
    """Gives an environment: no process with it is left, and nothing else."""
    token = str(uuid.uuid4())
    before = traces()
    yield {**os.environ, "PYTHONPATH": str(ROOT), "TEST_TOKEN": token}
    deadline = time.monotonic() + 5
    while left := processes_with(token):
        assert time.monotonic() < deadline, f"{left} still live"
        time.sleep(0.02)
    assert traces() == before


def traces() -> dict[str, object]:
    """Names of everything that a testbed could leave behind."""
    links = json.loads(subprocess.check_output(["ip", "-j", "link"]))
    folders = ["/run", "/run/netns", "/run/mount", "/etc", "/etc/netns"]
    return {
        "links": [link["ifname"] for link in links],
        "namespaces": subprocess.check_output(["ip", "netns"]),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "files": [sorted(map(str, Path(folder).glob("*"))) for folder in folders],
        "names": Path("/etc/hosts").read_text(),
    }


@contextlib.contextmanager
def supervised(
    user: User, body: str, grace: float = 20.0
) -> Iterator[subprocess.Popen[str]]:
    """A supervisor whose sandbox has said that it is ready; nothing of it stays."""
    with (
        nothing_stays() as environ,
        subprocess.Popen(
            user.supervisor(body, grace),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as supervisor,
    ):
        assert supervisor.stdout is not None and supervisor.stderr is not None
        assert supervisor.stdout.readline() == "ready\n", supervisor.stderr.read()
        yield supervisor


def descendant(pid: int, generation: int) -> int:
    """The only child of the only child ... of a process."""
    for _ in range(generation):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    return pid


@pytest.mark.sampled(3)
@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays_behind(user: User, end: str) -> None:
    body, signals, code = ENDS[end]
    if any(signal.getsignal(number) is signal.SIG_IGN for _, number in signals[:1]):
        pytest.skip("tests run without this signal, as under nohup")
    with supervised(user, BUSY + body) as supervisor:
        for generation, number in signals:
            os.kill(descendant(supervisor.pid, generation), number)
        said = supervisor.communicate(timeout=20)[1]
        assert supervisor.returncode and code in (None, supervisor.returncode), said


def test_sigkill_ends_the_sandbox_even_if_its_lifeline_is_held(user: User) -> None:
    with supervised(user, BUSY + SLEEP) as supervisor, contextlib.ExitStack() as held:
        for entry in Path(f"/proc/{supervisor.pid}/fd").iterdir():
            if int(entry.name) > 2 and os.readlink(entry).startswith("pipe:"):
                held.enter_context(open(entry, "w"))
        supervisor.kill()
        # Waits for all who could still write to it.
        supervisor.communicate(timeout=5)


def test_ctrl_c_reaches_the_command_once(user: User) -> None:
    body = """
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))
    print("ready", flush=True)
    time.sleep(0.4)
    print(len(received))
    """
    with supervised(user, textwrap.dedent(body)) as supervisor:
        assert os.getpgid(descendant(supervisor.pid, 2)) != supervisor.pid
        os.killpg(supervisor.pid, signal.SIGINT)  # as a terminal does
        assert supervisor.communicate(timeout=20)[0] == "1\n"
        assert supervisor.returncode == 0


@pytest.mark.sampled(1)
def test_a_command_that_does_not_want_to_end_is_killed(user: User) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(100)
    """
    with supervised(user, textwrap.dedent(body), grace=0.5) as supervisor:
        supervisor.send_signal(signal.SIGTERM)
        supervisor.communicate(timeout=20)
        assert supervisor.returncode == 128 + signal.SIGKILL


def test_a_missing_program_is_said(user: User) -> None:
    script = SUPERVISE.replace("GRACE", "1").replace('"-c", sys.argv[1]', "")
    script = script.replace("sys.executable, ", '"no-such-program"')
    done = subprocess.run(
        [*user.prefix, user.python, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 127
    assert done.stderr.startswith("error: no-such-program: ")


def test_what_is_missing_for_a_sandbox_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_TOOLS", ("sh", "no-such-tool"))
        kind, reason = sandbox.sandbox_kind()
        assert kind is None
        assert "no-such-tool" in reason and " sh" not in reason
        with pytest.raises(UserError, match="no-such-tool"):
            sandbox.run_in_sandbox(["true"])


def test_what_the_kernel_says_is_passed_on(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    del user  # skips where there are no sandboxes at all
    monkeypatch.setattr(sandbox, "_PROBE", "echo no such luck >&2; exit 1")
    kind, reason = sandbox.sandbox_kind()
    assert kind is None and "no such luck" in reason


def test_namespaces_need_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    # A marker that has leaked out of a sandbox deceives nobody.
    monkeypatch.setenv("PRUNEX_JAX_SANDBOX", "mnt:[1]")
    assert not sandbox.is_in_sandbox()
    with pytest.raises(UserError, match="run_in_sandbox"):
        ShapedHosts(2)


def test_impossible_hosts_and_links_are_refused(user: User) -> None:
    for number in (0, 1000):
        with pytest.raises(UserError, match=f"{number} hosts"):
            PlainHosts(number)
    with PlainHosts(2) as hosts, pytest.raises(UserError, match="5 Mbit/s"):
        hosts.shape(None)
        hosts.shape(5.0)
    found = user.run(
        """
        said = []
        with ShapedHosts(1) as hosts:
            for megabits in (0.0, -1.0, float("nan"), 1e9, 0.01, 40_000.0):
                try:
                    hosts.shape(megabits)
                except ValueError as error:
                    said.append(str(error))
        print(json.dumps(said))
        """
    )
    assert [text.split()[3] for text in found] == ["0", "-1", "nan", "1e+09"]
