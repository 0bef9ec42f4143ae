"""The chunked loss against its plain twin: losses, gradients, and what it doesn't keep in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from arriero.model import loss as loss_module
from arriero.model.loss import (
    IGNORED_TARGET,
    LossHead,
    chunk_tokens,
    linear_cross_entropy,
    plain_linear_cross_entropy,
)

HIDDEN, VOCAB = 24, 101
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_FEWEST_TOKENS", 16)
    monkeypatch.setattr(loss_module, "_MOST_TOKENS", 16)


def inputs(tokens: int, dtype: torch.dtype = torch.float32, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=draw).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype)
    targets = torch.randint(VOCAB, (tokens,), generator=draw)
    targets[torch.rand(tokens, generator=draw) < ignored] = IGNORED_TARGET
    return hidden, weight, targets


def run(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: float = 1.0) -> list[Tensor]:
    """Loss, losses of the tokens, gradients of both matrices."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    total, losses = loss(hidden, weight, targets)
    assert (total.dtype, losses.dtype) == (torch.float32, torch.float32)
    assert (total.shape, losses.shape) == ((), targets.shape)
    assert not losses.requires_grad
    (total * upstream).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (hidden.dtype, weight.dtype)
    return [total.detach(), losses, hidden.grad, weight.grad]


# Divides by the chunk of 16, doesn't, is smaller, is one token.
@pytest.mark.parametrize("tokens", [64, 50, 16, 17, 5, 1])
@pytest.mark.parametrize("upstream", [1.0, -0.3, 1 / 3])
def test_fp32_equals_the_plain_loss(tokens: int, upstream: float) -> None:
    given = inputs(tokens)
    given[2][0] = 3
    for ours, plain in zip(
        run(linear_cross_entropy, *given, upstream), run(plain_linear_cross_entropy, *given, upstream), strict=True
    ):
        assert plain.abs().max() > 0
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("upstream", [1.0, 1 / 3, 1 / 1371])
def test_bf16_is_as_near_to_fp32_as_the_plain_loss(upstream: float) -> None:
    """Against the same numbers in fp64: relative errors of 2⁻⁹ are one rounding to bf16, which is what is allowed."""
    hidden, weight, targets = inputs(200, torch.bfloat16)
    exact = run_exact(hidden, weight, targets, upstream)
    for loss in (linear_cross_entropy, plain_linear_cross_entropy):
        found = run(loss, hidden, weight, targets, upstream)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        # Logits are rounded to bf16 by the product itself, so single losses are off by 2⁻⁹ of the logits.
        assert errors[0] < 1e-3
        assert errors[1] < 4e-3
        assert errors[2] < 6e-3
        assert errors[3] < 6e-3


def test_bf16_gradients_are_scaled_in_fp32() -> None:
    """1/3 rounded to bf16 is 0.18 % too large, and with it would be every gradient below the head."""
    given = inputs(200, torch.bfloat16)
    one, third = (run(linear_cross_entropy, *given, upstream) for upstream in (1.0, 1 / 3))
    assert torch.equal(third[2], (one[2].float() * (1 / 3)).bfloat16())
    assert not torch.equal(third[2], one[2] * torch.tensor(1 / 3).bfloat16())


def run_exact(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: float) -> list[Tensor]:
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    losses = functional.cross_entropy(hidden @ weight.T, targets, reduction="none", ignore_index=IGNORED_TARGET)
    (losses.sum() * upstream).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [losses.sum().detach(), losses.detach(), hidden.grad, weight.grad]


def test_ignored_targets_cost_nothing() -> None:
    hidden, weight, targets = inputs(50, ignored=0.5)
    total, losses, hidden_grad, weight_grad = run(linear_cross_entropy, hidden, weight, targets)
    ignored = targets == IGNORED_TARGET
    assert 0 < ignored.sum() < 50
    assert (losses[ignored] == 0).all()
    assert (losses[~ignored] > 0).all()
    assert (hidden_grad[ignored] == 0).all()
    alone = run(linear_cross_entropy, hidden[~ignored], weight, targets[~ignored])
    torch.testing.assert_close([total, weight_grad], [alone[0], alone[3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b10_a_micro_batch_without_targets_gives_zero_and_not_nan(dtype: torch.dtype) -> None:
    hidden, weight, _ = inputs(40, dtype)
    for tensor in run(linear_cross_entropy, hidden, weight, torch.full((40,), IGNORED_TARGET)):
        assert (tensor == 0).all()


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(40)
    for tensor in run(linear_cross_entropy, hidden * 1e4, weight, targets):
        assert torch.isfinite(tensor).all()


def test_without_gradients_the_losses_are_the_same() -> None:
    hidden, weight, targets = inputs(50)
    with torch.no_grad():
        total, losses = linear_cross_entropy(hidden, weight, targets)
    expected = run(linear_cross_entropy, hidden, weight, targets)
    assert not total.requires_grad
    assert torch.equal(total, expected[0])
    assert torch.equal(losses, expected[1])


def test_gradcheck() -> None:
    """The derivative is right by finite differences, not only by comparison with autograd."""
    hidden, weight, targets = inputs(20)
    hidden, weight = hidden.double(), (weight * 0.3).double()
    run_double = [t.requires_grad_() for t in (hidden, weight)]
    total, _ = linear_cross_entropy(*run_double, targets)
    total.backward()
    draw = torch.Generator().manual_seed(0)
    for tensor in run_double:
        direction = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            moved = [
                plain_double(*(t + sign * 1e-4 * direction if t is tensor else t for t in run_double), targets)
                for sign in (1, -1)
            ]
        assert tensor.grad is not None
        assert float((tensor.grad * direction).sum()) == pytest.approx(float(moved[0] - moved[1]) / 2e-4, rel=1e-4)


def plain_double(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED_TARGET, reduction="sum")


# ----------------------------------------------------------------------------------------------------------------- memory


class _Largest(TorchDispatchMode):
    """The most elements of any tensor ``[…, V]`` but the transposed weight, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (VOCAB,) and tensor.shape != (HIDDEN, VOCAB):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(("loss", "rows"), [(linear_cross_entropy, 16), (plain_linear_cross_entropy, 160)])
def test_the_logits_of_a_whole_batch_never_exist(loss: Loss, rows: int) -> None:
    hidden, weight, targets = inputs(160)
    with _Largest() as largest:
        run(loss, hidden, weight, targets)
    # grad.T is hidden-by-… nowhere; [V, H] weights don't end in V.
    assert largest.elements == rows * VOCAB


def test_nothing_of_the_size_of_logits_is_kept_for_the_backward_pass() -> None:
    hidden, weight, targets = inputs(160)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
    assert sorted(kept) == sorted([hidden.numel(), weight.numel()])


# ------------------------------------------------------------------------------------------------------------------- head


class _Causal(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=bias)


def test_the_head_gives_logits_or_the_loss() -> None:
    model = _Causal()
    weight = model.lm_head.weight
    LossHead.install(model)
    assert isinstance(model.lm_head, LossHead)
    assert model.lm_head.weight is weight
    assert [name for name, _ in model.named_parameters()] == ["lm_head.weight"]
    hidden, _, targets = inputs(30)
    hidden, targets = hidden.view(3, 10, HIDDEN), targets.view(3, 10)
    torch.testing.assert_close(model.lm_head(hidden), hidden @ weight.T)
    total, losses = model.lm_head(hidden, targets)
    plain, plain_losses = plain_linear_cross_entropy(hidden.view(30, HIDDEN), weight, targets.view(30))
    torch.testing.assert_close([total, losses], [plain, plain_losses])


def test_no_library_class_is_changed() -> None:
    before = nn.Linear.forward
    one, other = _Causal(), _Causal()
    LossHead.install(one)
    assert nn.Linear.forward is before
    assert type(other.lm_head) is nn.Linear


def test_a_head_that_it_can_not_replace_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear without bias"):
        LossHead.install(_Causal(bias=True))
    installed = _Causal()
    LossHead.install(installed)
    with pytest.raises(TypeError, match="Linear without bias"):
        LossHead.install(installed)


def test_a_second_backward_pass_is_refused() -> None:
    """Also where hooks hand the saved tensors out, past autograd's own check of their versions."""
    hidden, weight, targets = inputs(20)
    weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        total, _ = linear_cross_entropy(hidden, weight, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only one backward pass"):
        total.backward()


def test_a_chunk_is_as_long_as_a_hidden_state_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_FEWEST_TOKENS", 256)
    monkeypatch.setattr(loss_module, "_MOST_TOKENS", 1024)
    assert [chunk_tokens(hidden) for hidden in (64, 512, 4096)] == [256, 512, 1024]
