"""What becomes of each kind of state when the number of workers changes: the table.

By type, and field by field: the rules are those of ``lowcomm.handover``. Fields that
are not named are states themselves, or counts; what is equal on all workers is copied
without a rule.
"""

from __future__ import annotations

import math

import jax
import numpy as np
import optax

from .algorithms.edgc import EDGCState
from .algorithms.factored import DionState
from .algorithms.gossip import NoLoCoState
from .algorithms.local import OutputState
from .algorithms.one_bit import OneBitAdamState, ZeroOneAdamState
from .algorithms.outer import SlowMomentumState
from .algorithms.population import LeaderSgdState, PsoPsState
from .algorithms.server import ServerState
from .algorithms.single import GPAState, SNOOState
from .algorithms.slots import SlotsState
from .anchor import RoundsState
from .exchange import GossipState
from .feedback import DifferenceFeedbackState, ErrorFeedbackState
from .flattened import FlattenedState
from .guard import RestartNonfiniteState, SkipNonfiniteState
from .handover import (
    Plan,
    Rules,
    Whole,
    begun,
    bound_to_graph,
    counted,
    hand_over,
    mixed,
    rows,
    same,
    worst,
)
from .lossless import LosslessState, SparsifiedState
from .lowrank import PowerSGDState
from .masked import MaskedFeedbackState
from .moments import AveragedMomentsState
from .neighbours import ChocoState
from .norm_test import NormTestState
from .overlap import DelayedState, OverlappedState, StaleAnchorState
from .penalty import PenaltyState
from .phases import AfterState, OccasionalState
from .preconditioner import ScalingState
from .row_means import row_size
from .shards import PerShardState
from .sketching import SketchedState, SketchedTopKState
from .survivors import SurvivingState
from .sync import AverageState, SelfClockedState
from .triggers import ChangeState, ReachedState
from .two_stage import TwoStageState


def _recut(state: TwoStageState, plan: Plan) -> TwoStageState:
    """The residual of the mean is one vector a leaf, cut in rows for the workers."""

    def cut(whole, shard):
        shard = rows(shard)
        if shard.ndim != 2:
            raise ValueError(
                "keeps rows of shards inside per_shard, and cannot be resized: begin "
                "its state anew"
            )
        entries = math.prod(whole.shape[1:])
        size = row_size(entries, plan.after)
        flat = shard.reshape(-1)[:entries]  # what is behind them is zero
        return np.pad(flat, (0, plan.after * size - entries)).reshape(-1, size)

    error = hand_over(state.error, plan, mixed, rules={})
    return TwoStageState(error, jax.tree.map(cut, state.error, state.shard))


RULES: Rules = {
    # What moves parameters. An anchor and what moves it are the same on all workers.
    AverageState: {},
    RoundsState: {"anchor": same, "outer": same, "pending": same},
    ServerState: {"anchor": same, "server": same},
    SlotsState: {},
    SelfClockedState: {},
    AfterState: {},
    OccasionalState: {},
    # A model beside the parameters is as far from them, at the mean, as it was.
    SNOOState: {"own_anchor": mixed, "pending": mixed},
    GPAState: {"fast": mixed, "own_anchor": mixed},
    NoLoCoState: {"own_anchor": mixed, "velocity": mixed},
    OutputState: {"output": mixed, "total": same},
    OverlappedState: {"correction": mixed},
    StaleAnchorState: {"launched": mixed, "before": mixed},
    LeaderSgdState: {"losses": mixed, "leaders": mixed},
    # A best position and its loss belong together: who is new has found none yet.
    PsoPsState: {"velocity": begun, "best": mixed, "best_loss": worst},
    # Moments, and what is frozen for all.
    SlowMomentumState: mixed,
    AveragedMomentsState: {},
    OneBitAdamState: {"mu": same, "nu": same},
    ZeroOneAdamState: {
        "mu": mixed,
        "nu": same,
        "summed": mixed,  # what will be sent, and how far the model is from the anchor
        "rates": same,
        "anchor": same,
    },
    ScalingState: {"diagonal": same},
    NormTestState: {"batch_size": same},
    # What is still to be said: each owes a K′-th of the mean where it owed a K-th.
    ErrorFeedbackState: mixed,
    MaskedFeedbackState: {"unsent": mixed},
    SparsifiedState: mixed,
    SketchedTopKState: mixed,
    SketchedState: same,  # of the sum, which all keep
    LosslessState: same,
    PowerSGDState: {"query": same, "residual": mixed},
    EDGCState: {"query": same, "residual": mixed, "control": same},
    DionState: {"query": same, "momentum": mixed},
    TwoStageState: Whole(_recut),
    # What was said: heard is its mean, and stays it.
    DifferenceFeedbackState: {"said": mixed, "heard": same},
    ChocoState: bound_to_graph,  # a sum over neighbours that others do not have
    GossipState: counted,
    # What is on its way; where all hear alike it is equal.
    DelayedState: {"arriving": mixed},
    FlattenedState: {},
    PerShardState: {},
    PenaltyState: mixed,
    SurvivingState: {"absences": begun},
    # What a worker has seen of itself.
    ChangeState: mixed,
    ReachedState: mixed,
    SkipNonfiniteState: {"skipped": begun},
    RestartNonfiniteState: {"restarts": begun},
    # Averages of gradients, of their squares, of iterates. (Not curvatures between two
    # iterates, as of L-BFGS, nor estimates of a scale.)
    optax.MultiStepsState: {"acc_grads": mixed},
    optax.ScaleByScheduleState: {},
    optax.InjectHyperparamsState: {},
    optax.InjectStatefulHyperparamsState: {},
    optax.ApplyIfFiniteState: {},
    **dict.fromkeys(
        (
            optax.TraceState,
            optax.EmaState,
            optax.FactoredState,
            optax.ScaleByAdamState,
            optax.ScaleByAmsgradState,
            optax.ScaleByAdanState,
            optax.ScaleByAdaDeltaState,
            optax.ScaleByBeliefState,
            optax.ScaleByLionState,
            optax.ScaleByNovogradState,
            optax.ScaleByRmsState,
            optax.ScaleByRssState,
            optax.ScaleByRStdDevState,
            optax.ScaleBySM3State,
            optax.contrib.MuonState,
            optax.contrib.ScaleByAdemamixState,
        ),
        mixed,
    ),
    optax.contrib.ScheduleFreeState: {"z": mixed},
    optax.contrib.SophiaState: {"mu": mixed, "nu": mixed},
}
