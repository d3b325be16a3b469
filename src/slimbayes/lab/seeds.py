"""Randomness as a pure function of where it is used: nothing to save, so a run resumes bit for bit at any step.

seed_everything(seed, "step", 1200)      before step 1200, and every draw of that step follows
"""

import torch

from slimbayes.engine.noise import key as key


def seed_everything(seed: int, *place: object) -> None:
    """Set torch's generators, of all devices, for one place of a run; alike in all its processes, whose passes draw
    numbers of their own from it all the same."""
    number = key(seed, *place)
    if torch.cuda.is_initialized():
        torch.manual_seed(number)
    else:  # torch.manual_seed notes the call for each kind of device that may start later: a tenth of a small step
        torch.default_generator.manual_seed(number)


def generator(seed: int, *place: object) -> torch.Generator:
    """A CPU generator for one place of a run."""
    return torch.Generator("cpu").manual_seed(key(seed, *place))
