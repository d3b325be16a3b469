"""`sb.recorded`: the same steps as without it."""

import pytest
import torch
from torch import Tensor, nn

import slimbayes as sb

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def trained(device: str, record: bool, steps: int = 6, **options: object) -> tuple[list[float], Tensor]:
    """Losses and the parameters after some steps, whose rate, KL weight and last batch's size change on the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net = sb.bayesianize(net, sb.Rank1(members=2)).to(device)
    kind = options.pop("kind", torch.optim.Adam)
    optimizer = kind(net.parameters(), lr=0.1, fused=True, **options)  # type: ignore[operator]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(x: Tensor, y: Tensor, weight: float) -> Tensor:
        optimizer.zero_grad()
        loss = sb.elbo(sb.categorical(sb.sample(net, x), y), net, 100, kl_weight=weight).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    call = sb.recorded(step, net, optimizer) if record else step
    x, y = torch.randn(8, 3, device=device), torch.arange(8, device=device) % 2
    torch.manual_seed(1)
    losses = []
    for i in range(steps):
        size = 4 if i == steps - 1 else 8
        losses.append(float(call(x[:size] * (i + 1), y[:size], i / steps)))
        schedule.step()
    state = [t.detach().flatten().float() for t in (*net.parameters(), *net.buffers())]
    return losses, torch.cat(state).cpu()


@on_gpu
@pytest.mark.parametrize("options", [{}, {"kind": torch.optim.AdamW}, {"kind": torch.optim.SGD, "momentum": 0.9}])
def test_recorded_steps_are_the_steps(options: dict[str, object]) -> None:
    losses, state = trained("cuda", True, **options)
    plain, wanted = trained("cuda", False, **options)
    assert losses == pytest.approx(plain, rel=1e-4)
    torch.testing.assert_close(state, wanted, rtol=1e-3, atol=1e-4)


@on_gpu
def test_draws_differ_between_replays() -> None:
    net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(members=2)).cuda()
    call = sb.recorded(lambda x: net(x), net)
    with torch.no_grad():
        x = torch.randn(8, 3, device="cuda")
        first, kept = call(x), call(x)
        assert not torch.equal(first, kept)
        again = kept.clone()
        call(x)
        assert torch.equal(kept, again), "results are the caller's own"


@on_gpu
def test_what_cannot_be_recorded_runs() -> None:
    net = nn.Linear(3, 2).cuda()
    call = sb.recorded(lambda x: (net(x) + 0 * torch.randn(2, device="cuda")).sum().item(), net)
    x = torch.randn(8, 3, device="cuda")
    with pytest.warns(sb.SlimbayesWarning, match="cannot record this step"):
        assert call(x) == pytest.approx(net(x).sum().item(), rel=1e-4)
    assert call(x) == pytest.approx(net(x).sum().item(), rel=1e-4)


def test_without_a_gpu_it_is_the_step() -> None:
    assert trained("cpu", True)[0] == trained("cpu", False)[0]


def test_optimizers_that_a_graph_cannot_hold_are_refused() -> None:
    net = nn.Linear(2, 1)
    for optimizer in (torch.optim.NAdam(net.parameters()), torch.optim.Adam(net.parameters())):
        with pytest.raises(ValueError, match="fused=True"):
            sb.recorded(lambda x: x, net, optimizer)
