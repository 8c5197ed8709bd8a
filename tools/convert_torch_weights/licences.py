"""Licence notes for model cards. Code and weights are under different licences."""

CODE = "pid_jax: Apache-2.0"

NVIDIA = ("NVIDIA's released PixelDiT and PiD weights are not under the licence of this code: "
          "they are published under the NVIDIA License (NSCLv1), which is non-commercial. "
          "Converting does not change that. Read the licence on the page where you got the file; "
          "weights that you trained yourself are yours.")
UNKNOWN = ("The weights keep the licence under which they were published; this converter does not "
           "know it. Check the page that you downloaded from.")


def licence_note(weights: str) -> dict[str, str]:
    """{"code": ..., "weights": ...} for weights under the note `weights`."""
    return {"code": CODE, "weights": weights}
