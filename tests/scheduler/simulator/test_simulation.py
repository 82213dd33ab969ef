"""The simulator gives the closed forms where there are some, and keeps what the fair order promises elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.order.fair import FairTree
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.report import compare, quantile, table
from scheduler.simulator.simulation import ByArrival, Simulation
from scheduler.simulator.trainer import Work
from scheduler.simulator.workloads import CHAT, FLOOD, REASONING, SMALL, TOOLS, Workload

#: One token a second, whoever shares it; prompts and passes take no time.
PLAIN = Cluster(
    replicas=1, gpus_per_replica=1, slots=4, decode_s=1.0, decode_s_per_sequence=0.0, prefill_speed=1e12,
    ranks=1, trained_tokens_per_s_per_gpu=1e12, pass_s=0.0,
)  # fmt: skip
LOOP = Workload("loop", groups=1, group_size=4, prompt=0, lengths=(10, 10, 10, 40), trains=False, steps=3)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]


@pytest.mark.parametrize("gpus", [2, 3, 31, 32, 33, 256, 100_000])
def test_a_cluster_has_no_more_gpus_than_are_given(gpus: int) -> None:
    """It had a trainer beside generators that took all GPUs, so training ran on nobody's machine."""
    for percent in range(1, 100):
        cluster = Cluster.of(gpus, percent / 100)
        assert (cluster.gpus, min(cluster.replicas, cluster.ranks) > 0) == (gpus, True), percent


def test_one_tenant_alone_waits_for_its_stragglers() -> None:
    result = Simulation(PLAIN, [LOOP]).run(1e6)
    assert result.seconds == pytest.approx(3 * 40)
    assert result.occupancy == pytest.approx(70 / 160)
    assert result.sampled_tokens == 3 * 70


def test_a_loop_that_begins_later_is_as_long() -> None:
    result = Simulation(PLAIN, [LOOP, replace(LOOP, begins_s=200.0)]).run(1e6)
    assert result.seconds == pytest.approx(200 + 3 * 40)
    assert result.waits_s() == [0.0] * len(result.waits_s())
    assert Simulation(PLAIN, [replace(LOOP, begins_s=200.0)]).run(199.0).sampled_tokens == 0


def test_a_second_tenant_fills_what_the_first_one_leaves() -> None:
    alone, both = (Simulation(PLAIN, [replace(LOOP, steps=20)] * count).run(1e6) for count in (1, 2))
    assert both.backfill == pytest.approx(1.0)
    assert both.occupancy > 1.5 * alone.occupancy


def test_no_slot_is_idle_while_requests_wait() -> None:
    result = Simulation(Cluster.of(64), [REASONING, TOOLS, SMALL, FLOOD] * 2).run(3600)
    assert result.generators.contended_s > 0
    assert result.backfill == pytest.approx(1.0)


def test_lone_loops_leave_the_trainer_waiting_as_the_case_studies_say() -> None:
    cluster = Cluster.of(256)
    waits = [Simulation(cluster, [load]).run(8 * 3600).trainer_wait for load in (REASONING, TOOLS)]
    assert 0.30 <= waits[0] < waits[1] <= 0.76


def test_training_takes_what_the_passes_take() -> None:
    cluster = replace(PLAIN, trained_tokens_per_s_per_gpu=1.0, pass_tokens=10**9)
    loop = replace(LOOP, trains=True, steps=2)
    result = Simulation(cluster, [loop]).run(1e6)
    assert result.trained_tokens == 2 * 70
    assert result.trainers.seconds == pytest.approx(140)
    assert result.seconds == pytest.approx(2 * (40 + 70))


def test_an_overlapped_loop_trains_while_it_samples() -> None:
    cluster = replace(PLAIN, trained_tokens_per_s_per_gpu=1.75, pass_tokens=70)
    loop = Workload("loop", groups=1, group_size=2, prompt=0, lengths=(35,), steps=20)
    together, overlapped = (Simulation(cluster, [replace(loop, overlap=k)]).run(1e6).seconds for k in (0, 1))
    assert together == pytest.approx(20 * (35 + 40))
    assert overlapped == pytest.approx(35 + 20 * 40)


#: Always something queued, and nothing else to wait for.
BACKLOG = replace(FLOOD, groups=256, overlap=1, trains=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flood_holds_others_up_by_one_request_and_their_fair_share(seed: int) -> None:
    """When a chat comes, a group that is being placed goes first, whole: that is this queue's pass."""
    cluster = Cluster.of(4)
    calm, flooded, by_arrival = (
        Simulation(cluster, loads, seed=seed, queue=queue).run(6 * 3600).waits_s("chat")
        for loads, queue in (
            ([CHAT] * 16, FairTree),
            ([CHAT] * 16 + [BACKLOG] * 3, FairTree),
            ([CHAT] * 16 + [BACKLOG] * 3, ByArrival),
        )
    )
    one_group_s = BACKLOG.group_size * BACKLOG.max_tokens / cluster.tokens_per_s
    fair_share_s = CHAT.max_tokens * 19 / cluster.tokens_per_s
    assert quantile(flooded, 0.95) - quantile(calm, 0.95) <= one_group_s + fair_share_s
    assert len(flooded) > 0.3 * len(calm)
    assert len(by_arrival) < 0.03 * len(calm)


#: Several passes of data at once, again and again; and a client that trains a little, now and then.
TRAINS_MUCH = Workload("much", groups=64, overlap=7, samples=False)
TRAINS_LITTLE = Workload("little", 1, 8, prompt=500, mean_tokens=1000, max_tokens=2000, think_s=60.0, samples=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flood_of_training_holds_others_up_by_one_pass_and_their_fair_share(seed: int) -> None:
    """From when the data reach the trainer until the policy that has learned from them is saved."""
    cluster = Cluster.of(32)
    calm, flooded, by_arrival = (
        sorted(
            wait
            for tenant in Simulation(cluster, loads, seed=seed, queue=queue).run(3 * 3600).tenants
            if tenant.workload is TRAINS_LITTLE
            for wait in tenant.training_s
        )
        for loads, queue in (
            ([TRAINS_LITTLE] * 4, FairTree),
            ([TRAINS_LITTLE] * 4 + [TRAINS_MUCH] * 2, FairTree),
            ([TRAINS_LITTLE] * 4 + [TRAINS_MUCH] * 2, ByArrival),
        )
    )
    one_pass_s = cluster.pass_takes_s(cluster.pass_tokens)
    most_tokens = TRAINS_LITTLE.group_size * (TRAINS_LITTLE.prompt + TRAINS_LITTLE.max_tokens)
    fair_share_s = one_pass_s * most_tokens * 6 / cluster.pass_tokens
    assert quantile(flooded, 0.95) - quantile(calm, 0.95) <= one_pass_s + fair_share_s
    assert len(flooded) > 0.3 * len(calm)
    assert len(by_arrival) < 0.1 * len(calm)


def test_weights_divide_a_full_cluster() -> None:
    loads = [BACKLOG, replace(BACKLOG, weight=3)]
    light, heavy = Simulation(Cluster.of(8), loads).run(6 * 3600).tenants
    assert heavy.sampled_tokens / light.sampled_tokens == pytest.approx(3, rel=0.1)


def test_equal_floods_get_equal_shares_whatever_their_lengths() -> None:
    """Requests are charged what they used: a client that asks for much and stops early is not held back."""
    brief = replace(BACKLOG, mean_tokens=1500.0, sigma=0.3, prompt=0, groups=2048)
    wordy = replace(BACKLOG, mean_tokens=12_000.0, sigma=0.3, prompt=0)
    first, second = Simulation(Cluster.of(8), [brief, wordy]).run(6 * 3600).tenants
    assert first.sampled_tokens / second.sampled_tokens == pytest.approx(1, rel=0.1)


def test_sampled_tokens_that_are_not_trained_yet_are_half_way() -> None:
    """Ten tokens a second are sampled and trained at once for eight steps; the ninth has four tokens at the end."""
    loop = Workload("loop", groups=2, group_size=1, prompt=0, lengths=(4, 10), overlap=0)
    result = Simulation(PLAIN, [loop]).run(85.0)
    assert (result.sampled_tokens, result.trained_tokens, result.half_way_tokens) == (8 * 14 + 4, 8 * 14, 4)


def test_counting_may_begin_later() -> None:
    whole = Simulation(PLAIN, [replace(LOOP, steps=0)]).run(400.0)
    later = Simulation(PLAIN, [replace(LOOP, steps=0)]).run(320.0, after_s=80.0)
    assert (later.seconds, later.sampled_tokens) == (320.0, whole.sampled_tokens - 2 * 70)
    assert later.occupancy == pytest.approx(whole.occupancy)


def test_a_group_is_on_one_generator() -> None:
    """Two generators of four slots: a group of six has four at once and two behind them, though slots are free."""
    two = replace(PLAIN, replicas=2)
    six = Workload("six", groups=1, group_size=6, prompt=0, lengths=(10,), trains=False, steps=1)
    assert Simulation(two, [six]).run(1e6).seconds == pytest.approx(20)
    assert Simulation(two, [replace(six, groups=6, group_size=1)]).run(1e6).seconds == pytest.approx(10)


def test_handover_front_and_turnaround_take_their_time() -> None:
    """Two batches of eight requests on four slots: the way in of the first, two turns of a handover and ten steps each,
    the way out of the last four, and the client's turn."""
    slow = replace(PLAIN, handover_s=2.0, front_s=0.2, turnaround_s=5.0)
    eight = Workload("eight", groups=8, group_size=1, prompt=0, lengths=(10,), trains=False, steps=2)
    result = Simulation(slow, [eight]).run(1e6)
    assert result.seconds == pytest.approx(2 * (0.1 + 2 * (2 + 10) + 4 * 0.1 + 5), abs=0.5)
    assert result.occupancy == pytest.approx(8 * 10 / (4 * 20), abs=0.05)


def test_a_simulation_is_deterministic() -> None:
    rows = [list(compare(Cluster.of(64), [4], 1.0)) for _ in range(2)]
    assert rows[0] == rows[1]
    assert "by arrival" in table(rows[0])


#: Ten tokens a second and rank; a pass is what one tenant has at once.
TWO = replace(PLAIN, trainers=2, trained_tokens_per_s_per_gpu=10.0, pass_tokens=100)
TRAINS = Workload("trains", groups=1, group_size=1, prompt=0, lengths=(100,), samples=False, steps=40)


def test_a_second_trainer_takes_half_of_the_runs() -> None:
    one, two = (Simulation(replace(TWO, trainers=count), [TRAINS] * 4).run(1e6) for count in (1, 2))
    assert one.seconds == pytest.approx(4 * 40 * 10)
    assert two.seconds == pytest.approx(2 * 40 * 10, rel=0.03)
    assert two.trained_tokens == one.trained_tokens == 4 * 40 * 100
    assert two.trainer_wait < 0.03


def test_one_run_alone_is_as_fast_as_one_trainer() -> None:
    assert Simulation(TWO, [TRAINS]).run(1e6).seconds == pytest.approx(40 * 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_several_trainers_serve_is_fair_and_evened_out(seed: int) -> None:
    """Three loops that never wait, on two trainers that each compute a third more than one loop gets."""
    loops = [replace(TRAINS, steps=0, overlap=3)] * 3
    result = Simulation(TWO, loops, seed=seed).run(20_000, after_s=200)
    served = sorted(tenant.trained_tokens for tenant in result.tenants)
    assert result.trainer_wait < 0.01
    assert served[-1] <= 2.05 * served[0]  # a run is on one trainer at a time
    assert sum(served) == pytest.approx(2 * 10 * result.seconds, rel=0.01)


def test_ranks_compute_while_they_gather() -> None:
    ranks = replace(TWO, trainers=1, ranks=4, pass_s=1.0, gather_s=5.0)
    assert ranks.pass_takes_s(80) == pytest.approx(1 + 5)
    assert ranks.pass_takes_s(400) == pytest.approx(1 + 10)
    assert replace(ranks, slice_s=0.5, light_s=0.25).pass_takes_s(400, slices=6, light=2) == pytest.approx(1 + 3.5 + 10)
    assert ranks.pass_takes_s(80, stages=2) == pytest.approx(2 * (1 + 5))
    owners = replace(ranks, gather_s=0.0, travel_s=0.25, adapter_s=0.5)
    assert owners.pass_takes_s(80, stages=2, runs=3) == pytest.approx(2 * 1 + 2 + 80 * 0.25 + 3 * 0.5)
    assert Simulation(ranks, [TRAINS]).run(1e6).seconds == pytest.approx(40 * 6)


def test_a_batch_of_short_data_is_few_slices_and_only_what_samples_is_saved() -> None:
    """Cut by the service's own code: eight data of 64 tokens in a slice of 1,024, or four of 128."""
    cluster = replace(PLAIN, trained_tokens_per_s_per_gpu=64.0, slice_s=0.5, light_s=0.25, pass_tokens=10_000)
    cluster, pairs = replace(cluster, pair_s=0.001), 8 * 64**2
    load = Workload("short", groups=1, group_size=8, prompt=0, lengths=(64,), steps=1)
    for sliced, slices, samples, light in ((1024, 1, False, 1), (128, 4, False, 1), (128, 4, True, 2)):
        result = Simulation(replace(cluster, slice_tokens=sliced), [replace(load, samples=samples)]).run(1e6)
        seconds = 512 / 64 + slices * 0.5 + light * 0.25 + pairs * 0.001
        assert result.trainers == Work(1, 1, slices, light, 512, pairs, pytest.approx(seconds), 1)


def test_data_behind_a_step_of_their_run_are_a_stage_of_their_own() -> None:
    """Two steps of one run in a pass are two stages; two runs' first steps are one."""
    cluster = replace(PLAIN, trained_tokens_per_s_per_gpu=100.0, pass_s=1.0, pass_tokens=250)
    once = Workload("once", groups=1, group_size=1, prompt=0, lengths=(100,), samples=False, steps=1)
    twice = replace(once, steps=2, overlap=1)
    assert Simulation(cluster, [twice]).run(1e6).trainers == Work(1, 2, 2, 2, 200, 20_000, pytest.approx(2 * 1 + 2), 2)
    assert Simulation(cluster, [once, once]).run(1e6).trainers == Work(1, 1, 2, 2, 200, 20_000, pytest.approx(1 + 2), 2)
