"""Communication-efficient training: optax transformations that talk."""

# Workers
from .spmd import (
    AXIS as AXIS,
    stack as stack,
    unstack as unstack,
    worker_mesh as worker_mesh,
)
from .workers import spread as spread
from .shards import init as init

# What travels
from .compressors import Compressor as Compressor, payload_bytes as payload_bytes
from .selections import random_k as random_k, top_k as top_k
from .quantizers import quantize as quantize, sign as sign
from .topology import (
    Graph as Graph,
    complete as complete,
    exponential as exponential,
    from_matrix as from_matrix,
    mixing_matrix as mixing_matrix,
    one_peer_exponential as one_peer_exponential,
    ring as ring,
    spectral_gap as spectral_gap,
)

# How it travels
from .exchange import (
    Exchange as Exchange,
    gossip as gossip,
    mean as mean,
    weighted_mean as weighted_mean,
)
from .overlap import delayed as delayed, overlapped as overlapped
from .feedback import (
    compressed_mean as compressed_mean,
    difference_feedback as difference_feedback,
    error_feedback as error_feedback,
)
from .lowrank import powersgd as powersgd
from .shards import per_shard as per_shard

# When
from .triggers import (
    Trigger as Trigger,
    any_of as any_of,
    any_worker as any_worker,
    change_exceeds as change_exceeds,
    drift_exceeds as drift_exceeds,
    every as every,
)

# The verbs
from .sync import average as average, self_clocked as self_clocked
from .anchor import rounds as rounds
from .readout import apply_updates as apply_updates, consensus as consensus

from .guard import skip_nonfinite as skip_nonfinite
from .statistics import track as track, with_statistics as with_statistics

# Published methods
from .algorithms.gradients import (
    data_parallel as data_parallel,
    powersgd_sgd as powersgd_sgd,
    sign_sgd as sign_sgd,
    top_k_sgd as top_k_sgd,
)
from .algorithms.local import (
    diloco as diloco,
    local_sgd as local_sgd,
    post_local_sgd as post_local_sgd,
    slow_momentum as slow_momentum,
    slowmo as slowmo,
)
from .algorithms.adaptive import selsync as selsync
from .algorithms.gossip import dpsgd as dpsgd

# Training
from .steps import (
    Sent as Sent,
    counted_step as counted_step,
    local_step as local_step,
)
from .train import Run as Run, fit as fit

# Bytes and seconds
from .ledger import Traffic as Traffic, traffic as traffic
from .hlo import compiled_traffic as compiled_traffic
from .meter import meter as meter
from .network import Link as Link, seconds as seconds

# The laws, for a method of your own
from . import testing as testing
