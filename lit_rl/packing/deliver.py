"""Stop 10: the rows of a step, from rank 0 to the rank that runs them; the one data collective of lit_rl."""

from __future__ import annotations

from lit_rl.errors import PackingError
from lit_rl.packing.planner import StepPlan
from lit_rl.tensors import StepBatch


def deliver(plan: StepPlan | None, rank: int, world_size: int) -> StepBatch:
    """This rank's part of the step.

    Args:
        plan: The step; rank 0 has it, the others pass None.
        rank: This process's data-parallel rank.
        world_size: Number of data-parallel ranks.

    Raises:
        PackingError: the plan is for another number of ranks, or there is more than one (the scatter is not there yet).
    """
    if world_size != 1 or plan is None:
        raise PackingError(f"rows are delivered to one rank only for now; this is rank {rank} of {world_size}")
    if len(plan.rows) != world_size:
        raise PackingError(f"the step was planned for {len(plan.rows)} ranks and is run by {world_size}")
    return StepBatch(
        rows=tuple(plan.rows[rank]),
        totals=plan.totals,
        policy_version=plan.policy_version,
        sample_versions=plan.sample_versions,
        stats=plan.stats,
    )
