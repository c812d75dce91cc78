"""Two ranks: processes that stay up, meet over gloo, and run what they are handed."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

RANKS = 2


def _run(meeting, rank, scenario, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    try:
        return scenario(rank, *arguments)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gradaccum"])
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(RANKS)]
    for pool in pools:  # its threads start with the first call, and stay
        pool.submit(int).result()
    yield pools
    for pool in pools:
        pool.shutdown()


@pytest.fixture
def on_ranks(processes, tmp_path):
    """Run ``scenario(rank, *arguments)`` on each rank, and return what they returned, in order."""

    def run(scenario, *arguments):
        meeting = tmp_path / f"meeting {len(list(tmp_path.iterdir()))}"
        running = [
            pool.submit(_run, meeting, rank, scenario, arguments)
            for rank, pool in enumerate(processes)
        ]
        return [one.result(timeout=60) for one in running]

    return run
