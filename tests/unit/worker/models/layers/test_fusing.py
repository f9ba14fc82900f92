"""Siblings share one fused product: whoever asks first."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.models.torch.layers import FusedLinear, install_group, linear_groups


class Counted(nn.Linear):
    """Counts its products."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.o_proj = nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(8, 16)


def test_siblings_are_found() -> None:
    """Query, key and value are one group, the rest stand alone, and the head is left out."""
    model = Model()
    groups = list(linear_groups(model, model.head))
    assert [group.names for group in groups] == [("q_proj", "k_proj", "v_proj"), ("o_proj",)]
    assert groups[0].full_names()[0] == "attention.q_proj"


def test_a_sibling_with_a_bias_of_its_own_is_not_joined() -> None:
    """Where only one of the siblings has a bias, each stays a product of its own."""
    model = Model()
    model.attention.k_proj = nn.Linear(8, 4, bias=False)
    assert [len(group.names) for group in linear_groups(model, model.head)] == [1, 1, 1, 1]


@torch.inference_mode()
def test_one_product_in_any_order() -> None:
    """Each sibling gives its own outputs, in whatever order they are asked, and a second input is a second product."""
    model = Model()
    before = [model.attention.q_proj, model.attention.k_proj, model.attention.v_proj]
    joined = Counted(8, 16)
    joined.weight = nn.Parameter(torch.cat([one.weight for one in before]))
    joined.bias = nn.Parameter(torch.cat([one.bias for one in before]))
    install_group(model, next(iter(linear_groups(model, model.head))), joined, [8, 4, 4])
    after = [model.attention.q_proj, model.attention.k_proj, model.attention.v_proj]
    for number, order in enumerate([(0, 1, 2), (2, 0, 1), (1, 2, 0)], start=1):
        inputs = torch.randn(1, 3, 8)
        for index in order:
            assert torch.allclose(after[index](inputs), before[index](inputs), atol=1e-6)
        assert joined.calls == number


@torch.inference_mode()
def test_nothing_is_kept_once_all_have_read() -> None:
    """The same tensor with other values gives other results: nothing of a layer that is done is remembered."""
    joined = Counted(4, 4, bias=False)
    fused = FusedLinear(joined, [2, 2])
    inputs = torch.randn(1, 1, 4)
    first = [fused.part(index, inputs).clone() for index in (0, 1)]
    inputs.mul_(2)
    second = [fused.part(index, inputs) for index in (0, 1)]
    assert torch.allclose(torch.cat(second, -1), 2 * torch.cat(first, -1), atol=1e-6)
    assert joined.calls == 2


@torch.inference_mode()
def test_a_sibling_that_was_not_asked() -> None:
    """A result that nobody fetched is never taken for that of another input."""
    joined = Counted(4, 4, bias=False)
    fused = FusedLinear(joined, [2, 2])
    one, other = torch.randn(1, 1, 4), torch.randn(1, 1, 4)
    fused.part(0, one)
    assert torch.allclose(fused.part(1, other), joined(other)[..., 2:], atol=1e-6)
