"""The simulation: time, gates, shared units, queues."""

import pytest

from fovea.costs.engine import Delay, Gate, Queue, Simulation, Until, Use


def test_two_users_of_a_unit_take_as_long_as_their_work_together():
    simulation = Simulation()

    def worker(cycles):
        yield Use("work", {"alu": cycles})

    simulation.spawn("a", worker(100.0))
    simulation.spawn("b", worker(300.0))
    assert simulation.run() == pytest.approx(400.0)
    ends = {span.lane: span.end for span in simulation.spans}
    # Both at half speed until the shorter one is through.
    assert ends == {"a": pytest.approx(200.0), "b": pytest.approx(400.0)}
    assert simulation.busy["alu"] == pytest.approx(400.0)


def test_users_of_different_units_do_not_slow_each_other():
    simulation = Simulation()

    def worker(unit):
        yield Use("work", {unit: 100.0})

    simulation.spawn("a", worker("alu"))
    simulation.spawn("b", worker("mufu"))
    assert simulation.run() == pytest.approx(100.0)


def test_an_activity_that_asks_half_of_a_unit_leaves_the_other_half():
    simulation = Simulation()

    def worker(floor):
        yield Use("work", {"shared": 50.0}, floor=floor)

    simulation.spawn("a", worker(100.0))
    simulation.spawn("b", worker(100.0))
    assert simulation.run() == pytest.approx(100.0)


def test_a_gate_lets_go_when_it_was_opened_often_enough():
    simulation = Simulation()
    gate = Gate("full")
    seen = []

    def producer():
        for _ in range(3):
            yield Delay(10.0)
            simulation.open(gate)

    def consumer():
        yield Until(gate, 2)
        seen.append(simulation.now)
        yield Until(gate, 1)
        seen.append(simulation.now)

    simulation.spawn("producer", producer())
    simulation.spawn("consumer", consumer())
    simulation.run()
    assert seen == [20.0, 20.0]


def test_a_queue_runs_its_jobs_one_after_the_other():
    simulation = Simulation()
    queue, first, second = Queue(simulation, "tensor"), Gate("first"), Gate("second")
    seen = []

    def issuer():
        queue.put(Use("S", {"tensor": 30.0}), first)
        queue.put(Use("O", {"tensor": 50.0}), second)
        yield Until(first, 1)
        seen.append(simulation.now)
        yield Until(second, 1)
        seen.append(simulation.now)

    simulation.spawn("issuer", issuer())
    simulation.run()
    assert seen == [30.0, 80.0]


def test_roles_that_wait_for_each_other_are_reported_with_what_they_wait_for():
    simulation = Simulation()

    def waiter():
        yield Until(Gate("never"), 1)

    simulation.spawn("mma", waiter())
    with pytest.raises(RuntimeError, match=r"wait for each other: mma for never 1 \(is 0\)"):
        simulation.run()
