"""One thread beside the loop does what it is handed, in order."""

import threading

import pytest

from cascade_train.engine.checkpoint.writing import Background


def test_all_pieces_are_done_in_order_by_one_thread():
    background, done = Background(name="beside"), []
    pieces = [background.begin(lambda n=n: done.append((n, threading.current_thread()))) for n in range(3)]
    for piece in pieces:
        piece.result()
    assert [number for number, _ in done] == [0, 1, 2]
    assert {thread.name for _, thread in done} == {"beside"}
    assert len({id(thread) for _, thread in done}) == 1
    background.end()
    assert not done[0][1].is_alive()


def test_a_piece_that_fails_is_told_to_who_waits_and_the_next_is_done():
    background, opened = Background(name="beside"), threading.Event()

    def fail():
        assert opened.wait(10)
        raise ValueError("no room")

    failing, next_one = background.begin(fail), background.begin(opened.is_set)
    assert not failing.done()
    opened.set()
    with pytest.raises(ValueError, match="no room"):
        failing.result()
    next_one.result()
    background.end()


def test_another_piece_begins_another_thread_after_the_end():
    background, threads = Background(name="beside"), []
    for _ in range(2):
        background.begin(lambda: threads.append(threading.current_thread())).result()
        background.end()
    background.end()
    assert threads[0] is not threads[1]
