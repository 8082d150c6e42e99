"""Hosts that are namespaces of this machine, joined by a switch. Each has its own network, so that
what leaves it can be counted, and its own processes, which end together. Needs root.

    with network(2) as hosts:
        process = hosts[0].start([sys.executable, "-c", PROGRAM])  # at hosts[0].address"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.support.time_limit import limit_s

INTERFACE = "host0"
_COMMANDS = "ip", "unshare"


def why_not() -> str:
    """Return why this machine cannot have such hosts, or ""."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    absent = [command for command in _COMMANDS if shutil.which(command) is None]
    if absent:
        return f"the commands {absent} are not installed"
    try:
        with network(1) as [host]:
            tried = host.start(["true"], {}, stderr=subprocess.PIPE)
            message = tried.communicate(timeout=limit_s())[1]
            return f"process namespaces are refused: {message}" if tried.returncode else ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.strip()}"


@dataclasses.dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """Start the only program of this host. When it is killed, all its processes are."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *apart, *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **environment},
            text=True,
            **options,
        )


def sent_nbytes() -> int:
    """Return what has left the host of the caller."""
    with open("/proc/net/dev") as file:
        [line] = [each for each in file if each.strip().startswith(f"{INTERFACE}:")]
    return int(line.partition(":")[2].split()[8])


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Raises subprocess.CalledProcessError if the system refuses."""
    name = f"fsdp{os.getpid()}"
    switch = f"{name}-switch"
    hosts = [Host(f"{name}-{n}", f"10.77.0.{n + 1}") for n in range(num_hosts)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch0", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch0", "up")
        for number, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            port = f"port{number}"
            peer = "peer", "name", INTERFACE, "netns", host.namespace
            _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "switch0", "up")
            inside = "-n", host.namespace
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip(*inside, "link", "set", INTERFACE, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield hosts
    finally:
        for namespace in (switch, *(host.namespace for host in hosts)):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
