"""Products with few rows: another kernel, the same numbers."""

import pytest
import torch
import torch.nn.functional as F

from dcdm.model import products
from dcdm.model.products import FEW_ROWS, Linear, product


@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 5), (4, 0), (FEW_ROWS + 1, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_equals_pytorchs_whatever_kernel_makes_it(shape, biased):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 48, generator=generator)
    weight = torch.randn(99, 48, generator=generator)[:-3]  # the head's rows without the specials: a view
    bias = torch.randn(96, generator=generator) if biased else None
    with torch.no_grad():
        torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_rows_of_a_slice_are_multiplied_as_they_stand():
    x = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(1))[:, :3]
    layer = Linear(48, 32)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


def test_only_few_rows_without_gradients_in_fp32_go_to_onednn():
    x, weight = torch.randn(4, 48), torch.randn(32, 48)
    with torch.no_grad():
        assert products._served_by_onednn(x, weight) == torch.backends.mkldnn.is_available()
        assert not products._served_by_onednn(x.double(), weight.double())
        assert not products._served_by_onednn(x.repeat(FEW_ROWS, 1), weight)
    assert not products._served_by_onednn(x, weight)
