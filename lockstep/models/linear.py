"""Softmax regression on the pixels: images → logits, step 6 of the walk.

With weight decay on weights and bias its cross-entropy is strongly convex: the one network here whose optimum is known.
All weights start at zero, where every class is as likely.
"""

from torch import Tensor, nn

from lockstep.models.registry import register


class Linear(nn.Module):
    """One linear layer, `fc`, over all pixels of an image."""

    takes_half = True  # see `mixed.py`

    def __init__(self, num_pixels: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * num_pixels, num_classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(images.flatten(1))
        return logits


@register("linear")
def build_linear(num_classes: int, *, image_size: int) -> Linear:
    """Build it for square images of one size."""
    return Linear(image_size * image_size, num_classes)
