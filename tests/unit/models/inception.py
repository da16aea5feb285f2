"""FID's Inception V3 with values nobody trained."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch_fidelity import FeatureExtractorInceptionV3, feature_extractor_inceptionv3


@cache
def untrained_inception() -> FeatureExtractorInceptionV3:
    """Return the network as torch-fidelity makes it, without the file that it would download."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_extractor_inceptionv3, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        return FeatureExtractorInceptionV3("fid", ["2048"])
