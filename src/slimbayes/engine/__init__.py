"""How a draw meets a model: passes and their noise, where rows lie, and the proof of it.

A call, from the outside in:

    calls       opens a pass: for a bare call, a method, `sample`; runs draws folded into one forward, or one by one
    bare        passes of bare calls and of methods, whose rows share out the members
    locate      finds the layout of a call: kept with the model, proven once for each kind of input
    layout      where rows lie in inputs, outputs and layers; tensors in nested inputs
    objects     what is no tensor: caches of keys and values, distributions, objects of somebody's
    passes      the pass under way: which row gets which draw
    noise       the standard normals behind its draws, and the seeds behind these
    modules     the posteriors under a module, and what was planned for them
    rows        linear maps whose rows have different draws; `fused` does it by kernels, `blocks` cuts rows
    sharing     modules that run before any draw is used: once for all draws

The proof of a layout:

    proof       the runs, and what is compared
    trial       one run of the plain model
    probe       what converted layers meet in it
    quiet       nothing random in it
    state       nothing left behind by it: what modules keep from call to call; `holders` are where they keep it
"""
