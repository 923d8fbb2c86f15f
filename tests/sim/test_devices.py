"""Device models against queueing arithmetic done by hand, and the clock."""

import pytest

from kvdepot.errors import StateError
from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.sim.drives import DriveSpeed, Pipe, SimulatedDrives
from kvdepot.sim.event_queue import EventQueue
from kvdepot.sim.gpu import GpuPace, PrefillJob, SimulatedGpu


def test_one_drive_serves_in_order() -> None:
    drives = SimulatedDrives(DriveSpeed(1, 100.0, 100.0, latency_s=0.5, seek_s=1.0))
    # Two blocks of 100 bytes: each 1 s of seek and 1 s of reading; then half a second on the way.
    assert drives.read(0.0, 2, 100.0) == pytest.approx(4.5)
    # One more at 1 s waits until 4 s; at 10 s the drive is idle.
    assert drives.read(1.0, 1, 100.0) == pytest.approx(6.5)
    assert drives.read(10.0, 1, 100.0) == pytest.approx(12.5)
    assert drives.read_busy_s == pytest.approx(8.0)


def test_blocks_are_spread_over_drives_in_turn() -> None:
    drives = SimulatedDrives(DriveSpeed(4, 100.0, 100.0))
    # Six blocks on four drives: two of them have two.
    assert drives.read(0.0, 6, 100.0) == pytest.approx(2.0)
    # The next two go to the drives that have one only.
    assert drives.read(0.0, 2, 100.0) == pytest.approx(2.0)
    assert drives.rate_bytes_per_s(100.0) == pytest.approx(400.0)


def test_the_network_caps_many_drives() -> None:
    network = Pipe(150.0)
    drives = SimulatedDrives(DriveSpeed(4, 100.0, 100.0), (network,))
    assert drives.read(0.0, 4, 100.0) == pytest.approx(400 / 150)
    assert drives.rate_bytes_per_s(100.0) == pytest.approx(150.0)
    assert drives.wait_s(1.0) == pytest.approx(400 / 150 - 1.0)


def test_two_tiers_share_one_network() -> None:
    network = Pipe(100.0)
    first, second = (SimulatedDrives(DriveSpeed(10, 100.0, 100.0), (network,)) for _ in range(2))
    first.read(0.0, 2, 100.0)
    assert second.read(0.0, 1, 100.0) == pytest.approx(3.0)


def test_writes_use_the_time_that_reads_leave() -> None:
    drives = SimulatedDrives(DriveSpeed(2, 100.0, 50.0))
    # Four blocks of 100 bytes, 2 s each, on two drives: 4 s.
    assert drives.write(0.0, 4, 100.0) == 4
    assert drives.read(1.0, 2, 100.0) == pytest.approx(2.0), "a read does not wait for writes"
    assert drives.backlog_s(2.0) == pytest.approx(3.0), "nothing is written meanwhile"
    assert drives.backlog_s(9.0) == 0.0
    assert drives.write_busy_s == pytest.approx(8.0)


def test_too_many_writes_are_dropped() -> None:
    drives = SimulatedDrives(DriveSpeed(1, 100.0, 100.0, backlog_s=3.0))
    assert drives.write(0.0, 5, 100.0) == 3
    assert drives.write(1.0, 5, 100.0) == 1


PACE = GpuPace(PrefillPace(0.0, 0.01, 0.0), weights_s=0.1, context_token_s=0.0, chunk_tokens=100)


def _times(
    pace: GpuPace, jobs: list[tuple[float, int, int, int]]
) -> tuple[list[list[float]], SimulatedGpu]:
    """For jobs (arrival, new, context, answer) the times of their first and last tokens."""
    events = EventQueue()
    gpu = SimulatedGpu(events, pace)
    times: list[list[float]] = [[] for _ in jobs]
    for at, (arrival_s, new, context, answer) in enumerate(jobs):

        def note(at: int = at) -> None:
            times[at].append(events.now_s)

        job = PrefillJob(new, context, answer, note, note)
        events.at(arrival_s, lambda job=job: gpu.add(job))  # type: ignore[misc]
    while events.next():
        pass
    return times, gpu


def test_prefill_in_chunks_then_decode() -> None:
    # 250 tokens: 1 s, 1 s, 0.5 s. Two more tokens of the answer, 0.1 s each for the weights.
    times, gpu = _times(PACE, [(0.0, 250, 0, 3)])
    assert times[0] == pytest.approx([2.5, 2.7])
    assert gpu.busy_s == pytest.approx(2.7)
    assert gpu.prefill_s == pytest.approx(2.5)


def test_a_prompt_waits_for_the_one_before() -> None:
    times, _ = _times(PACE, [(0.0, 100, 0, 1), (0.0, 50, 0, 1)])
    assert [first for first, _ in times] == pytest.approx([1.0, 1.5])


def test_answers_go_on_beside_a_prompt_one_token_a_step() -> None:
    # The second prompt comes at 1.05 s, in the first decoding step, which ends at 1.1 s. Then a
    # step of 99 new tokens and one of the answer (1 s), and one of 1 + 1 tokens (0.1 s: weights).
    times, _ = _times(PACE, [(0.0, 100, 0, 4), (1.05, 100, 0, 1)])
    assert times[0] == pytest.approx([1.0, 2.2])
    assert times[1] == pytest.approx([2.2, 2.2])


def test_attention_grows_with_the_context() -> None:
    pace = GpuPace(PrefillPace(0.0, 0.0, 0.001), 0.0, 0.0, chunk_tokens=10)
    # Pairs: 10 * (20 + 5) and 10 * (30 + 5).
    times, _ = _times(pace, [(0.0, 20, 20, 1)])
    assert times[0][0] == pytest.approx(0.6)


def test_many_decoding_steps_at_once_are_as_long_as_one_by_one() -> None:
    pace = GpuPace(PrefillPace(0.0, 0.0, 0.0), weights_s=1.0, context_token_s=0.1, chunk_tokens=10)
    # Prompt of 10: 1 s. Contexts of 10, 11, 12 while answering: 2 + 2.1 + 2.2.
    times, _ = _times(pace, [(0.0, 10, 0, 4)])
    assert times[0] == pytest.approx([1.0, 7.3])
    # Cut by another prompt after 3.5 s, in the step from 3 to 5.1 s; the rest is the same.
    cut, _ = _times(pace, [(0.0, 10, 0, 4), (3.5, 1, 0, 1)])
    assert cut[0] == pytest.approx([1.0, 7.3])
    assert cut[1][0] == pytest.approx(7.3)


def test_time_does_not_go_backward() -> None:
    events = EventQueue()
    events.at(2.0, lambda: None)
    events.next()
    with pytest.raises(StateError):
        events.at(1.0, lambda: None)
    with pytest.raises(StateError):
        events.at(float("nan"), lambda: None)
