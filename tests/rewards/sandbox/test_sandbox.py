"""Limits of the sandbox for programs that loop, allocate, flood or fork, and the end of all their processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lightning_realloc.rewards.sandbox.sandbox import run_limited
from lightning_realloc.rewards.sandbox.supervisor import Limits, ProgramResult
from lightning_realloc.rewards.sandbox.surroundings import closed_to_nobody
from tests.matrices import matrix

LIMITS = Limits(wall_s=10.0, cpu_s=5, memory_bytes=2**28, file_bytes=2**16, processes=6, output_bytes=2**12)
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process may leave its group")


def run(code: str, folder: Path, *, namespaces: bool = True, **limits: float) -> ProgramResult:
    return run_limited(
        [sys.executable, "-I", "-S", "-c", code],
        folder=folder,
        limits=Limits(**{name: limits.get(name, getattr(LIMITS, name)) for name in Limits.__slots__}),  # type: ignore[attr-defined]
        namespaces=namespaces,
    )


def running_in(folder: Path) -> list[int]:
    """Return the processes whose home is ``folder``, in any session and with any parent."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={folder}\0".encode() in entry.read_bytes() + b"\0":
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


def test_a_program_keeps_its_exit_code_and_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    ending = run("import os, sys; print(os.getcwd(), os.environ.get('HF_TOKEN')); sys.exit(3)", tmp_path)
    assert (ending.exit_code, ending.reason) == (3, "")
    assert ending.output == f"{tmp_path} None\n"
    crashed = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
    assert (crashed.exit_code, crashed.reason) == (-11, "")
    echoed = run_limited(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.stderr.write('no'); print(input())"],
        folder=tmp_path,
        limits=LIMITS,
        standard_input="yes\n",
        with_errors=False,
    )
    assert echoed.output == "yes\n"
    missing = run_limited(["/no/such/program"], folder=tmp_path, limits=LIMITS)
    assert missing.exit_code == 127 and "FileNotFoundError" in missing.output


@pytest.mark.parametrize("namespaces", matrix([True, False], True))
def test_a_program_over_its_time_limit_is_ended(tmp_path: Path, namespaces: bool) -> None:
    began = time.monotonic()
    waits = run("import time; print('here', flush=True); time.sleep(60)", tmp_path, wall_s=2.0, namespaces=namespaces)
    assert (waits.exit_code, waits.reason, waits.output) == (None, "it took more than 2 seconds", "here\n")
    computes = run("while True: pass", tmp_path, cpu_s=1, wall_s=60.0, namespaces=namespaces)
    assert computes.exit_code == -24  # SIGXCPU
    assert time.monotonic() - began < 40.0
    assert running_in(tmp_path) == []


def test_a_program_over_its_size_limits_is_refused_or_ended(tmp_path: Path) -> None:
    hoards = run("x = bytearray(2**29)", tmp_path)
    assert hoards.exit_code == 1 and "MemoryError" in hoards.output
    writes = run("open('big', 'wb').write(bytes(2**17))", tmp_path)
    assert writes.exit_code == 1 and "File too large" in writes.output
    assert (tmp_path / "big").stat().st_size <= 2**16
    floods = run("while True: print('x' * 1000)", tmp_path)
    assert (floods.exit_code, floods.reason) == (None, "it wrote more than 4096 bytes")
    assert len(floods.output) == 2**12


# Each forks six times, to 64 processes at most, and then waits: enough for the limit, too few to harm.
FORKS = "import os, time\nfor _ in range(6): os.fork()\ntime.sleep(60)"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("there", "w").close()
        time.sleep(60)
    os._exit(0)
while not os.path.exists("there"):
    time.sleep(0.01)
"""
STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork():
    os._exit(0)
time.sleep(60)
"""


# At most as many processes as there are tokens, whichever are killed, so that the machine can bear them. Each one
# computes, so that the supervisor competes for the CPU, and has its own session, so that no signal reaches two of them.
BOMB = """
import os, time
there, tokens = os.pipe()
os.set_blocking(there, False)
os.write(tokens, bytes(80))
end = time.monotonic() + 20.0
try:
    while os.read(there, 1):
        if os.fork() == 0:
            os.setsid()
except BlockingIOError:
    pass
while time.monotonic() < end:
    pass
"""


@linux
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_fork_bomb_is_ended_soon_after_its_detection(tmp_path: Path, namespaces: bool) -> None:
    began = time.monotonic()
    ending = run(BOMB, tmp_path, namespaces=namespaces, wall_s=15.0)
    spent = time.monotonic() - began
    assert running_in(tmp_path) == []
    assert "more than 6 processes" in ending.reason or "BlockingIOError" in ending.output, ending
    assert spent < 8.0  # they would compute for 20 seconds


def test_a_program_has_the_niceness_of_its_caller(tmp_path: Path) -> None:
    # Its supervisor has a higher priority where the system allows it.
    assert run("import os; print(os.getpriority(os.PRIO_PROCESS, 0))", tmp_path).output == (
        f"{os.getpriority(os.PRIO_PROCESS, 0)}\n"
    )


@linux
@pytest.mark.parametrize("namespaces", [True, False])
def test_the_number_of_processes_is_limited_and_none_remains(tmp_path: Path, namespaces: bool) -> None:
    began = time.monotonic()
    forks = run(FORKS, tmp_path, namespaces=namespaces)
    # For an ordinary user in separate namespaces fork() fails; otherwise the supervisor ends the program.
    assert "more than 6 processes" in forks.reason or "BlockingIOError" in forks.output, forks
    assert running_in(tmp_path) == []
    for code in (DAEMON, STUBBORN):
        ending = run(code, tmp_path, namespaces=namespaces)
        assert (ending.exit_code, ending.reason) == (0, ""), ending
        assert running_in(tmp_path) == []
    assert (tmp_path / "there").exists()  # there was a daemon
    assert time.monotonic() - began < 40.0  # daemons sleep for 60 seconds


KILLED = """
import sys
from pathlib import Path
from lightning_realloc.rewards.sandbox.sandbox import run_limited
from lightning_realloc.rewards.sandbox.supervisor import Limits
from tests.matrices import matrix
code = "import time; open('here', 'w').close(); time.sleep(60)"
limits = Limits(60.0, 5, 2**28, 2**16, 6, 2**12)
command = [sys.executable, "-I", "-S", "-c", code]
run_limited(command, folder=Path(sys.argv[1]), limits=limits, namespaces=len(sys.argv) < 3)
"""


@linux
@pytest.mark.parametrize("without", [[], ["namespaces"]])
def test_a_program_ends_when_the_run_is_killed(tmp_path: Path, without: list[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), *without]) as killed:
        until = time.monotonic() + 20.0
        while not (tmp_path / "here").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert len(running_in(tmp_path)) == 1
        killed.kill()
    until = time.monotonic() + 5.0
    while running_in(tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    assert running_in(tmp_path) == []


@linux
def test_separate_namespaces_hide_the_network_and_other_processes(tmp_path: Path) -> None:
    code = "import os, socket; print(os.getpid(), flush=True); socket.create_connection(('127.0.0.1', 9), 1)"
    ending = run(code, tmp_path)
    if not ending.isolated:
        pytest.skip("this system lets this user make no namespaces")
    listed = run("import os; print(sorted(name for name in os.listdir('/proc') if name.isdigit()))", tmp_path)
    assert listed.output == "['1', '2']\n" or not may_mount()
    assert ending.output.startswith("2\n")
    assert "Network is unreachable" in ending.output
    assert "Error" in run("import os; os.setuid(0)", tmp_path).output


def may_mount() -> bool:
    """Return whether a /proc can be mounted, which containers may forbid."""
    command = "unshare --user --map-root-user --pid --fork --mount-proc true"
    return subprocess.run(command.split(), check=False).returncode == 0


SURROUNDINGS = """
import os, sys
print(os.getuid(), os.getgroups())
print([name for name in os.listdir("/proc") if name.isdigit() and int(name) > 3])
for path in ("/dev/stdin", "/proc/sys/kernel/core_pattern", "/proc/1/environ"):
    try:
        print(open(path, "r+" if "sys" in path else "r").read().strip())
    except OSError as error:
        print(type(error).__name__)
open("made", "w").write("by the program")
"""


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="is about programs of root")
def test_a_program_of_root_runs_as_nobody_and_sees_no_process_of_others() -> None:
    interpreter = "/usr/bin/python3"  # others may read it
    if closed_to_nobody([interpreter], "/tmp/any") is not None:
        pytest.skip("this system lets only root read its Python")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        (folder / "solution.py").write_text(SURROUNDINGS)
        (folder / "solution.py").chmod(0o600)
        command = [interpreter, "-I", "-S", "solution.py"]
        result = run_limited(command, folder=folder, limits=LIMITS, standard_input="given\n")
        assert (result.exit_code, result.is_nobody) == (0, True), result
        user, processes, *read = result.output.splitlines()
        assert (user, read) == ("65534 []", ["given", "PermissionError", "PermissionError"])
        assert processes == "[]" or not result.isolated or not may_mount()
        assert (folder / "made").stat().st_uid == 65534
        forks = run_limited([interpreter, "-I", "-S", "-c", FORKS], folder=folder, limits=LIMITS)
        assert forks.reason == "it started more than 6 processes"
    assert closed_to_nobody([interpreter], "/root/any") == Path("/root")


CONNECT = """
import os, socket
print(len(os.listdir("/run")))
for path in {paths}:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""


@linux
def test_separate_namespaces_hide_sockets_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    # Folders of pytest are closed to other users, and a program of root is one of nobody.
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as service:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("SSH_AUTH_SOCK", f"{name}/agent")
        (folder / "agent").touch()  # of an agent outside of this container: in no list of sockets
        service.bind(f"{name}/service")
        service.listen()
        (folder / "service").chmod(0o777)
        (folder / "program").mkdir()
        command = ["/usr/bin/python3", "-I", "-S", "-c", CONNECT.format(paths=[service.getsockname()])]
        code = "import os; print(os.stat(os.sys.argv[1]).st_rdev)"

        def outputs(*, namespaces: bool) -> list[str]:
            kept = {"folder": folder / "program", "limits": LIMITS, "namespaces": namespaces}
            agent = run_limited([*command[:4], code, f"{name}/agent"], **kept)
            return [*run_limited(command, **kept).output.split(), agent.output.strip()]

        if not run("", folder / "program").isolated or not may_mount():
            pytest.skip("this system lets this user mount nothing")
        assert outputs(namespaces=True) == ["0", "ConnectionRefusedError", str(os.stat(os.devnull).st_rdev)]
        assert outputs(namespaces=False) == [str(len(os.listdir("/run"))), "connected", "0"]
        # A program whose files lie below /run needs them.
        if os.getuid() == 0:
            with tempfile.TemporaryDirectory(dir="/run") as below:
                kept = run_limited(command, folder=Path(below), limits=LIMITS)
                assert kept.output.split() == [str(len(os.listdir("/run"))), "ConnectionRefusedError"]


PEEK = """
import os
print(open("/proc/self/status").read().split("CapEff:")[1].split()[0])
try:
    print(open(f"/proc/{parent}/environ").read().count("HF_TOKEN"))
except OSError as error:
    print(type(error).__name__)
"""


@linux
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_has_no_capabilities_and_cannot_read_a_run_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: bool
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    result = run(f"parent = {os.getpid()}{PEEK}", tmp_path, namespaces=namespaces)
    capabilities, found = result.output.split()
    assert int(capabilities, 16) == 0
    if (namespaces and result.isolated) or os.getuid() == 0:
        assert found in ("PermissionError", "FileNotFoundError")


@linux
def test_the_supervisor_knows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = f"import os; parent = os.popen('ps -o ppid= -p ' + str(os.getppid())).read().strip(){PEEK}"
    result = run(code, tmp_path, namespaces=False)
    assert result.output.split()[1] in ("PermissionError", "0")
