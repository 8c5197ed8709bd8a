"""Golden cases of the family ditok that are about data: ADM's centre crop."""

import numpy as np
from PIL import Image

from pid_jax.data.geometry import center_crop
from tests.golden.cases import Case, assert_close, handles


@handles("ditok", r"center_crop.*")
def check_center_crop(case: Case) -> None:
    for run in sorted({name.split("/")[0] for name in case.inputs}):
        inputs = case.under(f"in/{run}/")
        cropped = np.asarray(center_crop(Image.fromarray(inputs["image"]), int(inputs["size"][0])))
        for name, expected in case.under(f"out/{run}/").items():
            assert_close(cropped, expected, case.tolerance["atol"], name=f"{run}/{name}")
