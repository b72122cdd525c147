"""Run in a network namespace of its own: a survey on a Ray cluster of two nodes, an actor and a node killed under it.

python -m tests.surveys.ray_run MODEL TEXTS OUT [blows] [apart]: `blows` kills, `apart` hides the folder from the nodes.
Prints one line of JSON: how many texts were told, on how many nodes actors ran, who was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import psutil


def loopback_up() -> None:
    """`ip link set lo up`, without the program."""
    up, setting = 1, 0x8914  # IFF_UP, SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, setting, struct.pack("16sh", b"lo", up) + b"\0" * 22)


def only_loopback() -> bool:
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def actors() -> list[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    return [p for p in mine if p.cmdline() and p.cmdline()[0].startswith("ray::SurveyActor")]


def main(model: str, texts: str, out: str, *ways: str) -> None:
    if not only_loopback():
        raise SystemExit("this is not a network namespace of its own: Ray could listen to others")
    loopback_up()
    import ray
    from ray.cluster_utils import Cluster

    import whence
    from whence.surveys import ray_engine

    if "apart" in ways:  # as on nodes without a shared folder: they must send the files back
        whole = ray_engine.SurveyActor.__init__

        def elsewhere(self: Any, task: Any, folder: str, token: str) -> None:
            whole(self, task, f"{folder}-that-is-not-here", token)

        ray_engine.SurveyActor.__init__ = elsewhere  # type: ignore[method-assign]
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    second = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    told: list[float] = []
    killed: list[str] = []
    try:

        def progress(_what: str, done: float, _total: float) -> None:
            told.append(done)
            if "blows" in ways and len(told) == 2:
                victim = actors()[0]
                os.kill(victim.pid, signal.SIGKILL)
                killed.append("actor")
            if "blows" in ways and len(told) == 5:
                cluster.remove_node(second, allow_graceful=False)
                killed.append("node")

        found = whence.survey(model, texts, out, shard_size=2, engine="ray", address=cluster.address, progress=progress)
        nodes = len({n["NodeID"] for n in ray.nodes()}) if ray.is_initialized() else 2
        print(json.dumps({"complete": found.complete, "told": told[-1], "killed": killed, "nodes": nodes}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), sys.argv[2], sys.argv[3], *sys.argv[4:])
