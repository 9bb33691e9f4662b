"""One buffer per step, and products in full fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collapse_monitor.measure.pack import Pack
from collapse_monitor.measure.precision import gram, products_are_exact, undisturbed
from tests.measure.windows import Dispatched, normal


def test_everything_travels_in_one_buffer() -> None:
    pack = Pack()
    tensors = [normal(*shape, seed=seed).float() for seed, shape in enumerate([(3,), (2, 4), (3,), (2, 4), (5, 1)])]
    tensors.insert(2, torch.tensor(0.25))
    slots = [pack.add(tensor) for tensor in tensors]
    with Dispatched() as dispatched:
        parcel = pack.send()
    assert parcel.copies == 1
    assert parcel.bytes == 4 * sum(tensor.numel() for tensor in tensors)
    assert dispatched.names.count("cat.default") == 1
    assert parcel.ready()
    for slot, tensor in zip(slots, tensors, strict=True):
        np.testing.assert_array_equal(parcel.read(slot), tensor.numpy())


def test_operations_do_not_grow_with_the_number_of_tensors() -> None:
    counts = []
    for number in (4, 40):
        pack = Pack()
        for _ in range(number):
            pack.add(torch.ones(3))
            pack.add(torch.ones(2, 2))
        with Dispatched() as dispatched:
            pack.send()
        counts.append(len(dispatched.names))
    assert counts[0] == counts[1]


def test_nothing_packed() -> None:
    parcel = Pack().send()
    assert parcel.ready()
    assert parcel.bytes == parcel.copies == 0


def test_other_dtypes_become_fp32() -> None:
    pack = Pack()
    slots = [pack.add(torch.tensor([1, 2])), pack.add(torch.tensor([0.5], dtype=torch.float64)), pack.add(torch.tensor([True]))]
    parcel = pack.send()
    assert [parcel.read(slot).tolist() for slot in slots] == [[1, 2], [0.5], [1]]


def test_the_gram_matrix_of_split_values_is_as_good_as_fp32() -> None:
    rows = normal(3, 24, 300).float()
    exact = rows.double() @ rows.double().mT
    for split in (gram(rows, exact=True), gram(rows, exact=False)):
        assert float((split - exact).abs().max() / exact.abs().max()) < 5e-7


def test_the_parts_of_split_values_survive_bfloat16() -> None:
    """So a product in TF32 or bfloat16 forms them without error: the same result with every factor rounded once more."""
    rows = normal(2, 8, 64).float()
    high = rows.bfloat16().float()
    middle = (rows - high).bfloat16().float()
    low = rows - high - middle
    assert torch.equal(high + middle + low, rows)
    for part in (high, middle, low):
        assert torch.equal(part.bfloat16().float(), part)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_settings_of_the_run_are_respected_and_left_alone(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    rows = normal(3, 32, 256).float()
    exact = rows.double() @ rows.double().mT
    try:
        torch.set_float32_matmul_precision(precision)
        got = gram(rows)
        assert torch.get_float32_matmul_precision() == precision
        assert products_are_exact("cuda") is (precision == "highest")
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((got - exact).abs().max() / exact.abs().max()) < 2e-6  # in bfloat16 it would be 1e-3


def test_undisturbed() -> None:
    rows = torch.ones(2, 3, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (rows @ rows.mT).dtype == torch.bfloat16
        with undisturbed("cpu"):
            product = rows @ rows.mT
        assert torch.is_autocast_enabled("cpu")
    assert product.dtype == torch.float32
    assert not product.requires_grad
