"""Seeds for places of a run: equal places give equal numbers, so a run resumes bit for bit at any step."""

import hashlib

import torch


def key(seed: int, *place: object) -> int:
    """A 63-bit seed for one place of a run; equal places give equal seeds, different ones independent ones.

    Example:
        >>> key(0, "step", 7) == key(0, "step", 7), key(0, "step", 7) == key(0, "step", 8)
        (True, False)
    """
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
