"""The contract that every method x layer pair passes (docs/design.md, "The contract")."""

import copy
import math
import pickle
from functools import cache, partial
from typing import Any

import pytest
import torch
from answers import KNOWN, Dropout, Target
from cases import (
    ALIKE_TO_LAYERS,
    ALIKE_TO_METHODS,
    LAYERS,
    METHODS,
    SAME_BARE_GRAPH,
    SAME_GRAPH,
    TRACED,
    LayerCase,
    convert,
    fits,
)
from covering import Pair, covering, first_met, marked, pairs_in
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import slimbayes as sb
from slimbayes.engine import bare, calls, noise, passes
from slimbayes.engine.locate import layout_of
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers.base import BayesLayer, Converted

ANSWERS = {name: KNOWN[type(config)](config) for name, config in METHODS.items()}
PAIRS = [(m, n) for m in METHODS for n in LAYERS if fits(m, n)]
RANDOM = [p for p in PAIRS if ANSWERS[p[0]].random]
BAYESIAN = [p for p in PAIRS if METHODS[p[0]].converts]
PICKED = [p for p in PAIRS if ANSWERS[p[0]].picks]
DROPS = lambda p: isinstance(ANSWERS[p[0]], Dropout) and LAYERS[p[1]].kind != "matrix"  # noqa: E731 (activations, no weights)
SPELLED = [p for p in BAYESIAN if ANSWERS[p[0]].spelled and not DROPS(p)]
CONTINUOUS = [
    p for p in RANDOM if p not in PICKED and not isinstance(ANSWERS[p[0]], Dropout)
]
# Compiling takes seconds: every kind of layer with one method, every method on one layer of each kind.
COMPILED_LAYERS, COMPILED_METHOD = (
    ("Linear", "BatchNorm2d", "Dropout"),
    "batch-ensemble",
)
COMPILED = [
    p
    for p in PAIRS
    if (p[0] == COMPILED_METHOD and LAYERS[p[1]].graph)
    or (p[1] in COMPILED_LAYERS and p[0] not in SAME_GRAPH)
]

# By test: the whole grid, of which a covering array is run (all of it with --full-contract).
PROPERTIES: dict[str, list[Pair]] = {}
# Cases that stay whatever the array chooses. How a method meets a layer shows in one property most of all, and some
# layers and methods broke more often than others: states carried from step to step, lookups with a padding word, four
# weights in one, statistics over rows; draws of outputs and signs, which depend on where rows and channels lie.
WHOLE = "test_every_row_of_a_folded_batch_equals_a_plain_model_with_that_draws_weights"
AWKWARD_LAYERS = (
    "LSTM-stacked-bi",
    "GRUCell",
    "Embedding",
    "MultiheadAttention",
    "BatchNorm2d",
    "ConvTranspose2d",
)
AWKWARD_METHODS = (
    "mean-field-local",
    "k-tied-local",
    "mean-field-flipout",
    "rank1-additive",
    "mc-dropout",
)
ALIKE_TO_EACH_OTHER = ALIKE_TO_LAYERS | ALIKE_TO_METHODS
SLOW = (
    "flow-patch",
    "test_kl_is_the_average_log_ratio_and_zero_at_the_prior",
)  # thousands of draws
AWKWARD_PROPERTY = "test_a_held_draw_is_the_same_function_folded_or_alone"


def kept(name: str, pair: Pair) -> bool:
    method, layer = pair
    awkward = layer in AWKWARD_LAYERS and method in AWKWARD_METHODS
    apart = method not in ALIKE_TO_LAYERS and layer not in ALIKE_TO_METHODS
    return apart and (name == WHOLE or (name == AWKWARD_PROPERTY and awkward))


def holds_for(pairs: list[Pair]) -> Any:
    """Mark a test as a property that all these pairs of method and layer have."""

    def register(test: Any) -> Any:
        PROPERTIES[test.__name__] = pairs
        return test

    return register


@cache
def array() -> dict[str, list[Pair]]:
    return covering(PROPERTIES, kept, ALIKE_TO_EACH_OTHER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    if name in PROPERTIES:
        grid = (
            PROPERTIES
            if metafunc.config.getoption("--full-contract", False)
            else array()
        )
        quick = {pair for pair in first_met(grid[name]) if (pair[0], name) != SLOW}
        metafunc.parametrize(("method", "layer"), marked(grid[name], quick))


def test_every_pair_of_method_layer_and_property_is_in_the_array() -> None:
    wanted, found = (
        set().union(
            *(
                pairs_in((*pair, name), ALIKE_TO_EACH_OTHER)
                for name, pairs in grid.items()
                for pair in pairs
            )
        )
        for grid in (PROPERTIES, array())
    )
    assert found == wanted and len(wanted) > 1200
    assert 5 * sum(map(len, array().values())) < sum(map(len, PROPERTIES.values())), (
        "no longer worth an array"
    )


def main_output(output: Any) -> Tensor:
    return pytree.tree_leaves(output)[0]


def set_neutral(model: nn.Module, method: str) -> None:
    """No noise, and factors that change nothing."""
    for layer in model.modules():
        for site, posterior in (
            layer.posterior.items() if isinstance(layer, Converted) else ()
        ):
            linear = layer.linear_map(site) if isinstance(layer, BayesLayer) else None
            ANSWERS[method].neutral(posterior, linear)


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
def test_neutral_factors_without_noise_give_the_plain_output(
    method: str, layer: str
) -> None:
    case = LAYERS[layer]
    plain, x = case.make(), case.input()
    expected = main_output(plain(x))
    model = convert(copy.deepcopy(plain), method, case)
    set_neutral(model, method)
    torch.testing.assert_close(main_output(model(x)), expected, rtol=1e-5, atol=1e-6)
    sampled = main_output(sb.sample(model, x))
    assert sampled.shape == (sb.members(model), *expected.shape)
    torch.testing.assert_close(
        sampled, expected.expand_as(sampled), rtol=1e-5, atol=1e-6
    )
    if ANSWERS[method].exact and not case.written_out:
        alone = main_output(
            sb.sample(model, x, parallel=False)
        )  # one draw at a time: the weight times exactly one
        assert torch.equal(alone, expected.expand_as(alone))


def weights_of_row(
    plain: nn.Module,
    converted: nn.Module,
    method: str,
    case: LayerCase,
    block: int,
    row: int,
) -> nn.Module:
    """A copy of the plain model with the weights that one row of a block sees, spelled out element by element."""
    out = copy.deepcopy(plain)
    layers = dict(out.named_modules())
    for name, layer in converted.named_modules():
        for site, posterior in (
            layer.posterior.items() if isinstance(layer, Converted) else ()
        ):
            target = layers[name]
            weight, bias = (
                case.own(target, site)
                if isinstance(layer, BayesLayer)
                else (None, None)
            )
            spread = partial(
                case.spread, target, None if weight is None else weight.shape
            )
            with torch.no_grad():
                offset = ANSWERS[method].write(
                    Target(target, weight, bias, spread, block, row), posterior
                )
                if offset is not None:
                    assert bias is not None
                    bias.add_(offset)
    return out


def _row(x: Tensor, i: int, dim: int) -> Tensor:
    return x.narrow(dim, i, 1)


@holds_for(SPELLED)
def test_every_row_of_a_folded_batch_equals_a_plain_model_with_that_draws_weights(
    method: str, layer: str
) -> None:
    case = LAYERS[layer]
    plain, x = case.make().double(), case.input()
    x = x.double() if x.is_floating_point() else x
    model = convert(copy.deepcopy(plain), method, case)
    for posterior in posteriors_of(model):
        ANSWERS[method].vary(posterior)
    layout, draws = (
        layout_of(model, (x,), {}, posteriors_of(model)),
        2 * sb.members(model),
    )
    assert layout.folds
    new = passes.Pass(draws, draws * case.rows, rowwise=layout.rowwise)
    noise.draw(posteriors_of(model), new)
    sampled = main_output(
        calls.run_draws(model, posteriors_of(model), (x,), {}, new, layout, folds=True)
    )
    rtol, atol = ANSWERS[method].tolerance
    own = passes.run(
        new,
        lambda: ANSWERS[method].rowwise or any(p.per_row for p in posteriors_of(model)),
    )
    for draw in range(len(sampled)):
        for rows in (
            range(case.rows) if own else [None]
        ):  # rows that share their weights are run together
            first = draw * case.rows + (rows or 0)
            plain_draw = passes.run(
                new, weights_of_row, plain, model, method, case, draw, first
            )
            inputs, found = (
                t if rows is None else _row(t, rows, case.batch_dim)
                for t in (x, sampled[draw])
            )
            torch.testing.assert_close(
                found, main_output(plain_draw(inputs)), rtol=rtol, atol=atol
            )


@holds_for(BAYESIAN)
def test_a_held_draw_is_the_same_function_folded_or_alone(
    method: str, layer: str
) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case), case.input()
    dim = case.batch_dim
    with sb.fixed_draws(model, 4):
        together = main_output(sb.sample(model, x))
        rows = [
            main_output(sb.sample(model, _row(x, i, dim))) for i in range(case.rows)
        ]
    out_dim = 1 if dim == 0 else 2
    torch.testing.assert_close(together, torch.cat(rows, out_dim), rtol=1e-4, atol=1e-5)


@holds_for([p for p in BAYESIAN if not DROPS(p)])
def test_every_posterior_parameter_gets_a_gradient(method: str, layer: str) -> None:
    case = LAYERS[layer]
    model = convert(case.make(), method, case)
    draws = (
        12 if (method, layer) in PICKED else 1
    )  # enough for every component to be picked
    main_output(
        sb.sample(model, case.input(), draws=draws * sb.members(model))
    ).square().sum().backward()
    for name, parameter in model.named_parameters():
        if ".posterior." in f".{name}" and not case.looks_up:
            assert (
                parameter.grad is not None
                and parameter.grad.isfinite().all()
                and parameter.grad.any()
            ), name
    if case.looks_up:  # words that were not looked up have none
        assert all(
            parameter.grad.any()
            for p in posteriors_of(model)
            for parameter in p.parameters()
        )


@holds_for(PICKED)
def test_kl_of_picked_components_is_eq_8(method: str, layer: str) -> None:
    case, config = LAYERS[layer], METHODS[method]
    model = convert(case.make(), method, case)
    tau = config.tau
    rho = tau if config.rho is None else config.rho
    total = 0.0
    for module in model.modules():
        for site, posterior in (
            module.posterior.items() if isinstance(module, BayesLayer) else ()
        ):
            if posterior.logits is not None:
                nn.init.normal_(posterior.logits)
            linear, p = module.linear_map(site), posterior.probabilities().tolist()
            kept = 1 - p[-1] if posterior.config.zero else 1.0
            weights = [
                linear.weight / kept,
                *(posterior.weight if posterior.weight is not None else ()),
            ]
            total += sum(
                tau / 2 * pk * w.detach().double().square().sum().item()
                for pk, w in zip(p, weights, strict=False)
            )
            if posterior.site.bias:
                biases = [
                    linear.bias,
                    *(posterior.bias if posterior.bias is not None else ()),
                ]
                shares = [1.0] if len(biases) == 1 else p
                total += sum(
                    rho / 2 * pk * b.detach().double().square().sum().item()
                    for pk, b in zip(shares, biases, strict=True)
                )
            if posterior.logits is not None:
                picks = (
                    1
                    if "ecmp" not in method
                    else weights[0].numel()
                    + (linear.bias.numel() if posterior.site.bias else 0)
                )
                total += picks * sum(pk * math.log(pk * len(p)) for pk in p)
    assert sb.kl(model).item() == pytest.approx(total, rel=1e-5)


@holds_for(CONTINUOUS)
def test_kl_is_the_average_log_ratio_and_zero_at_the_prior(
    method: str, layer: str
) -> None:
    """By densities that are written down here where there are some, and by what the library says of its own draws."""
    case, draws = LAYERS[layer], 2000
    model = convert(case.make(), method, case)
    modules = [m for m in model.modules() if isinstance(m, BayesLayer)]
    found = [
        d
        for m in modules
        for site, p in m.posterior.items()
        for d in ANSWERS[method].densities(p, m, site)
    ]
    value = sb.kl(model).item()
    assert value > 0
    mean = variance = 0.0
    for q, p, _ in found:
        x = q.rsample(torch.randn(draws, *q.loc.shape)).detach()
        ratio = (q.log_prob(x) - p.log_prob(x)).flatten(1).sum(1).double()
        mean, variance = (
            mean + ratio.mean().item(),
            variance + ratio.var().item() / draws,
        )
    variance *= (
        2 if method == "flow-patch" else 1
    )  # its KL is an average over as many draws
    assert not found or abs(value - mean) < 5 * math.sqrt(variance)
    ratios = own_log_ratios(model, 200)
    assert found or ratios is not None, (
        "a density in answers.py, or the posterior's own log_ratio"
    )
    if ratios is not None:
        variance += ratios.var(1).sum().item() / ratios.shape[1]
        assert abs(value + ratios.mean(1).sum().item()) < 5 * math.sqrt(variance)
    for _, _, move in found:
        move()
    if found and type(found[0][0]) is type(found[0][1]):
        assert abs(sb.kl(model).item()) < 1e-5 * value


def own_log_ratios(model: nn.Module, draws: int) -> Tensor | None:
    """log p - log q of draws of each member (K, n), as the posteriors say themselves; None if one does not."""
    with sb.fixed_draws(model, draws * sb.members(model)):
        own = [p.log_ratio() for p in posteriors_of(model)]
    return (
        None
        if any(ratio is None for ratio in own)
        else sum(own).view(draws, -1).T.detach()
    )


@holds_for(RANDOM)
def test_same_seed_same_output_and_draws_differ_in_eval_too(
    method: str, layer: str
) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case).eval(), case.input()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return main_output(sb.sample(model, x, draws=12))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    once = run(1)[
        :: sb.members(model)
    ]  # six draws of member 0, of which two may pick the same component
    assert not torch.allclose(once[:1].expand_as(once), once, atol=1e-6)


@holds_for(PAIRS)
def test_save_and_load_round_trip_exactly(
    method: str, layer: str, tmp_path: Any
) -> None:
    case = LAYERS[layer]
    plain = case.make()
    model = convert(copy.deepcopy(plain), method, case)
    again = sb.load(copy.deepcopy(plain), sb.save(model, tmp_path / "posterior"))
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            again.state_dict().values(), model.state_dict().values(), strict=True
        )
    )
    x = case.input()
    torch.manual_seed(3)
    first = main_output(sb.sample(model, x))
    torch.manual_seed(3)
    assert torch.equal(first, main_output(sb.sample(again, x)))


@pytest.mark.slow
@holds_for(COMPILED)
def test_compiles_as_one_graph(
    method: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = LAYERS[layer]
    model, x = convert(case.make(), method, case), case.input()
    monkeypatch.setattr(
        torch._dynamo.config, "allow_rnn", True
    )  # off by default for torch's own recurrent layers
    torch._dynamo.reset()
    # Methods are compiled further than traced. Layers are torch's own, whose LSTM kernel aot_autograd cannot export.
    backend = (
        "aot_eager" if layer in COMPILED_LAYERS and method not in TRACED else "eager"
    )
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.manual_seed(0)
    expected = main_output(sb.sample(model, x))
    torch.manual_seed(0)
    torch.testing.assert_close(
        main_output(sb.sample(compiled, x)), expected, rtol=1e-4, atol=1e-5
    )
    inside = layer in COMPILED_LAYERS and method not in SAME_BARE_GRAPH
    if inside and bare.needs_rows(
        posteriors_of(model)
    ):  # else a bare call is one more draw
        assert main_output(compiled(x)).shape == main_output(model(x)).shape
    if (method, layer) in RANDOM and not isinstance(
        METHODS[method], sb.ModelPatch
    ):  # which may pick alike
        assert not torch.equal(main_output(sb.sample(compiled, x)), expected), (
            "the graph holds its noise"
        )


@holds_for(PAIRS)
def test_half_precision_is_finite(method: str, layer: str) -> None:
    case = LAYERS[layer]
    x = case.input()
    half = convert(case.make().bfloat16(), method, case)
    y = main_output(sb.sample(half, x.bfloat16() if x.is_floating_point() else x))
    assert y.dtype == torch.bfloat16
    assert all(
        p.dtype == torch.float32 for p in half.parameters() if p.dtype != torch.bfloat16
    )
    model = convert(case.make(), method, case)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            plain = main_output(case.make()(x))
        except RuntimeError as error:
            pytest.skip(
                f"torch itself cannot run this layer in bfloat16 on this CPU: {str(error)[:60]}"
            )
        cast = main_output(sb.sample(model, x))
    if not case.mixes_types:
        assert cast.dtype == plain.dtype
    for converted, output in ((half, y), (model, cast)):
        assert output.isfinite().all()
        assert sb.kl(converted).dtype == torch.float32 and sb.kl(converted).isfinite()


@holds_for(PAIRS)
def test_parameter_count_is_the_papers_formula(method: str, layer: str) -> None:
    case, config = LAYERS[layer], METHODS[method]
    plain = case.make()
    before = sum(p.numel() for p in plain.parameters())
    cost = sb.estimate_cost(
        plain, config, include=(lambda n, m: True) if config.converts else None
    )
    model = convert(plain, method, case)
    extra = (
        before
        if config.whole
        else sum(ANSWERS[method].count(matrix) for matrix in case.matrices)
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
    inner, config = f"a.{case.inner}" if case.inner else "a", METHODS[method]
    if config.whole:
        inner = ""
        assert set(rows) == {""}
    else:
        assert set(rows) == {inner, "norm"}
        norms = "norm" in config.covers and not isinstance(
            config, sb.MemberNorm
        )  # it is for batch norm alone
        assert (
            rows["norm"].status == ("converted" if norms else "skipped")
            and rows["norm"].detail
        )
    assert rows[inner].status == ("converted" if config.converts else "skipped")
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
    assert {
        cls for cls in known if cls.__module__.startswith(("torch", "transformers"))
    } <= covered
    assert set(methods.values()) <= {type(config) for config in METHODS.values()}
    assert LayerCase
