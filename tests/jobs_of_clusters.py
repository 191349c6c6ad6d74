"""What clusters tell the processes that they start."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def of_open_mpi(port: int, process: int, processes: int) -> dict[str, str]:
    """What ``mpirun`` would tell a process."""
    return {
        "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
    }
