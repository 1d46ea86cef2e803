"""Arguments become tensors, or an error that says which and where."""

import pytest
import torch

from rl_loss.arguments import is_integral, numbers, require_tensor


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
    assert numbers("x", [1], torch.float32).dtype == torch.float32
    tensor = torch.zeros(2)
    assert numbers("x", tensor) is tensor is require_tensor("x", tensor)


def test_only_integers_are_integral():
    integral = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16}
    for dtype in (*integral, torch.bool, torch.float16, torch.bfloat16, torch.complex64):
        assert is_integral(torch.zeros(1, dtype=dtype)) == (dtype in integral)


def test_a_list_is_no_tensor():
    with pytest.raises(ValueError, match=r"^labels must be a tensor, got list$"):
        require_tensor("labels", [1])
