"""Where tensors lie in the stream, at both ends."""

from __future__ import annotations

import torch

from lit_rl.sync.wire import Layout

F32, BF16 = torch.float32, torch.bfloat16


def test_tensors_lie_at_aligned_places_one_after_the_other() -> None:
    layout = Layout.plan([("a", F32, (3,)), ("b", F32, (40,))], chunk_bytes=128)

    assert [(slot.offset, slot.nbytes) for slot in layout.slots] == [(0, 12), (64, 160)]
    assert layout.total == 224


def test_the_stream_is_cut_into_equal_chunks_and_a_rest() -> None:
    layout = Layout.plan([("a", F32, (3,)), ("b", F32, (40,))], chunk_bytes=128)

    assert [layout.bounds(chunk) for chunk in range(layout.chunks)] == [(0, 128), (128, 224)]


def test_a_tensor_is_complete_with_the_chunk_that_holds_its_last_byte() -> None:
    layout = Layout.plan([("a", F32, (3,)), ("b", F32, (40,)), ("c", F32, (1,))], chunk_bytes=128)

    assert [layout.chunks_until(slot) for slot in layout.slots] == [1, 2, 3]


def test_a_tensor_that_ends_with_its_chunk_needs_no_further_one() -> None:
    layout = Layout.plan([("a", F32, (32,)), ("b", F32, (32,))], chunk_bytes=128)

    assert [layout.chunks_until(slot) for slot in layout.slots] == [1, 2]


def test_a_bfloat16_tensor_after_an_odd_number_of_bytes_is_read_back() -> None:
    layout = Layout.plan([("flag", torch.uint8, (3,)), ("w", BF16, (2, 2))])
    stream = torch.zeros(layout.total, dtype=torch.uint8)
    layout.slots[1].view(stream).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    assert layout.slots[1].view(stream).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert layout.slots[0].view(stream).tolist() == [0, 0, 0]


def test_both_ends_plan_the_same_layout() -> None:
    layout = Layout.plan([("a", BF16, (2, 3)), ("b", F32, ())], chunk_bytes=64)

    assert Layout.from_json(**layout.to_json()) == layout
