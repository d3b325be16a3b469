"""Bytes that a compiled training step moves, by the compiler's own plan of it: no GPU is needed to read that.

    python benchmarks/traffic.py [--only "rank-1 split"]

WRN-16-4, 32 images, bfloat16 autocast, forward and backward pass: what every kernel reads and writes, convolutions
included, as inductor has fused them, by its defaults for a GPU and by those of `sb.compiled`. Ratios are to the plain
network by the defaults. Written for torch 2.13, on whose inner functions it calls.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import slimbayes_lab.models
import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V

import slimbayes as sb
from slimbayes.train.recorded import FUSION

ROWS = 32
DEFAULTS = {
    "realize_reads_threshold": 4,
    "realize_acc_reads_threshold": 8,
    "realize_opcount_threshold": 30,
}
START = sb.Normal(1.0, 0.5)
CASES: dict[str, tuple[Any, str]] = {
    "plain": (None, ""),
    "rank-1 split": (
        sb.Rank1(members=4, prior=sb.Normal(1.0, 0.1), mean_init=START),
        "split",
    ),
    "BatchEnsemble split": (sb.BatchEnsemble(members=4, mean_init=START), "split"),
    "EMP": (
        sb.ModelPatch(components=5, patch="norm+output", draws="example", tau=None),
        "tile",
    ),
    "2-tied flipout": (sb.KTied(rank=2, estimator="flipout"), "tile"),
}


def counted(seen: list[int]) -> Callable[..., Any]:
    """A backend that fuses as inductor does, notes the bytes of each kernel, and runs the graph without it."""

    def plan(
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        is_backward: bool = False,
        **how: Any,
    ) -> Any:
        fake = compile_fx.fake_tensor_prop(graph, inputs)
        compile_fx.view_to_reshape(graph)
        with V.set_fake_mode(fake):
            post_grad_passes(graph, bool(how.get("is_inference")))
        compile_fx.record_original_output_strides(graph)
        lowered = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=shape_env_from_inputs(inputs),
            is_backward=is_backward,
        )
        debug = DebugContext()
        with (
            V.set_graph_handler(lowered),
            V.set_real_inputs(inputs),
            V.set_fake_mode(fake),
            V.set_debug_handler(debug),
        ):
            lowered.run(*inputs)
            lowered._update_scheduler()
            seen.extend(
                node.get_read_write_buffers_sizes() for node in lowered.scheduler.nodes
            )
        return make_boxed_func(graph.forward)

    return lambda graph, inputs: compile_fx.compile_fx(
        graph, inputs, inner_compile=plan
    )


def traffic(config: Any, rows: str) -> int:
    """Bytes of a step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: nn.Module = slimbayes_lab.models.wrn(16, 4, 10)
    net = net if config is None else sb.bayesianize(net, config)
    net = net.to(memory_format=torch.channels_last)
    x, seen = (
        torch.randn(ROWS, 3, 32, 32).contiguous(memory_format=torch.channels_last),
        [],
    )
    call = torch.compile(net, backend=counted(seen), dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(x) if config is None else sb.sample(call, x, rows=rows)
    out.float().square().mean().backward()
    return sum(seen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="one method beside the plain network")
    only = parser.parse_args().only
    plain = 0
    print(
        "| | MB, defaults | of plain | MB, sb.compiled | of plain |\n|---|---:|---:|---:|---:|"
    )
    for name, case in CASES.items():
        if only in (None, name) or name == "plain":
            found = []
            for settings in (
                DEFAULTS,
                {key: value for key, value in FUSION.items() if key in DEFAULTS},
            ):
                with inductor.patch(settings):
                    found.append(traffic(*case))
            plain = plain or found[0]
            cells = (f"{one / 1e6:.0f} | {one / plain:.2f}" for one in found)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
