"""The number of torch's threads: 1 inside, as before outside, whatever happens inside or beside."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from whence.core.numerics.threads import one_thread


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_restored_after_an_error_and_when_nested() -> None:
    def job() -> None:
        with one_thread():
            with one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1  # the inner block must not undo the outer one
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        job()
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("last", ["first comer", "second comer"])
def test_restored_in_every_thread_in_whatever_order_they_leave(last: str) -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def beside() -> None:
        with one_thread():
            seen.append(torch.get_num_threads())
            entered.set()
            leave.wait(10)
        seen.append(torch.get_num_threads())

    other = threading.Thread(target=beside)
    with one_thread():
        other.start()
        entered.wait(10)
        if last == "first comer":
            leave.set()
            other.join()
        assert torch.get_num_threads() == 1
    leave.set()
    other.join()
    assert seen == [1, 3]
    assert torch.get_num_threads() == 3
    fresh: list[int] = []
    late = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert fresh == [3]  # a thread that begins afterwards


def test_a_job_of_small_operations_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.core import make
    from whence.core.attention import alternatives, interior_point, verdict

    seen: list[int] = []
    real = torch.linalg.cholesky_ex

    def watched(*args: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(interior_point.torch.linalg, "cholesky_ex", watched)
    attention, values = make.attention(40, 40), make.values(40, 6)
    verdict.row_verdicts(attention, values)
    alternatives.alternative_attention(attention, values, rounds=1, workers=2)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3
