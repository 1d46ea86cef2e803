"""Arguments become tensors, or an error that says which and where."""

import pytest
import torch

from rl_loss.arguments import is_integral, numbers, refuse_half, require_tensor


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "None"),
        ("REPLAY", "'REPLAY'"),
        ([None], "None in row 0"),
        ([1.0, 2.0, None, "x"], "None in row 2"),
        ([1, "x"], "'x' in row 1"),
        ([1, [2, 3]], r"\[2, 3\] in row 1"),
        ([[1], [2, 3]], r"\[1\] in row 0"),
        (object, "<class 'object'>"),
        ([1, 2**70], f"{2**70} in row 1"),
    ],
)
def test_what_is_no_number_is_named_with_its_place(value, got):
    with pytest.raises(ValueError, match=f"^tail must be numbers, got {got}$"):
        numbers("tail", value, place="row")


def test_a_long_value_is_shortened():
    with pytest.raises(ValueError, match=r"^x must be numbers, got .{1,60}$"):
        numbers("x", "y" * 10_000)


def test_numbers_of_every_source():
    numpy = pytest.importorskip("numpy")
    for value in ([1, 2], (1, 2), range(1, 3), numpy.array([1, 2]), torch.tensor([1, 2])):
        assert numbers("x", value).tolist() == [1, 2]
    tensor = torch.zeros(2)
    assert numbers("x", tensor) is tensor is require_tensor("x", tensor)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_python_floats_are_float32_under_every_default(default):
    numpy = pytest.importorskip("numpy")
    torch.set_default_dtype(default)
    try:
        values = [numbers("x", value) for value in ([0.1, 2], 0.1, (0.1,), range(0), [])]
        typed = numbers("x", numpy.array([0.1])), numbers("x", torch.tensor([0.1]))
        other = numbers("x", [1]), numbers("x", [True])
    finally:
        torch.set_default_dtype(torch.float32)
    assert [value.tolist() for value in values[:3]] == [
        [torch.tensor(0.1).item(), 2],
        torch.tensor(0.1).item(),
        [torch.tensor(0.1).item()],
    ]
    assert {value.dtype for value in values} == {torch.float32}
    assert [value.dtype for value in typed + other] == [
        torch.float64,
        default,
        torch.int64,
        torch.bool,
    ]


def test_half_precision_is_refused():
    for dtype in (torch.float32, torch.float64, torch.int8, torch.bool):
        tensor = torch.zeros(1, dtype=dtype)
        assert refuse_half("x", tensor) is tensor
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        with pytest.raises(ValueError, match=f"^x must .* got {dtype}.*cast_forward_inputs=False"):
            refuse_half("x", torch.zeros(1, dtype=dtype))


def test_only_integers_are_integral():
    integral = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16}
    for dtype in (*integral, torch.bool, torch.float16, torch.bfloat16, torch.complex64):
        assert is_integral(torch.zeros(1, dtype=dtype)) == (dtype in integral)


def test_a_list_is_no_tensor():
    with pytest.raises(ValueError, match=r"^labels must be a tensor, got list$"):
        require_tensor("labels", [1])
