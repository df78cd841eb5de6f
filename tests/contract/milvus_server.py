"""A real Milvus server for tests, on free ports and in a folder of its own, that ends with the tests.

`python -m tests.contract.milvus_server FOLDER PARENT PORT` runs one until the process PARENT has ended, or it gets
a signal; PORT 0 takes a free one. Its address is in FOLDER/address as soon as it answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

STARTS, SECONDS, STEP = 3, 120, 0.2
ROOT = Path(__file__).parents[2]
# Milvus looks after its work in intervals: shorter ones make tests faster, and change nothing else.
HASTE = {
    "queryCoord.checkInterval": 100,
    "queryCoord.checkSegmentInterval": 100,
    "queryCoord.checkChannelInterval": 100,
    "queryCoord.checkIndexInterval": 100,
    "queryCoord.distPullInterval": 100,
    "queryCoord.leaderViewUpdateInterval": 1,
    "queryCoord.UpdateNextTargetInterval": 1,
    "dataCoord.compaction.check.interval": 1,
    "common.session.ttl": 3,
}


def skip_without_milvus() -> None:
    """Skips the test where the server or its client is not installed."""
    for package in ("milvus", "pymilvus"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[str]:
    """The address of the one server in a folder, which the first who asks starts.

    Where several processes run the tests, it ends when the one has ended that runs them.
    """
    several = "PYTEST_XDIST_WORKER" in os.environ
    address, keeper = folder / "milvus" / "address", None
    with open(folder / "milvus.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not address.exists():
            keeper = start(folder / "milvus", os.getppid() if several else os.getpid())
    try:
        yield address.read_text()
    finally:
        if keeper and several:
            keeper.returncode = 0  # nobody here has to wait for it
        elif keeper:
            stop(keeper)
            shutil.rmtree(address.parent)


def start(folder: Path, parent: int, port: int = 0) -> subprocess.Popen[bytes]:
    """Starts a server and waits until it answers."""
    folder.mkdir(exist_ok=True)
    (folder / "address").unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder), str(parent), str(port)]
    with open(folder / "keeper.log", "ab") as log:
        keeper = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    while not (folder / "address").exists():
        if keeper.poll() is not None:
            pytest.fail(f"the Milvus server did not start: see {folder}")
        time.sleep(STEP)
    return keeper


def stop(keeper: subprocess.Popen[bytes]) -> None:
    """Ends a server."""
    keeper.terminate()
    keeper.wait()


def main(folder: Path, parent: int, port: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for _ in range(STARTS):
        if not alive(parent):
            return
        server, address = launch(folder, port)
        try:
            if wait_until_healthy(server, parent):
                (folder / "address.new").write_text(address)
                os.replace(folder / "address.new", folder / "address")
                while alive(parent) and server.server_proc.poll() is None:
                    time.sleep(STEP)
                return
        finally:
            end(server.server_proc)
            if not alive(parent):
                shutil.rmtree(folder)
    sys.exit(f"no healthy server after {STARTS} starts")


def launch(folder: Path, port: int) -> tuple[object, str]:
    """Starts the server's process.

    What it uses is set here, so that servers do not meet: all ports, those of its built-in etcd (which has its own
    file for that), and the folder.
    """
    from milvus import MilvusServer, MilvusServerConfig

    config = MilvusServerConfig(data_dir=str(folder))
    config.try_bind_port = bound
    names = [name for name in config.configurable_items if name.endswith("_port")]
    *ports, client, peer, web = free_ports(len(names) + 3)
    config.update(**dict(zip(names, ports, strict=True)) | ({"proxy_port": port} if port else {}))
    client, peer = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    etcd = {
        "name": "default",
        "initial-cluster": f"default={peer}",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
    }
    (folder / "etcd.yaml").write_text(json.dumps(etcd))  # JSON is YAML
    settings = {"etcd.config.path": folder / "etcd.yaml", **HASTE}
    os.environ.update({name.replace(".", "_").upper(): str(value) for name, value in settings.items()})
    server = MilvusServer(config, wait_for_started=False)
    server.webservice_port = web
    server.start()
    (folder / "process").write_text(str(server.server_proc.pid))
    return server, f"milvus://127.0.0.1:{server.listen_port}"


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [bound(0) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def bound(port: int) -> socket.socket:
    """A socket on a port, also on one whose last server has just ended."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", port))
    return one


def wait_until_healthy(server: object, parent: int) -> bool:
    """Whether the server came up."""
    for _ in range(int(SECONDS / STEP)):
        if server.server_proc.poll() is not None or not alive(parent):
            return False
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.webservice_port}/healthz", timeout=5) as answer:
                if b"OK" in answer.read():
                    return True
        except OSError:
            pass
        time.sleep(STEP)
    return False


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
