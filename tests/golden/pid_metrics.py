"""Group J: image metrics."""

from pid_jax.evaluation import image_metrics
from tests.golden.cases import Case, assert_close, handles


@handles("pid", r"J01.*")
def check_image_metrics(case: Case) -> None:
    target, prediction, lq = (case.inputs[f"{name}_uint8_hwc"] for name in ("target", "pred", "lq"))
    actual = {
        "psnr": image_metrics.psnr(prediction, target),
        "de2000_same_size": image_metrics.lq_color_de2000(prediction, target),
        "de2000_pred_vs_lq": image_metrics.lq_color_de2000(prediction, lq),
    }
    for name, value in actual.items():
        assert_close(value, case.meta[name], case.tolerance["atol"], name=name)
