"""Randomness as a pure function of where it is used: nothing to save, so a run resumes bit for bit at any step.

seed_everything(seed, "step", 1200)      before step 1200, and every draw of that step follows
"""

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
    """Set torch's generators, of all devices, for one place of a run.

    All processes of a run use the same seeds: a pass draws the numbers of every process and takes its own share.
    """
    torch.manual_seed(key(seed, *place))


def generator(seed: int, *place: object) -> torch.Generator:
    """A CPU generator for one place of a run."""
    return torch.Generator("cpu").manual_seed(key(seed, *place))
