"""Eight simulated CPU devices for every test, before JAX starts."""

import gc
import os
from pathlib import Path

import pytest

# Eight devices share the cores with whatever else runs: one that waits for its turn is
# not stuck, and XLA would abort the process after 40 seconds. (Tests of hangs start
# processes of their own, with limits of their own.)
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"
)

import jax

jax.config.update("jax_num_cpu_devices", 8)

# Programs compiled once serve both test processes and later runs. No test needs it.
jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="module")
def programs_go_with_their_module():
    """Each program holds memory maps, of which a process has 65,530 and no more."""
    yield
    jax.clear_caches()
    gc.collect()
