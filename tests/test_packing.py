"""The wire format, bit for bit."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY

from rl_loss.packing import bytes_of_numbers, numbers_of_bytes, pack_entries, unpack_entries

# float32 bit patterns: 0, -0, smallest and largest denormals of both signs, 1, -1, the largest
# finite numbers, infinities, quiet and signalling NaN of both signs with payloads.
BITS = [
    0x00000000,
    0x80000000,
    0x00000001,
    0x807FFFFF,
    0x007FFFFF,
    0x3F800000,
    0xBF800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC00000,
    0x7FC12345,
    0x7F800001,
    0xFFBFFFFF,
    0xFFFFFFFF,
]
IDS = [0, 1, 151935, 2**16, 2**31 - 1]


def signed(value, width):
    return value - (1 << width) if value >> (width - 1) else value


def floats_of(bits):
    return torch.tensor([signed(b, 32) for b in bits], dtype=torch.int32).view(torch.float32)


def check_exact(bits, ids, id_dtype):
    """Packed words and round trip against plain Python integers."""
    id_tensor = torch.tensor(ids, dtype=id_dtype)
    packed = pack_entries(id_tensor, floats_of(bits))
    assert packed.dtype == torch.int64
    expected = [signed(b << 32 | i, 64) for b, i in zip(bits, ids, strict=True)]
    assert packed.tolist() == expected
    back_ids, back = unpack_entries(packed)
    assert (back_ids.dtype, back.dtype) == (torch.int32, torch.float32)
    assert back_ids.tolist() == ids
    assert back.view(torch.int32).tolist() == [signed(b, 32) for b in bits]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_every_special_float_with_every_extreme_id(id_dtype):
    pairs = [(b, i) for b in BITS for i in IDS]
    check_exact([b for b, _ in pairs], [i for _, i in pairs], id_dtype)


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1)), max_size=20))
def test_any_bits_come_back(entries):
    check_exact([b for b, _ in entries], [i for _, i in entries], torch.int64)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_does_not_matter(default):
    torch.set_default_dtype(default)
    try:
        check_exact(BITS, [7] * len(BITS), torch.int64)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_layout_is_that_of_the_design():
    """float32 bits in the upper half, the id in the lower, as any other language reads them."""
    packed = pack_entries(torch.tensor([7, 2**31 - 1]), torch.tensor([-0.5, -0.0]))
    for word, (token, value) in zip(packed.tolist(), [(7, -0.5), (2**31 - 1, -0.0)], strict=True):
        low, high = struct.unpack("<If", struct.pack("<q", word))
        assert (low, high) == (token, value)
        assert math.copysign(1, high) == -1


def test_the_id_is_kept_whatever_its_sign():
    """-1 (what a sampler's unused slots hold) comes back -1 and leaves the log-probability be."""
    ids, logprobs = unpack_entries(pack_entries(torch.tensor([-1]), torch.tensor([-2.5])))
    assert ids.tolist() == [-1]
    assert logprobs.tolist() == [-2.5]


def test_strided_and_shaped_inputs():
    ids = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    logprobs = -torch.arange(24, dtype=torch.float32).reshape(4, 6) / 8
    packed = pack_entries(ids[:, ::2].T, logprobs[:, ::2].T)
    assert torch.equal(packed, pack_entries(ids, logprobs)[:, ::2].T)
    back_ids, back = unpack_entries(pack_entries(ids, logprobs)[::2, 1:])
    assert torch.equal(back_ids, ids[::2, 1:])
    assert torch.equal(back, logprobs[::2, 1:])
    expanded = pack_entries(ids[:1, :1].expand(3, 1), logprobs[:1, :1].expand(3, 1))
    assert expanded.tolist() == [[int(expanded[0, 0])]] * 3


def test_no_entries():
    packed = pack_entries(torch.empty(0, dtype=torch.int32), torch.empty(0))
    ids, logprobs = unpack_entries(packed)
    assert packed.tolist() == ids.tolist() == logprobs.tolist() == []


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        (torch.zeros(2), torch.zeros(2), "ids must be int32 or int64, got torch.float32"),
        (torch.zeros(2).bool(), torch.zeros(2), "ids must be int32 or int64, got torch.bool"),
        (torch.zeros(2).short(), torch.zeros(2), "ids must be int32 or int64, got torch.int16"),
        (torch.zeros(2).long(), torch.zeros(2).double(), "logprobs must be float32, got .*float64"),
        (torch.zeros(2).long(), torch.zeros(2).bfloat16(), "logprobs must be float32, got .*bflo"),
        (torch.zeros(2).long(), torch.zeros(2).long(), "logprobs must be float32, got .*int64"),
        (torch.zeros(2).long(), torch.zeros(3), r"one shape, got \(2,\) and \(3,\)"),
        (torch.zeros(2).long(), torch.zeros(2, 1), r"one shape, got \(2,\) and \(2, 1\)"),
    ],
)
def test_wrong_inputs_of_pack(ids, logprobs, message):
    with pytest.raises(ValueError, match=message):
        pack_entries(ids, logprobs)


def test_lists_are_named():
    ids, logprobs = torch.tensor([1]), torch.zeros(1)
    for call, name in [
        (lambda: pack_entries([1], logprobs), "ids"),
        (lambda: pack_entries(ids, [0.0]), "logprobs"),
        (lambda: unpack_entries([1]), "packed"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must be a tensor, got list$"):
            call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float32, torch.bool])
def test_wrong_dtype_of_unpack(dtype):
    with pytest.raises(ValueError, match=f"packed must be int64, got {dtype}"):
        unpack_entries(torch.zeros(3, dtype=dtype))


def test_plain_bytes_keep_every_bit():
    ids, logprobs = torch.tensor(IDS, dtype=torch.int32), floats_of(BITS)
    assert bytes_of_numbers(ids) == struct.pack(f"={len(IDS)}i", *IDS)
    assert bytes_of_numbers(logprobs) == struct.pack(f"={len(BITS)}I", *BITS)
    assert torch.equal(numbers_of_bytes("ids", bytes_of_numbers(ids), torch.int32), ids)
    back = numbers_of_bytes("logprobs", bytes_of_numbers(logprobs), torch.float32)
    assert torch.equal(back.view(torch.int32), logprobs.view(torch.int32))
    strided = torch.arange(12, dtype=torch.int32)[::3]
    assert bytes_of_numbers(strided) == struct.pack("=4i", 0, 3, 6, 9)
    assert bytes_of_numbers(ids[:0]) == b""
    assert numbers_of_bytes("ids", b"", torch.int32).tolist() == []
