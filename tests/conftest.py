"""Eight simulated CPU devices for every test, before JAX starts."""

from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

# Programs compiled once serve both test processes and later runs. No test needs it.
jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
