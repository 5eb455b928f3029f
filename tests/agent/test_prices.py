from holdfast.prices import LEAST_IDLE, Prices


class Heard(list):
    def __call__(self, *told):
        self.append(told)


def prices():
    heard = Heard()
    return Prices(heard), heard


def idle(prices, seconds=1.0, times=LEAST_IDLE):
    for _ in range(times):
        prices.iteration(seconds, in_flight=False)


def test_a_checkpoint_costs_what_its_iterations_took_longer_than_idle_ones():
    each, heard = prices()
    idle(each)
    each.iteration(1.5, in_flight=True)
    each.settled("thread", 0.25)
    each.iteration(1.25, in_flight=True)
    assert heard == [("thread", 0.75, 0.25)]


def test_the_next_checkpoint_begins_from_nothing():
    each, heard = prices()
    idle(each)
    for seconds in (1.5, 1.25):
        each.settled("process", 0.5)
        each.iteration(seconds, in_flight=True)
        idle(each, times=2)
    assert heard == [("process", 0.5, 0.5), ("process", 0.25, 0.5)]


def test_two_that_end_together_share_what_they_cost():
    each, heard = prices()
    idle(each)
    each.settled("thread", 0.25)
    each.settled("process", 0.5)
    each.iteration(2.0, in_flight=True)
    assert heard == [("thread", 0.5, 0.25), ("process", 0.5, 0.5)]


def test_nothing_is_said_without_idle_iterations_to_compare_with():
    each, heard = prices()
    for _ in range(5):
        each.settled("thread", 0.25)
        each.iteration(3.0, in_flight=True)
    assert heard == []
    idle(each)
    each.settled("thread", 0.25)
    each.iteration(1.5, in_flight=True)
    assert heard == [("thread", 0.5, 0.25)]
