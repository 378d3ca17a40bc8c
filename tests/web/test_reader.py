"""Several threads read one run at once."""

import threading
from pathlib import Path

import torch

from backstory.web.reader import Reader


def test_each_thread_has_its_own_open_run(text_run: Path) -> None:
    reader, found = Reader(text_run), list[object]()
    threads = [threading.Thread(target=lambda: found.append(reader.run)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.run is reader.run
    assert len({id(x) for x in [*found, reader.run]}) == 4


def test_threads_read_at_once(text_run: Path) -> None:
    reader, errors = Reader(text_run), list[BaseException]()
    expected = reader.run.store.read(0, 72).rows
    assert expected is not None

    def read() -> None:
        try:
            for _ in range(20):
                found = reader.run.store.read(0, 72).rows
                assert found is not None
                assert torch.equal(found, expected)
                assert len(reader.run.content(["law/1/0", "tags"])) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
