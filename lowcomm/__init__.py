"""Communication-efficient training: optax transformations that talk."""

# Workers
from .spmd import (
    AXIS as AXIS,
    stack as stack,
    worker_mesh as worker_mesh,
)
from .workers import spread as spread
from .shards import init as init

# Processes
from .jobs import join as join, preempted as preempted
from .processes import (
    at_hand as at_hand,
    feed as feed,
    unstack as unstack,
    workers_at_hand as workers_at_hand,
)
from .agreement import check_alike as check_alike

# What travels
from .compressors import (
    Compressor as Compressor,
    Contraction as Contraction,
    Unbiased as Unbiased,
    payload_bytes as payload_bytes,
)
from .selections import random_k as random_k, top_k as top_k
from .spectral import dct_top_k as dct_top_k
from .quantizers import quantize as quantize
from .signs import one_bit as one_bit, sign as sign
from .levels import natural as natural, qsgd as qsgd, ternary as ternary
from .codebooks import codebook as codebook
from .sketches import count_sketch as count_sketch
from .randomized import thc as thc
from .topology import (
    Graph as Graph,
    clusters as clusters,
    complete as complete,
    exponential as exponential,
    from_matrix as from_matrix,
    lazy as lazy,
    mixing_matrix as mixing_matrix,
    one_peer_exponential as one_peer_exponential,
    random_matchings as random_matchings,
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
from .overlap import (
    delayed as delayed,
    overlapped as overlapped,
    stale_anchor as stale_anchor,
)
from .leaders import leader as leader, toward as toward
from .penalty import penalized_mean as penalized_mean, roll_back as roll_back
from .feedback import (
    compressed_mean as compressed_mean,
    difference_feedback as difference_feedback,
    error_feedback as error_feedback,
)
from .two_stage import two_stage as two_stage, two_stage_feedback as two_stage_feedback
from .votes import majority_vote as majority_vote
from .masked import masked_feedback as masked_feedback, staged as staged
from .neighbours import choco as choco
from .talk import PerLeaf as PerLeaf
from .lowrank import powersgd as powersgd, rank_fraction as rank_fraction
from .lossless import (
    lossless_homomorphic as lossless_homomorphic,
    sparsified as sparsified,
)
from .sketching import sketched as sketched, sketched_top_k as sketched_top_k
from .flattened import flattened as flattened
from .shards import per_shard as per_shard
from .sharded import sharded as sharded

# When
from .triggers import (
    Trigger as Trigger,
    any_of as any_of,
    any_worker as any_worker,
    change_exceeds as change_exceeds,
    drift_exceeds as drift_exceeds,
    every as every,
    reaches as reaches,
)
from .schedules import (
    at_steps as at_steps,
    before as before,
    doubling as doubling,
    growing as growing,
    quadratic_period as quadratic_period,
    thinning as thinning,
)
from .phases import after as after, occasional as occasional

# The verbs
from .sync import average as average, self_clocked as self_clocked
from .anchor import rounds as rounds
from .links import proximal as proximal, random_pull as random_pull
from .moments import averaged_moments as averaged_moments
from .readout import apply_updates as apply_updates, consensus as consensus

# What is not finite, and who is not there any more
from .guard import (
    restart_nonfinite as restart_nonfinite,
    skip_nonfinite as skip_nonfinite,
)
from .survivors import surviving as surviving, surviving_mean as surviving_mean
from .resize import resize as resize

from .statistics import (
    recompute_statistics as recompute_statistics,
    track as track,
    with_statistics as with_statistics,
)

from .preconditioner import (
    hessian_diagonal as hessian_diagonal,
    hessian_products as hessian_products,
    mean_of_squares as mean_of_squares,
    shared_scaling as shared_scaling,
    square_of_mean as square_of_mean,
)
from .norm_test import (
    corrected as corrected,
    global_test as global_test,
    local_test as local_test,
    norm_test as norm_test,
    per_sample_test as per_sample_test,
    sample_variances as sample_variances,
)

# Published methods
from .algorithms.gradients import (
    data_parallel as data_parallel,
    powersgd_sgd as powersgd_sgd,
    sign_sgd as sign_sgd,
    top_k_sgd as top_k_sgd,
)
from .algorithms.edgc import edgc as edgc
from .algorithms.factored import dion as dion
from .algorithms.local import (
    des_loc as des_loc,
    local_sgd as local_sgd,
    output_average as output_average,
    post_local_sgd as post_local_sgd,
    swap as swap,
    two_level_local_sgd as two_level_local_sgd,
)
from .algorithms.outer import (
    diloco as diloco,
    muloco as muloco,
    palsgd as palsgd,
    slow_momentum as slow_momentum,
    slowmo as slowmo,
)
from .algorithms.streaming import streaming_diloco as streaming_diloco
from .algorithms.single import gpa as gpa, snoo as snoo
from .algorithms.adaptive import (
    adaptive_batch as adaptive_batch,
    savic as savic,
    selsync as selsync,
    selsync_gradients as selsync_gradients,
)
from .algorithms.gossip import (
    choco_sgd as choco_sgd,
    dpsgd as dpsgd,
    noloco as noloco,
)
from .algorithms.sparse import demo as demo, dgc as dgc, lags_sgd as lags_sgd
from .algorithms.differences import diana as diana, ef21 as ef21
from .algorithms.sparse_rounds import (
    qsparse_local_sgd as qsparse_local_sgd,
    sparse_loco as sparse_loco,
)
from .algorithms.sketched import (
    fetch_sgd as fetch_sgd,
    lossless_sgd as lossless_sgd,
    sketched_sgd as sketched_sgd,
    thc_sgd as thc_sgd,
)
from .algorithms.layerwise import edit as edit
from .algorithms.slots import (
    dreamddp as dreamddp,
    partial_local_sgd as partial_local_sgd,
)
from .algorithms.population import leader_sgd as leader_sgd, pso_ps as pso_ps
from .algorithms.overlap import (
    cocod_sgd as cocod_sgd,
    layered_sgd as layered_sgd,
    od_sgd as od_sgd,
    oldsgd as oldsgd,
    overlap_local_sgd as overlap_local_sgd,
)
from .algorithms.precision import (
    quantized_sgd as quantized_sgd,
    sign_vote_sgd as sign_vote_sgd,
)
from .algorithms.one_bit import (
    one_bit_adam as one_bit_adam,
    zero_one_adam as zero_one_adam,
)
from .algorithms.server import prlc as prlc
from .pulls import (
    listed_pulls as listed_pulls,
    random_pulls as random_pulls,
    staggered_pulls as staggered_pulls,
)

# Training
from .steps import (
    Sent as Sent,
    counted_step as counted_step,
    local_step as local_step,
    microbatched as microbatched,
)
from .fused import counted_round as counted_round, local_round as local_round
from .train import Run as Run, fit as fit

# Bytes and seconds
from .ledger import Traffic as Traffic, traffic as traffic
from .hlo import compiled_traffic as compiled_traffic
from .scheduled import scheduled as scheduled
from .meter import meter as meter
from .network import (
    Link as Link,
    Network as Network,
    break_even_bandwidth as break_even_bandwidth,
    collective_seconds as collective_seconds,
    run_seconds as run_seconds,
    seconds as seconds,
)
from .timeline import (
    Transfer as Transfer,
    exposed_seconds as exposed_seconds,
    seconds_to as seconds_to,
    timeline as timeline,
)
from .stragglers import (
    compute_times as compute_times,
    exponential_tail as exponential_tail,
    lognormal as lognormal,
    one_slow as one_slow,
    steady as steady,
    synced_seconds as synced_seconds,
)
from .planning.advice import advise as advise
from .loading import flat_seconds as flat_seconds, layered_seconds as layered_seconds

# The laws, for a method of your own
from . import testing as testing
