"""Tells from names and shapes which network a set of weights belongs to, and with which options."""

from tools.convert_torch_weights.mappings import NETWORKS
from tools.convert_torch_weights.mappings.network import Findings, Recognised, Shapes

__all__ = ["Recognised", "Shapes", "recognise", "title", "version"]


def recognise(shapes: Shapes) -> Recognised:
    """Names the network that has tensors of these names and shapes."""
    for network in NETWORKS.values():
        if network.signature in shapes:
            found = Findings(shapes, [f"model {network.name}: only it has {network.signature}"])
            network.derive(found)
            return Recognised(network.name, found.options, tuple(found.reasons))
    return Recognised(None, {}, ("no known network has tensors of these names",))


def title(found: Recognised, shapes: Shapes) -> str:
    """What the weights are, in words."""
    if found.model is None:
        return "no network that is known here"
    words = NETWORKS[found.model].title
    return words if isinstance(words, str) else words(found, shapes)


def version(found: Recognised, shapes: Shapes) -> str | None:
    """The release that the weights are of ("v1.5"), where its network has several."""
    return NETWORKS[found.model].version(found, shapes) if found.model else None
