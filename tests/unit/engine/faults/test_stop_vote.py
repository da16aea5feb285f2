"""The vote of one rank; that of several is in tests/distributed/test_stopping.py."""

from cascade_train.engine.faults.stop_vote import Ballot, Motion


def test_what_the_only_rank_wants_is_carried_at_once(world):
    ballot = Ballot(timeout_seconds=5)
    assert ballot.cast(Motion(0)) == Motion(0)
    assert ballot.cast(Motion.STOP) == Motion.STOP
    assert ballot.cast(Motion.STOP | Motion.SAVE_FAILED) == Motion.STOP | Motion.SAVE_FAILED
