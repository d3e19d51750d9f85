"""Ranks meet in one round, whatever earlier ones left in the store and however apart they come."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore

from fp4train.parallel.rendezvous import Round

Connect = Callable[[], TCPStore]


@pytest.fixture
def connect() -> Connect:
    """Makes a connection to a store that outlives its rounds."""
    bound = timedelta(seconds=20)
    keeper = TCPStore("localhost", 0, None, True, bound, wait_for_workers=False)
    return lambda: TCPStore("localhost", keeper.port, None, False, bound, wait_for_workers=False)


def rounds(connect: Connect, size: int) -> list[Round]:
    return [Round(rank, size, connect()) for rank in range(size)]


def met(ranks: Sequence[Round]) -> set[str | None]:
    """The names of the round as its ranks know it, once they have met."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        hosts = list(pool.map(lambda this: this.meet(15), ranks))
    assert hosts == [[socket.gethostname()] * len(ranks)] * len(ranks)
    return {this.name for this in ranks}


def test_all_ranks_of_a_round_have_its_name_and_those_of_the_next_another(connect: Connect) -> None:
    names = [met(rounds(connect, 3)) for _ in range(3)]
    assert [len(of_round) for of_round in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.long
def test_a_round_waits_for_a_rank_whose_word_of_the_last_round_is_there(connect: Connect) -> None:
    met(rounds(connect, 2))
    lead, late = rounds(connect, 2)
    with pytest.raises(DistStoreError, match=r"within 0\.5 s"):
        lead.meet(0.5)
    assert lead.absent() == [1]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(lead.meet, 15)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        late.meet(15)
        waiting.result(15)
    assert lead.name == late.name


def test_a_rank_that_comes_again_is_waited_for_under_another_name(connect: Connect) -> None:
    """It ended after it had come, and its machine's torchrun started it anew."""
    lead, dead = rounds(connect, 2)
    dead.store.set("came/1", "left")
    with pytest.raises(DistStoreError):
        lead.meet(0.1)
    first_name = lead.name
    (name,) = met([lead, Round(1, 2, connect())])
    assert name != first_name


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_that_do_not_come_are_named(connect: Connect, size: int) -> None:
    *_, last = rounds(connect, size)
    with pytest.raises(DistStoreError):
        last.meet(0.1)
    assert last.absent() == list(range(size - 1))
