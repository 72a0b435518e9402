"""Plan how weights move between two layouts: transfers, rounds, and the order of the target's ranks.

Pure: uses the standard library only. Start with `plan_reallocation`.
"""

from lightning_realloc.realloc.placement import choose_rank_order
from lightning_realloc.realloc.plan import RankTraffic, ReallocationPlan, Transfer, format_bytes
from lightning_realloc.realloc.planner import PLANNER_VERSION, plan_reallocation
from lightning_realloc.realloc.publication import PublicationPlan, SharedShard, Write, plan_publication
from lightning_realloc.realloc.schedule import Schedule, schedule_transfers

__all__ = [
    "PLANNER_VERSION",
    "PublicationPlan",
    "RankTraffic",
    "ReallocationPlan",
    "Schedule",
    "SharedShard",
    "Transfer",
    "Write",
    "choose_rank_order",
    "format_bytes",
    "plan_publication",
    "plan_reallocation",
    "schedule_transfers",
]
