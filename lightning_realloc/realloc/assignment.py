"""Which worker should take which job, so that the sum of gains is largest? (The assignment problem, exactly.)"""

from __future__ import annotations

from collections.abc import Sequence


def assign_jobs(gains: Sequence[Sequence[int]]) -> list[int]:
    """The job of every worker that maximises the sum of ``gains[worker][job]``, each job taken at most once.

    Needs at least as many jobs as workers. O(workers² · jobs), in exact integers. Source: the shortest augmenting
    path form of the Hungarian method, Jonker and Volgenant, Computing 38 (1987).
    """
    num_workers, num_jobs = len(gains), len(gains[0]) if gains else 0
    assert num_workers <= num_jobs or not gains, "every worker needs a job"
    # Row and column 0 are virtual: worker 0 is the one being placed, job 0 where its path starts.
    worker_price, job_price = [0] * (num_workers + 1), [0] * (num_jobs + 1)
    taken_by = [0] * (num_jobs + 1)
    for worker in range(1, num_workers + 1):
        taken_by[0] = worker
        _augment(gains, worker_price, job_price, taken_by)
    jobs = [0] * num_workers
    for job in range(1, num_jobs + 1):
        if taken_by[job]:
            jobs[taken_by[job] - 1] = job - 1
    return jobs


def _augment(
    gains: Sequence[Sequence[int]], worker_price: list[int], job_price: list[int], taken_by: list[int]
) -> None:
    """Find a job for the worker in ``taken_by[0]`` along the cheapest alternating path, updating the prices."""
    num_jobs = len(job_price) - 1
    slack: list[float] = [float("inf")] * (num_jobs + 1)
    previous = [0] * (num_jobs + 1)
    open_jobs = list(range(1, num_jobs + 1))
    reached = [0]
    job = 0
    while taken_by[job]:
        worker = taken_by[job]
        row, offset = gains[worker - 1], worker_price[worker]
        for candidate in open_jobs:
            cost = -row[candidate - 1] - offset - job_price[candidate]
            if cost < slack[candidate]:
                slack[candidate], previous[candidate] = cost, job
        nearest = min(open_jobs, key=slack.__getitem__)
        step = int(slack[nearest])
        for done in reached:
            worker_price[taken_by[done]] += step
            job_price[done] -= step
        for candidate in open_jobs:
            slack[candidate] -= step
        open_jobs.remove(nearest)
        reached.append(nearest)
        job = nearest
    while job:
        taken_by[job] = taken_by[previous[job]]
        job = previous[job]
