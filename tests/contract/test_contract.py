"""The contract that every method x layer pair passes (docs/design.md, "The contract")."""

import copy
import math
import pickle
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import LAYERS, METHODS, LayerCase, convert, fits
from covering import Pair, covering, first_met, marked, pairs_in
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import slimbayes as sb
from slimbayes.distributions.scales import rho_from_scale
from slimbayes.engine import calls, noise, passes
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer, Converted
from slimbayes.posteriors.correlated import CorrelatedPosterior
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.posteriors.flow_patch import FlowPosterior
from slimbayes.posteriors.gaussian import GaussianPosterior
from slimbayes.posteriors.joint_normal import JointNormalPosterior
from slimbayes.posteriors.mc_dropout import DropoutPosterior
from slimbayes.posteriors.member_norm import MemberNormPosterior
from slimbayes.posteriors.mixture import MixturePosterior
from slimbayes.posteriors.radial import RadialPosterior
from slimbayes.posteriors.rank1 import Rank1Posterior

PAIRS = [(m, n) for m in METHODS for n in LAYERS if fits(m, n)]
RANDOM = [
    p for p in PAIRS if p[0] not in ("deterministic", "batch-ensemble", "mixture-members", "ensemble", "member-norm")
]  # the others draw nothing
BAYESIAN = [p for p in PAIRS if p[0] != "deterministic"]
PICKED = [p for p in PAIRS if p[0].startswith(("emp", "ecmp", "mixture", "drop-connect"))]
DROPS = lambda p: p[0].startswith("mc-dropout") and LAYERS[p[1]].kind != "matrix"  # noqa: E731 (activations, no weights)
CONTINUOUS = [p for p in RANDOM if p not in PICKED and not p[0].startswith("mc-dropout")]
# Compiling takes seconds: every kind of layer with one method, every method on one layer of each kind.
COMPILED_LAYERS = ("Linear", "BatchNorm2d", "Dropout")
ALIKE = (
    "cauchy",
    "lognormal",
    "-only",
    "heavy-prior",
    "matrix-normal",
    "k-tied-",
    "ecmp-learned",
    "joint-biases",
    "rank1-rank-2",
)  # the graph of another
# Layers with the graph of another too: other axes, options or gates of one operation.
ALIKE_LAYERS = (
    "Linear-no-bias", "Linear-4d", "Conv1d", "Conv3d", "Conv2d-groups", "Conv2d-reflect", "ConvTranspose1d",
    "ConvTranspose3d", "LSTM", "RNN", "GRU", "RNNCell", "GRUCell", "MultiheadAttention-batch-first",
)  # fmt: skip
# Methods whose operations are another's: "ecmp-example", "rank1-normal", "ensemble" are compiled further.
TRACED = ("emp-example", "rank1-additive", "rank1-per-member", "joint-factors", "mixture-members", "mean-field-local")
# What a bare call draws inside of its graph is another's, too.
DRAWN_ALIKE = ("emp-example", "rank1-additive", "rank1-per-member", "mixture-members")
COMPILED = [
    p
    for p in PAIRS
    if (p[0] == "batch-ensemble" and p[1] not in ALIKE_LAYERS)
    or (p[1] in COMPILED_LAYERS and not any(part in p[0] for part in ALIKE))
]

# By test: the whole grid, of which a covering array is run (all of it with --full-contract).
PROPERTIES: dict[str, list[Pair]] = {}
# Cases that stay whatever the array chooses. How a method meets a layer shows in one property most of all, and some
# layers and methods broke more often than others: states carried from step to step, lookups with a padding word, four
# weights in one, statistics over rows; draws of outputs and signs, which depend on where rows and channels lie.
WHOLE = "test_every_row_of_a_folded_batch_equals_a_plain_model_with_that_draws_weights"
AWKWARD_LAYERS = ("LSTM-stacked-bi", "GRUCell", "Embedding", "MultiheadAttention", "BatchNorm2d", "ConvTranspose2d")
AWKWARD_METHODS = ("mean-field-local", "k-tied-local", "mean-field-flipout", "rank1-additive", "mc-dropout")
# To a layer, methods that differ in what numbers are drawn from, or how these start, are one.
ALIKE_TO_LAYERS = dict.fromkeys(
    ("rank1-cauchy", "rank1-lognormal", "rank1-heavy-prior", "rank1-r-only", "rank1-s-only"), "rank1-normal"
) | {
    "k-tied": "mean-field", "matrix-normal": "mean-field", "k-tied-flipout": "mean-field-flipout",
    "emp-learned": "emp", "ecmp-learned": "ecmp", "joint-biases": "joint-factors",
}  # fmt: skip
SLOW = ("flow-patch", "test_kl_is_the_average_log_ratio_and_zero_at_the_prior")  # thousands of draws
AWKWARD_PROPERTY = "test_a_held_draw_is_the_same_function_folded_or_alone"


def kept(name: str, pair: Pair) -> bool:
    method, layer = pair
    awkward = layer in AWKWARD_LAYERS and method in AWKWARD_METHODS
    return method not in ALIKE_TO_LAYERS and (name == WHOLE or (name == AWKWARD_PROPERTY and awkward))


def holds_for(pairs: list[Pair]) -> Any:
    """Mark a test as a property that all these pairs of method and layer have."""

    def register(test: Any) -> Any:
        PROPERTIES[test.__name__] = pairs
        return test

    return register


@cache
def array() -> dict[str, list[Pair]]:
    return covering(PROPERTIES, kept, ALIKE_TO_LAYERS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    if name in PROPERTIES:
        grid = PROPERTIES if metafunc.config.getoption("--full-contract", False) else array()
        quick = {pair for pair in first_met(grid[name]) if (pair[0], name) != SLOW}
        metafunc.parametrize(("method", "layer"), marked(grid[name], quick))


def test_every_pair_of_method_layer_and_property_is_in_the_array() -> None:
    wanted, found = (
        set().union(*(pairs_in((*pair, name), ALIKE_TO_LAYERS) for name, pairs in grid.items() for pair in pairs))
        for grid in (PROPERTIES, array())
    )
    assert found == wanted and len(wanted) > 1500
    assert 5 * sum(map(len, array().values())) < sum(map(len, PROPERTIES.values())), "no longer worth an array"


def main_output(output: Any) -> Tensor:
    return pytree.tree_leaves(output)[0]


def set_neutral(model: nn.Module, method: str) -> None:
    """No noise, and unit factors (zero for additive ones). Rank-1 scales have a floor, so they become points."""
    for posterior in posteriors_of(model):
        scales = [p for name, p in posterior.named_parameters() if posterior.role(name) == "scale"]
        for parameter in scales:
            nn.init.constant_(parameter, -40.0)
        if scales and not isinstance(posterior, Rank1Posterior):
            continue
        if isinstance(posterior, DropoutPosterior):
            posterior.rate, posterior.fixed = 0.0, True
            continue
        if isinstance(
            posterior, (MixturePosterior, EnsemblePosterior, MemberNormPosterior)
        ):  # members of a norm start as copies
            continue
        for factor in (posterior.r, posterior.s):
            nn.init.constant_(factor.loc, 0.0 if "additive" in method else 1.0)
            factor.family = sb.Point
    for layer in model.modules():
        for site, posterior in layer.posterior.items() if isinstance(layer, Converted) else ():
            if isinstance(posterior, EnsemblePosterior):
                own = {n: t for n, t in layer.state_dict().items() if not n.startswith("posterior.")}
                for other in posterior.others:
                    other.load_state_dict(own)
            elif isinstance(posterior, MixturePosterior):
                _equal_components(posterior, layer.linear_map(site))


def _equal_components(posterior: MixturePosterior, linear: Any) -> None:
    """Every component the layer's own; a component at zero gets no probability."""
    posterior.config = replace(posterior.config, sigma=0.0)
    if posterior.config.zero:
        posterior.probs.copy_(torch.tensor([1.0, 0.0]))
    with torch.no_grad():
        for others, own in ((posterior.weight, linear.weight), (posterior.bias, linear.bias)):
            if others is not None:
                others.copy_(own)


@holds_for(PAIRS)
def test_base_checkpoint_loads_without_unexpected_keys(method: str, layer: str) -> None:
    case = LAYERS[layer]
    plain, model = case.make(), case.make()
    convert(model, method, case)
    result = model.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".posterior." in f".{key}" for key in result.missing_keys)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@holds_for(PAIRS)
def test_neutral_factors_without_noise_give_the_plain_output(method: str, layer: str) -> None:
    case = LAYERS[layer]
    plain, x = case.make(), case.input()
    expected = main_output(plain(x))
    model = convert(copy.deepcopy(plain), method, case)
    if method != "deterministic":
        set_neutral(model, method)
    torch.testing.assert_close(main_output(model(x)), expected, rtol=1e-5, atol=1e-6)
    sampled = main_output(sb.sample(model, x))
    assert sampled.shape == (sb.members(model), *expected.shape)
    torch.testing.assert_close(sampled, expected.expand_as(sampled), rtol=1e-5, atol=1e-6)
    fused = not any(kind in layer for kind in ("Attention", "Cell", "EmbeddingBag"))  # ours are written out there
    if (
        method
        in ("batch-ensemble", "deterministic", "emp", "mixture-members", "drop-connect", "ensemble", "member-norm")
        and fused
    ):
        alone = main_output(sb.sample(model, x, fold=False))  # one draw at a time: the weight times exactly one
        assert torch.equal(alone, expected.expand_as(alone))


def weights_of_row(plain: nn.Module, converted: nn.Module, block: int, row: int) -> nn.Module:
    """A copy of the plain model with the weights that one row of a block sees, spelled out element by element."""
    out = copy.deepcopy(plain)
    layers = dict(out.named_modules())
    for name, layer in converted.named_modules():
        if not isinstance(layer, Converted):
            continue
        if "members" in layer.posterior:
            others = layer.posterior["members"].others
            assert block < 2 * (len(others) + 1)
            member = block % (len(others) + 1)
            if member:
                layers[name].load_state_dict(others[member - 1].state_dict())
            continue
        for site, posterior in layer.posterior.items():
            drawn = posterior.values()
            weight, bias = _target(layers[name], site)
            line = row if posterior.per_row else block
            with torch.no_grad():
                if isinstance(posterior, Rank1Posterior):  # W[o, i] * mean_j r_j[o] * s_j[i]
                    weight.mul_(_spread(layers[name], drawn.r[line], drawn.s[line], weight.shape))
                    offsets = posterior._offsets(drawn)
                    offset = None if offsets is None else offsets[line]
                elif isinstance(posterior, MixturePosterior):
                    _pick_by_hand(layers[name], posterior, drawn, line, weight, bias)
                    offset = None
                elif isinstance(posterior, MemberNormPosterior):
                    if block % 2:
                        layers[name].load_state_dict({n: t[0] for n, t in posterior.state_dict().items()})
                    offset = None
                elif isinstance(posterior, FlowPosterior):
                    moved = FlowDensity(posterior, weight, bias).moved(posterior.noise.block[line : line + 1])[0]
                    weight.copy_(moved[: weight.numel()].view_as(weight))
                    offset = None if bias is None else (moved[weight.numel() :].view_as(bias) - bias)
                elif isinstance(posterior, (CorrelatedPosterior, RadialPosterior)):
                    weight.add_(drawn[block])
                    offset = None
                elif isinstance(posterior, JointNormalPosterior):
                    weight.add_(drawn[0][block])
                    offset = drawn[1][block] if posterior.site.bias else None
                else:  # W + dW, with signs in Flipout
                    signed = drawn.sign_in is not None
                    signs = (
                        _spread(layers[name], drawn.sign_out[row][None], drawn.sign_in[row][None], weight.shape)
                        if signed
                        else 1.0
                    )
                    weight.add_(drawn.weight[block] * signs)
                    offset = None if drawn.bias is None else drawn.bias[block]
                if offset is not None:
                    bias.add_(offset)
    return out


def _pick_by_hand(
    layer: nn.Module, posterior: MixturePosterior, drawn: Any, line: int, weight: Tensor, bias: Tensor | None
) -> None:
    """Overwrite weight and bias with the picked components, element by element."""

    def picked(z: Tensor, place: tuple[int, ...], flat: int) -> int:
        z = z[line]
        if z.is_floating_point():  # one-hot along the first axis
            z = z.argmax(0)
        if drawn.mixed is not None and z.dim():  # of scales and biases of a norm, side by side
            return int(z[flat])
        return int(z if z.dim() == 0 else z[place])

    zero, kept = posterior.config.zero, float(1 - posterior.probs[-1]) if posterior.config.zero else 1.0
    if posterior.config.assignment == "input":
        mask = (drawn.weight[line] == 0).double() / kept
        weight.mul_(_spread(layer, torch.ones(1, posterior.site.n_out).double(), mask[None], weight.shape))
        return
    noise = posterior.config.sigma
    for target, others, z, start in (
        (weight, posterior.weight, drawn.weight, 0),
        (bias, posterior.bias, drawn.bias, weight.numel()),
    ):
        if target is None or (target is bias and zero):
            continue
        own = target.clone()
        for flat, place in enumerate(
            torch.cartesian_prod(*(torch.arange(n) for n in target.shape)).view(-1, target.dim()).tolist()
        ):
            place, k = tuple(place), picked(z, tuple(place), start + flat) if others is not None or zero else 0
            if zero:
                target[place] = own[place] / kept if k == 0 else 0.0
            elif k:
                target[place] = others[(k - 1, *place)]
            if noise and (target is weight or posterior.site.bias):
                target[place] += noise * drawn.noise[line, start + flat]


def _target(layer: nn.Module, site: str) -> tuple[Tensor, Tensor | None]:
    if isinstance(layer, nn.MultiheadAttention):
        if site == "out":
            return layer.out_proj.weight, layer.out_proj.bias
        block = slice({"q": 0, "k": 8, "v": 16}[site], {"q": 8, "k": 16, "v": 24}[site])
        return layer.in_proj_weight[block], layer.in_proj_bias[block]
    return getattr(layer, site), getattr(layer, site.replace("weight", "bias"), None)


def _spread(layer: nn.Module, r: Tensor, s: Tensor, shape: torch.Size) -> Tensor:
    """The factor product of every weight element, one element at a time."""
    r, s = torch.atleast_2d(r), torch.atleast_2d(s)  # of any rank
    full = torch.einsum("jo,ji->oi", r, s) / r.shape[0]  # (out, in)
    out = torch.empty(shape[:2], dtype=r.dtype)
    groups, transposed = getattr(layer, "groups", 1), isinstance(layer, nn.modules.conv._ConvTransposeNd)
    for a in range(shape[0]):
        for b in range(shape[1]):
            if isinstance(layer, nn.modules.conv._ConvNd) and not transposed:
                out[a, b] = full[a, a // (shape[0] // groups) * shape[1] + b]
            elif transposed:
                out[a, b] = full[a // (shape[0] // groups) * shape[1] + b, a]
            elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) or type(layer).__name__ == "Conv1D":
                out[a, b] = full[b, a]
            else:
                out[a, b] = full[a, b]
    return out.view(*out.shape, *[1] * (len(shape) - 2))


def _row(x: Tensor, i: int, dim: int) -> Tensor:
    return x.narrow(dim, i, 1)


@holds_for([p for p in BAYESIAN if p[0] != "mc-dropout" and not p[0].endswith(("additive", "local")) and not DROPS(p)])
def test_every_row_of_a_folded_batch_equals_a_plain_model_with_that_draws_weights(method: str, layer: str) -> None:
    case = LAYERS[layer]
    plain, x = case.make().double(), case.input()
    x = x.double() if x.is_floating_point() else x
    model = convert(copy.deepcopy(plain), method, case)
    for posterior in posteriors_of(model):  # biases that differ between members
        if isinstance(getattr(posterior, "bias", None), nn.Parameter):
            nn.init.normal_(posterior.bias)
        if isinstance(posterior, MemberNormPosterior):  # and statistics
            nn.init.normal_(posterior.running_mean)
            nn.init.uniform_(posterior.running_var, 0.5, 2.0)
    layout, draws = calls.layout_of(model, (x,), {}, posteriors_of(model)), 2 * sb.members(model)
    assert layout.folds
    new = passes.Pass(draws, draws * case.rows, rowwise=layout.apart)
    noise.draw(posteriors_of(model), new)
    sampled = main_output(calls.run_draws(model, posteriors_of(model), (x,), {}, new, layout, folds=True))
    rtol, atol = (1e-6, 1e-7) if "drop" in method else (1e-9, 1e-10)  # dropout rates are float32
    posteriors = posteriors_of(model)
    own = passes.run(new, lambda: any(p.per_row or isinstance(p, GaussianPosterior) for p in posteriors))
    for draw in range(len(sampled)):
        for rows in range(case.rows) if own else [None]:  # rows that share their weights are run together
            first = draw * case.rows + (rows or 0)
            plain_draw = passes.run(new, weights_of_row, plain, model, draw, first)
            inputs, found = (t if rows is None else _row(t, rows, case.batch_dim) for t in (x, sampled[draw]))
            torch.testing.assert_close(found, main_output(plain_draw(inputs)), rtol=rtol, atol=atol)


@holds_for(BAYESIAN)
def test_a_held_draw_is_the_same_function_folded_or_alone(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case), case.input()
    dim = case.batch_dim
    with sb.frozen(model, draws=2):
        together = main_output(sb.sample(model, x))
        rows = [main_output(sb.sample(model, _row(x, i, dim))) for i in range(case.rows)]
    out_dim = 1 if dim == 0 else 2
    torch.testing.assert_close(together, torch.cat(rows, out_dim), rtol=1e-4, atol=1e-5)


@holds_for([p for p in BAYESIAN if not DROPS(p)])
def test_every_posterior_parameter_gets_a_gradient(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model = convert(case.make(), method, case)
    draws = 12 if (method, layer) in PICKED else 1  # enough for every component to be picked
    main_output(sb.sample(model, case.input(), draws=draws)).square().sum().backward()
    for name, parameter in model.named_parameters():
        if ".posterior." in f".{name}" and "Embedding" not in layer:
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    if "Embedding" in layer:  # words that were not looked up have none
        assert all(parameter.grad.any() for p in posteriors_of(model) for parameter in p.parameters())


def posterior_and_prior(model: nn.Module) -> list[tuple[Any, Any, Any]]:
    """(q, p, a function that moves q to p) for every tensor with a posterior."""
    out = []
    for layer in model.modules():
        for site, posterior in layer.posterior.items() if isinstance(layer, BayesLayer) else ():
            if isinstance(posterior, JointNormalPosterior):
                prior = type(posterior.prior)(posterior.locs(), posterior.prior.scale)
                out.append((JointDensity(posterior, layer), prior, lambda: None))
                continue
            if isinstance(posterior, Rank1Posterior):
                factors = [f for f in (posterior.r, posterior.s) if f.family is not sb.Point]
                out += [(f.distribution(), f.prior, partial(_to_prior, f)) for f in factors]
                continue
            linear = layer.linear_map(site)
            free = torch.ones_like(linear.weight, dtype=torch.bool)
            if getattr(layer, "padding_idx", None) is not None:  # the padding word's vector is no parameter
                free[layer.padding_idx] = False
            if isinstance(posterior, RadialPosterior):
                out.append((RadialDensity(linear.weight[free], posterior.scale()[free]), posterior.prior, lambda: None))
                continue
            if isinstance(posterior, FlowPosterior):
                out.append((FlowDensity(posterior, linear.weight, linear.bias), sb.Normal(0.0, 1.0), lambda: None))
                continue
            if isinstance(posterior, CorrelatedPosterior):
                out.append((CorrelatedDensity(posterior, linear.weight, free), posterior.prior, lambda: None))
                continue
            q = sb.Normal(linear.weight[free], posterior.log_scale().exp()[free])
            out.append((q, posterior.prior, partial(_to_prior_weights, linear, posterior)))
            if posterior.bias_log_scale is not None:
                out.append((sb.Normal(linear.bias, posterior.bias_log_scale.exp()), posterior.prior, lambda: None))
    return out


class RadialDensity:
    """The radial distribution of weights (D,), from its definition: a direction, and a length that is half-normal."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale

    def rsample(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * noise / noise.norm(dim=1, keepdim=True) * torch.randn(len(noise), 1)

    def log_prob(self, x: Tensor) -> Tensor:
        """log q(x) in equal shares for each weight, (n, D)."""
        size, length = x.shape[1], ((x - self.loc) / self.scale).norm(dim=1, keepdim=True)
        sphere = math.log(2) + 0.5 * size * math.log(math.pi) - math.lgamma(0.5 * size)  # area of the unit sphere
        half_normal = math.log(2) + sb.Normal(0.0, 1.0).log_prob(length)
        joint = half_normal - sphere - (size - 1) * length.log() - self.scale.log().sum()
        return joint.expand_as(x) / size


class FlowDensity:
    """A planar flow by its definition, one step after another, and its density by the Jacobian of all of it."""

    def __init__(self, posterior: FlowPosterior, weight: Tensor, bias: Tensor | None) -> None:
        self.loc = torch.cat([t.detach().flatten() for t in (weight, bias) if t is not None])
        self.posterior, self.log_q = posterior, torch.empty(0)

    def _flow(self, noise: Tensor) -> Tensor:
        q = self.posterior
        d = q.log_scale.detach().exp() * noise
        for u, w, c in zip(q.u.detach(), q.w.detach(), q.c.detach(), strict=True):
            inner = (w * u).sum()
            u = u + (torch.log1p(inner.exp()) - 1 - inner) * w / (w * w).sum()
            d = d + u * torch.tanh((w * d).sum() + c)
        return self.loc + d

    def moved(self, noise: Tensor) -> Tensor:
        return torch.stack([self._flow(one) for one in noise])

    def rsample(self, noise: Tensor) -> Tensor:
        jacobian = torch.vmap(torch.func.jacrev(self._flow))(noise)
        base = sb.Normal(0.0, 1.0).log_prob(noise).sum(1)
        self.log_q = base - torch.linalg.slogdet(jacobian)[1]
        return self.moved(noise)

    def log_prob(self, x: Tensor) -> Tensor:
        """log q of the latest draws, in equal shares for each element, (n, D)."""
        return self.log_q.unsqueeze(1).expand_as(x) / x.shape[1]


class CorrelatedDensity:
    """torch's own multivariate normal over the free weights (D,), with the covariance of the draws' Jacobian."""

    def __init__(self, posterior: CorrelatedPosterior, weight: Tensor, free: Tensor) -> None:
        for name, parameter in posterior.named_parameters():
            if name.endswith("below"):
                nn.init.normal_(parameter, std=0.5 / (2 * parameter.numel()) ** 0.25)
        kept = posterior.site.to_matrix(free.to(weight.dtype))

        def draw(noise: Tensor) -> Tensor:
            return posterior.site.from_matrix(posterior.spread(noise * kept))[0][free]

        jacobian = torch.autograd.functional.jacobian(draw, torch.zeros(1, *posterior.site.matrix)).flatten(1).double()
        self.loc, self.scale = weight[free], torch.ones_like(weight[free])
        self.q = torch.distributions.MultivariateNormal(self.loc.double(), jacobian @ jacobian.T)

    def rsample(self, noise: Tensor) -> Tensor:
        return self.q.rsample((len(noise),))

    def log_prob(self, x: Tensor) -> Tensor:
        """log q(x) in equal shares for each weight, (n, D)."""
        return self.q.log_prob(x).unsqueeze(1).expand_as(x) / x.shape[1]


class JointDensity:
    """Torch's own multivariate normal of each member, (K, D), of the numbers that are parameters."""

    def __init__(self, posterior: JointNormalPosterior, layer: Any) -> None:
        free = torch.ones(posterior.size, dtype=torch.bool)
        if posterior.site.kind == "table" and posterior.regularises_mean and layer.padding_idx is not None:
            free[: posterior.site.shape[1]] = layer.padding_idx != 0
        self.loc = posterior.means().detach()[:, free]
        covariance = posterior.covariance().detach()[:, free][:, :, free]
        self.q = torch.distributions.MultivariateNormal(self.loc, covariance)

    def rsample(self, noise: Tensor) -> Tensor:
        return self.q.sample((len(noise),))

    def log_prob(self, x: Tensor) -> Tensor:
        """log q(x) in equal shares for each number, (n, K, D)."""
        return (self.q.log_prob(x) / x.shape[-1]).unsqueeze(-1).expand_as(x)


def _to_prior(factor: Any) -> None:
    if type(factor.prior) is factor.family:
        nn.init.constant_(factor.loc, factor.prior.loc)
        nn.init.constant_(factor.rho, rho_from_scale(factor.prior.scale))


def _to_prior_weights(linear: Any, posterior: GaussianPosterior) -> None:
    with torch.no_grad():
        for mean in (linear.weight, linear.bias) if posterior.bias_log_scale is not None else (linear.weight,):
            mean.zero_()
    for name, parameter in posterior.named_parameters():
        ranks = parameter.shape[1] if name in ("log_u", "log_v") else 1
        share = 0.5 if name in ("log_u", "log_v") else 1.0
        nn.init.constant_(parameter, share * (math.log(posterior.prior.scale) - math.log(ranks)))


@holds_for(PICKED)
def test_kl_of_picked_components_is_eq_8(method: str, layer: str) -> None:
    case, config = LAYERS[layer], METHODS[method]
    model = convert(case.make(), method, case)
    tau = config.tau
    rho = tau if config.rho is None else config.rho
    total = 0.0
    for module in model.modules():
        for site, posterior in module.posterior.items() if isinstance(module, BayesLayer) else ():
            if posterior.logits is not None:
                nn.init.normal_(posterior.logits)
            linear, p = module.linear_map(site), posterior.probabilities().tolist()
            kept = 1 - p[-1] if posterior.config.zero else 1.0
            weights = [linear.weight / kept, *(posterior.weight if posterior.weight is not None else ())]
            total += sum(
                tau / 2 * pk * w.detach().double().square().sum().item() for pk, w in zip(p, weights, strict=False)
            )
            if posterior.site.bias:
                biases = [linear.bias, *(posterior.bias if posterior.bias is not None else ())]
                shares = [1.0] if len(biases) == 1 else p
                total += sum(
                    rho / 2 * pk * b.detach().double().square().sum().item()
                    for pk, b in zip(shares, biases, strict=True)
                )
            if posterior.logits is not None:
                picks = (
                    1
                    if "ecmp" not in method
                    else weights[0].numel() + (linear.bias.numel() if posterior.site.bias else 0)
                )
                total += picks * sum(pk * math.log(pk * len(p)) for pk in p)
    assert sb.kl(model).item() == pytest.approx(total, rel=1e-5)


@holds_for(CONTINUOUS)
def test_kl_is_the_average_log_ratio_and_zero_at_the_prior(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model = convert(case.make(), method, case)
    mean, variance, draws = 0.0, 0.0, 2000
    pairs = posterior_and_prior(model)
    for q, p, _ in pairs:
        x = q.rsample(torch.randn(draws, *q.loc.shape)).detach()
        ratio = (q.log_prob(x) - p.log_prob(x)).flatten(1).sum(1).double()
        mean, variance = mean + ratio.mean().item(), variance + ratio.var().item() / draws
    value = sb.kl(model).item()
    assert value > 0
    variance *= 2 if method == "flow-patch" else 1  # its KL is an average over as many draws
    assert abs(value - mean) < 5 * math.sqrt(variance)
    for _, _, move in pairs:
        move()
    if type(pairs[0][0]) is type(pairs[0][1]):
        assert abs(sb.kl(model).item()) < 1e-5 * value


@holds_for(RANDOM)
def test_same_seed_same_output_and_draws_differ_in_eval_too(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case).eval(), case.input()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return main_output(sb.sample(model, x, draws=6))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    once = run(1)[:: sb.members(model)]  # six draws of member 0, of which two may pick the same component
    assert not torch.allclose(once[:1].expand_as(once), once, atol=1e-6)


@holds_for(PAIRS)
def test_save_and_load_round_trip_exactly(method: str, layer: str, tmp_path: Any) -> None:
    case = LAYERS[layer]
    plain = case.make()
    model = convert(copy.deepcopy(plain), method, case)
    again = sb.load(copy.deepcopy(plain), sb.save(model, tmp_path / "posterior"))
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    x = case.input()
    torch.manual_seed(3)
    first = main_output(sb.sample(model, x))
    torch.manual_seed(3)
    assert torch.equal(first, main_output(sb.sample(again, x)))


@pytest.mark.slow
@holds_for(COMPILED)
def test_compiles_as_one_graph(method: str, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case), case.input()
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)  # off by default for torch's own recurrent layers
    torch._dynamo.reset()
    # Methods are compiled further than traced. Layers are torch's own, whose LSTM kernel aot_autograd cannot export.
    backend = "aot_eager" if layer in COMPILED_LAYERS and method not in TRACED else "eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.manual_seed(0)
    expected = main_output(sb.sample(model, x))
    torch.manual_seed(0)
    torch.testing.assert_close(main_output(sb.sample(compiled, x)), expected, rtol=1e-4, atol=1e-5)
    inside = layer in COMPILED_LAYERS and method not in DRAWN_ALIKE
    if inside and calls.needs_rows(posteriors_of(model)):  # else a bare call is one more draw
        assert main_output(compiled(x)).shape == main_output(model(x)).shape
    if (method, layer) in RANDOM and not method.startswith(("emp", "ecmp")):  # which may pick alike
        assert not torch.equal(main_output(sb.sample(compiled, x)), expected), "the graph holds its noise"


@holds_for(PAIRS)
def test_half_precision_is_finite(method: str, layer: str) -> None:
    case = LAYERS[layer]
    x = case.input()
    half = convert(case.make().bfloat16(), method, case)
    y = main_output(sb.sample(half, x.bfloat16() if x.is_floating_point() else x))
    assert y.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in half.parameters() if p.dtype != torch.bfloat16)
    model = convert(case.make(), method, case)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            plain = main_output(case.make()(x))
        except RuntimeError as error:
            pytest.skip(f"torch itself cannot run this layer in bfloat16 on this CPU: {str(error)[:60]}")
        cast = main_output(sb.sample(model, x))
    if "GRU" not in layer and "Cell" not in layer:  # torch itself mixes types there: the state stays float32
        assert cast.dtype == plain.dtype
    for converted, output in ((half, y), (model, cast)):
        assert output.isfinite().all()
        assert sb.kl(converted).dtype == torch.float32 and sb.kl(converted).isfinite()


def _extra(method: str, config: Any, site: tuple[int, int, bool], matrix: tuple[int, int]) -> int:
    """Posterior parameters of one weight matrix by the papers' formulas."""
    (n_in, n_out, bias), (m, n) = site, matrix
    if method == "deterministic" or method.startswith(("mc-dropout", "drop-connect")):
        return 0
    if method == "member-norm":
        return (config.members - 1) * 2 * n_out
    if method.startswith(("emp", "ecmp", "mixture")):  # (K - 1)((I + 1) O), and K numbers if probabilities are learned
        return (config.components - 1) * (m * n + n_out * bias) + config.components * ("learned" in method)
    if method == "radial":
        return m * n
    if method == "flow-patch":  # scales of the base; u, w and c of each step
        size = n_out * (2 if bias else 1)
        return size + config.steps * (2 * size + 1)
    if method == "multivariate-normal":
        return m * n * (m * n + 1) // 2
    if method == "full-matrix-normal":
        return (m * (m + 1) + n * (n + 1)) // 2
    if method.startswith("mean-field"):
        return m * n + n_out * (bias and config.bias == "gaussian")
    if method.startswith(("k-tied", "matrix-normal")):
        return getattr(config, "rank", 1) * (m + n) + n_out * (bias and config.bias == "gaussian")
    if method.startswith("joint"):  # means beside the layer's own, standard deviations, and what lies below a diagonal
        drawn_bias = n_out * bias * (config.over in ("weights", "both+bias"))
        size = (m * n if config.over == "weights" else n_in + n_out) + drawn_bias
        means = 0 if config.over == "weights" else config.members * (n_in + n_out) + (config.members - 1) * n_out * bias
        return means + config.members * (size + size * (size - 1) // 2 * (size <= config.full_up_to))
    numbers = {"batch-ensemble": n_in + n_out, "rank1-r-only": n_in + 2 * n_out, "rank1-s-only": 2 * n_in + n_out}
    return config.members * config.rank * numbers.get(method, 2 * (n_in + n_out)) + (config.members - 1) * n_out * bias


@holds_for(PAIRS)
def test_parameter_count_is_the_papers_formula(method: str, layer: str) -> None:
    case, config = LAYERS[layer], METHODS[method]
    plain = case.make()
    before = sum(p.numel() for p in plain.parameters())
    cost = sb.estimate_cost(plain, config, include=None if method == "deterministic" else (lambda n, m: True))
    model = convert(plain, method, case)
    extra = (
        sum(_extra(method, config, site, case.matrix or site[:2]) for site in case.sites)
        if method != "ensemble"
        else before
    )
    assert sum(p.numel() for p in model.parameters()) == before + extra
    assert (cost.parameters, cost.extra_parameters) == (before, extra)
    report = sb.summary(model)
    assert (report.before, report.after) == (before, before + extra)


@holds_for(PAIRS)
def test_summary_lists_every_layer_with_parameters(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model = nn.ModuleDict({"a": case.make(), "norm": nn.LayerNorm(3)})
    convert(model, method, case)
    rows = {r.name: r for r in sb.summary(model).rows}
    inner = "a.attention" if "Attention" in layer else "a.cell" if "Cell" in layer else "a"
    if method == "ensemble":  # copies the whole model
        inner = ""
        assert set(rows) == {""}
    else:
        assert set(rows) == {inner, "norm"}
        norms = "norm" in METHODS[method].covers and method != "member-norm"  # it is for batch norm alone
        assert rows["norm"].status == ("converted" if norms else "skipped") and rows["norm"].detail
    assert rows[inner].status == ("skipped" if method == "deterministic" else "converted")
    assert inner in str(sb.summary(model))


@holds_for(PAIRS)
def test_copies_and_pickles_after_a_forward(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case), case.input()
    sb.sample(model, x)
    model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(5)
        expected = main_output(model(x))
        torch.manual_seed(5)
        assert torch.equal(main_output(again(x)), expected)


@holds_for(PAIRS)
def test_debayesianize_gives_the_plain_model_back(method: str, layer: str) -> None:
    case = LAYERS[layer]
    plain, x = case.make(), case.input()
    model = convert(copy.deepcopy(plain), method, case)
    model(x)
    sb.debayesianize(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(main_output(model(x)), main_output(plain(x)))
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert model.__dict__.keys() == plain.__dict__.keys()


@holds_for(PAIRS)
def test_a_bare_call_takes_any_number_of_rows(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case), case.input()
    x = torch.cat([x, x], case.batch_dim)
    for rows in (1, 2, 5):
        some = x.narrow(case.batch_dim, 0, rows)
        assert main_output(model(some)).shape == main_output(case.make()(some)).shape


def test_lists_hold_every_method_and_layer() -> None:
    from slimbayes.layers import LAYERS as known
    from slimbayes.posteriors import METHODS as methods

    covered = {type(m) for case in LAYERS.values() for m in case.make().modules()}
    assert {cls for cls in known if cls.__module__.startswith(("torch", "transformers"))} <= covered
    assert set(methods.values()) <= {type(c) for c in METHODS.values()}
    assert LayerCase
