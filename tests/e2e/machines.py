"""Machines on a network of their own: namespaces joined by a bridge, whose links can be cut.

Needs root. Where that is not so, or the kernel has none, all share this machine's loopback.
"""

import os
import subprocess
from typing import Self

HOST = "127.0.0.1"


class Machines:
    """A scope. `host` is where servers listen; `command` runs something on a machine."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._id = os.getpid() % 60000
        self._made: list[list[str]] = []
        self.host = HOST
        self.apart = False

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            return self
        net = f"10.203.{self._id % 250}"
        bridge = self._bridge
        try:
            self._make(["link", "add", bridge, "type", "bridge"], ["link", "del", bridge])
            self._ip("addr", "add", f"{net}.1/24", "dev", bridge)
            self._ip("link", "set", bridge, "up")
            for number, name in enumerate(self._names, 2):
                space, link = self._space(name), self._link(name)
                self._make(["netns", "add", space], ["netns", "del", space])
                ends = ["type", "veth", "peer", "name", "eth0", "netns", space]
                self._ip("link", "add", link, *ends)
                self._ip("link", "set", link, "master", bridge, "up")
                self._ip("-n", space, "addr", "add", f"{net}.{number}/24", "dev", "eth0")
                self._ip("-n", space, "link", "set", "eth0", "up")
                self._ip("-n", space, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, FileNotFoundError):
            self.__exit__()
            return self
        self.host, self.apart = f"{net}.1", True
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._made):
            subprocess.run(["ip", *undo], check=False, capture_output=True)
        self._made.clear()

    def command(self, name: str, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._space(name), *command] if self.apart else command

    def cut(self, name: str, *, off: bool) -> None:
        """Take a machine off the network, or bring it back."""
        self._ip("link", "set", self._link(name), "down" if off else "up")

    @property
    def _bridge(self) -> str:
        return f"kvb{self._id}"

    def _space(self, name: str) -> str:
        return f"kv{self._id}{name}"

    def _link(self, name: str) -> str:
        return f"kv{self._id}{name}"

    def _make(self, do: list[str], undo: list[str]) -> None:
        self._ip(*do)
        self._made.append(undo)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)
