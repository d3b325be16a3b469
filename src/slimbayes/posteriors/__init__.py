"""One file per method: a Config and a Posterior. METHODS is the closed list that configs are read back from."""

from typing import Any

from slimbayes.errors import did_you_mean
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.deterministic import Deterministic
from slimbayes.posteriors.drop_connect import DropConnect
from slimbayes.posteriors.ensemble import Ensemble
from slimbayes.posteriors.k_tied import KTied, MatrixNormal
from slimbayes.posteriors.mc_dropout import MCDropout
from slimbayes.posteriors.mean_field import MeanField
from slimbayes.posteriors.member_norm import MemberNorm
from slimbayes.posteriors.mixture import Mixture
from slimbayes.posteriors.model_patch import ModelPatch
from slimbayes.posteriors.rank1 import BatchEnsemble, Rank1

METHODS: dict[str, type[Config]] = {
    c.__name__: c
    for c in (
        Rank1,
        BatchEnsemble,
        MeanField,
        KTied,
        MatrixNormal,
        ModelPatch,
        MCDropout,
        DropConnect,
        Ensemble,
        Mixture,
        MemberNorm,
        Deterministic,
    )
}


def config_from_dict(data: dict[str, Any]) -> Config:
    """Build the config of any method from its JSON form.

    >>> config_from_dict({"kind": "BatchEnsemble", "members": 8}).members
    8
    """
    method = data.get("kind")
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}{did_you_mean(str(method), METHODS)}")
    return METHODS[method].from_dict(data)
