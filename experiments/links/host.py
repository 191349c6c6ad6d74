"""What runs on one host: it joins the others, and does what it is told line by line.

A request is a line of JSON, ``{"do": NAME, ...}``, and so is the answer to it. All
hosts get the same requests in the same order, so that they meet in their collectives.
What libraries print goes to the standard error stream.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import lowcomm as lc

from . import calibration, counters
from .methods import TIMED, racing
from .training import Training, task_of

CHUNK = 1 << 16


COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce": lambda x, hosts: lax.psum(x, lc.AXIS),
    "all_gather": lambda x, hosts: lax.all_gather(x, lc.AXIS),
    "all_to_all": lambda x, hosts: lax.all_to_all(x, lc.AXIS, 0, 0, tiled=True),
    "permute": lambda x, hosts: lax.ppermute(
        x, lc.AXIS, [(i, (i + 1) % hosts) for i in range(hosts)]
    ),
}


def probe(
    mesh: Mesh, me: int, collective: str, nbytes: int, repeats: int, after: bool
) -> list[float]:
    """Seconds of a collective of ``nbytes`` a host, time after time.

    As in training, hosts come to it one after the other: each is late by up to 2 ms,
    at random. The time between two ends is counted, less the longest delay. With
    ``after`` a short one goes before.
    """
    talk = COLLECTIVES[collective]

    def inside(x):
        x = x[0]
        if after:
            first = talk(jnp.full(calibration.SHORT // 4, x[0]), mesh.size)
            x = x + 1e-30 * jnp.ravel(first)[0]  # nothing, but it must be there first
        # A sum, so that the result is small and no part of it can be left out.
        return jnp.sum(talk(x, mesh.size)).astype(jnp.float32)[None]

    program = jax.jit(
        jax.shard_map(
            inside,
            mesh=mesh,
            in_specs=P(lc.AXIS),
            out_specs=P(lc.AXIS),
            check_vma=False,
        )
    )
    x = lc.feed(np.ones((1, nbytes // 4), np.float32), mesh)
    lc.at_hand(program(x))  # it is compiled, and makes connections
    delays = np.random.default_rng(0).uniform(0, 0.002, (repeats + 1, mesh.size))
    ends = []
    for late in delays:
        time.sleep(late[me])
        lc.at_hand(program(x))
        ends.append(time.perf_counter())
    return (np.diff(ends) - delays[1:].max(1)).tolist()


def transfer(me: int, nbytes: int, port: int) -> float | None:
    """Bits a second of one connection from host 1 to host 0, as host 0 saw it."""
    if me == 0:
        with socket.create_server(("host0", port)) as server:
            connection, _ = server.accept()
            with connection:
                got = len(connection.recv(CHUNK))
                since = time.perf_counter()
                later = 0
                while part := connection.recv(CHUNK):
                    later += len(part)
                return 8 * later / (time.perf_counter() - since) if got else None
    if me == 1:
        with _connected(("host0", port)) as connection:
            connection.sendall(bytes(nbytes))
    return None


def _connected(address: tuple[str, int], patience: float = 10.0) -> socket.socket:
    """A connection, once the other side listens."""
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def serve(requests: Any, answers: Any) -> None:
    """Join, and answer requests until there are no more."""
    hosts = lc.join()
    me, mesh = int(os.environ["LOWCOMM_PROCESS"]), lc.worker_mesh(hosts)
    prepared: dict[str, Training] = {}
    tasks = functools.cache(functools.partial(task_of, workers=hosts))

    def do(request: dict[str, Any]) -> Any:
        match request.pop("do"):
            case "count":
                return counters.read()
            case "transfer":
                return transfer(me, **request)
            case "probe":
                return probe(mesh, me, **request)
            case "prepare":
                name = request["method"]
                task = tasks(request["task"], request["size"], seed=0)
                prepared[name] = Training(
                    TIMED[name], task, mesh=mesh, me=me, rate=1e-3, seed=0
                )
                return prepared[name].reading()
            case "rounds":
                method = prepared[request["method"]]
                return [method.round() for _ in range(request["rounds"])]
            case "race":
                recipe, seed = racing(request["method"]), request["seed"]
                task = tasks(request["task"], request["size"], seed=seed)
                run = Training(
                    recipe, task, mesh=mesh, me=me, rate=request["rate"], seed=seed
                )
                how = {key: request[key] for key in ("most", "every", "target")}
                return run.race(**how)
            case unknown:
                raise ValueError(f"no request is called {unknown!r}")

    for line in requests:
        print(json.dumps(do(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    to_director = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, to_director)
