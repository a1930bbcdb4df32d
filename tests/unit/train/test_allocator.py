"""Freed memory stays in the process, unless the user has said what malloc should do."""

import subprocess
import sys

import pytest

ONE_BLOCK = """
import resource
from lit_rl.train.allocator import keep_freed_memory

print(keep_freed_memory())
bytearray(200_000_000)  # the first one faults its pages in
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    block = bytearray(200_000_000)
    block[::4096] = bytes(len(block[::4096]))
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(env: dict[str, str]) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", ONE_BLOCK], capture_output=True, text=True, timeout=60, env=env)
    said, faults = done.stdout.split()
    return said, int(faults)


def test_large_blocks_are_reused_without_a_page_fault():
    said, faults = run({})
    assert said == "True"
    assert faults < 50_000  # 5 x 200 MB are 244,000 pages


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"])
def test_what_the_user_set_stays(name):
    said, _ = run({name: "2"})
    assert said == "False"
