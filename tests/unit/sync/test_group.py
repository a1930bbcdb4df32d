"""The process group of a weight transfer, between two real processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from lit_rl.sync.group import Group, Receiver, TransferBroken, announce, join_store
from lit_rl.sync.wire import Layout

SIZE = 256 * 2**20
TIMEOUT_S = 20.0

TRAINER = f"""
import time, torch
from lit_rl.sync.group import Group, host_store

store = host_store(0, {TIMEOUT_S})
print(store.port, flush=True)
group = Group(store, "g", 0, 2, address="127.0.0.1", meet_timeout={TIMEOUT_S}, timeout={TIMEOUT_S})
group.post(torch.ones({SIZE}, dtype=torch.uint8))
time.sleep(60)
"""


def test_a_trainer_killed_in_the_middle_of_a_chunk_is_noticed_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        store = join_store("127.0.0.1", int(trainer.stdout.readline()), TIMEOUT_S)
        announce(store, "g", 1)
        group = Group(store, "g", 1, 2, address="127.0.0.1", meet_timeout=TIMEOUT_S, timeout=TIMEOUT_S)
        receiver = Receiver(group, Layout.plan([("weight", torch.uint8, (SIZE,))], SIZE))
        threading.Thread(target=lambda: kill_once_begun(trainer, receiver), daemon=True).start()
        started = time.monotonic()

        with pytest.raises(TransferBroken, match="broke off"):
            list(receiver.receive())

        assert time.monotonic() - started < TIMEOUT_S / 4
        group.give_up()


def kill_once_begun(trainer: subprocess.Popen[str], receiver: Receiver) -> None:
    """With the first bytes of the chunk; the rest of its 256 MiB is still at the trainer."""
    while not receiver._stream[0]:
        time.sleep(0.0001)
    trainer.kill()


ENDS_WHILE_A_PEER_HANGS = f"""
import threading, time, torch
from lit_rl.sync.group import Group, host_store, join_store

store = host_store(0, {TIMEOUT_S})
ends = dict(address="127.0.0.1", meet_timeout={TIMEOUT_S}, timeout=1.0)
peer = []
meets = threading.Thread(target=lambda: peer.append(Group(join_store("127.0.0.1", store.port, 20), "g", 1, 2, **ends)))
meets.start()
group = Group(store, "g", 0, 2, **ends)
meets.join()
group.post(torch.ones(1000, dtype=torch.uint8))  # the peer never receives: this ends after a second
group.give_up()


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # while the interpreter ends, a thread that comes back to it is ended


slow = Slow()
"""


def test_a_process_that_ends_while_a_group_does_keeps_its_exit_status() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_A_PEER_HANGS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "terminate called" in ended.stderr) == (0, False), ended.stderr
