"""The devices of a target, as its compiler describes them; no machine is needed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from .chips import Target

# No chip is used: several compilers may run at once, nobody is asked which machine this
# is, and the CUDA libraries that would run a program are not needed.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
PLUGINS = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}

# What the CUDA driver says of one, in the text form of XLA's GpuTargetConfigProto.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# What lets a compiler move computation between the start and the end of a transfer.
# XLA has one collective on its way at a time on GPUs unless it is told otherwise. Local
# steps have two of their own, inside a worker; gossip sends every leaf by itself.
OPTIONS: dict[str, dict[str, Any]] = {
    "tpu": {},
    "cuda": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
    },
}


class Cluster(NamedTuple):
    """The devices of a target, ``[slices, devices of a slice]``."""

    target: Target
    devices: np.ndarray

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's, for ``lowered.compile(compiler_options=...)``."""
        return OPTIONS[self.target.chip.platform]


def missing(platform: str) -> str | None:
    """What must be installed to compile for ``platform``; None where it is there."""
    if importlib.util.find_spec(PLUGINS[platform]):
        return None
    return (
        f"the compiler for {platform} is not installed here: make targets, or "
        f"pip install -c constraints.txt '.[{platform}]'"
    )


def cluster(target: Target) -> Cluster:
    """The devices of ``target``, slice by slice.

    Raises:
        ModuleNotFoundError: the compiler is not installed; says what installs it.
        RuntimeError: the compiler knows no such machine.
    """
    environment()
    platform = target.chip.platform
    if lacking := missing(platform):
        raise ModuleNotFoundError(lacking)
    how: dict[str, Any] = {"num_slices": target.slices}
    name = target.name
    if platform == "cuda":
        shape = f"{target.slices}x{target.sides}"
        name, how = "", {"topology": shape, "target_config": H100}
    try:
        with _quiet():
            described = topologies.get_topology_desc(
                platform=platform, topology_name=name, **how
            )
    except jax.errors.JaxRuntimeError as problem:
        raise RuntimeError(
            f"the compiler for {platform} describes no {target.slices} slices of "
            f"{target.name}: {problem}"
        ) from problem
    devices = np.array(described.devices)
    expected = target.slices * target.devices
    if devices.size != expected:
        raise RuntimeError(
            f"{target.slices} slices of {target.name} should have {expected} devices, "
            f"and the compiler describes {devices.size}."
        )
    return Cluster(target, devices.reshape(target.slices, target.devices))


def environment() -> None:
    """Set what the compilers want to find, before JAX starts, on the CPU."""
    jax.config.update("jax_platforms", "cpu")
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without libtpu's complaints, on the way, that this machine has no TPU."""
    old = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(old, 2)
        os.close(old)
        os.close(null)
